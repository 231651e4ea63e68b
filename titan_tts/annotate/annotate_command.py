"""`titan-tts annotate`: a local page to correct the texts of segments."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from torchtitan.models.dit_tts.errors import InputError, check_range, require, require_modules, show

if TYPE_CHECKING:
    from titan_tts.annotate.segments import Desk


@dataclass(kw_only=True)
class Options:
    """Open a page to listen to segments and accept, correct or reject their texts.

    The edits are kept in a database next to the segments. On leaving the server the annotated collection.jsonl (of a
    manifest NAME.annotated.jsonl) is written.
    """

    output: tyro.conf.Positional[str]
    """Folder that `titan-tts collect` wrote, or a .jsonl file with audio and text."""

    export: bool = False
    """Only write the annotated collection.jsonl or NAME.annotated.jsonl."""

    tokens: str = "[S1],[S2],(laugh),(breath)"
    """Turns and events that the keys 1 to 9 insert into a text, separated by commas."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 also serves other machines."""

    port: int = 8010
    """Port to listen on; 0: a free one, which is printed."""


def run(options: Options) -> int:
    check_range("--port", options.port, 0, 2**16 - 1)
    tokens = list(filter(None, map(str.strip, options.tokens.split(","))))
    require(len(tokens) <= 9, f"--tokens = {options.tokens}: keys are 1 to 9; leave some out")
    from titan_tts.annotate.segments import Desk, read_segments, write_annotated
    from titan_tts.annotate.store import database_path
    from titan_tts.collect.collection import COLLECTION_NAME
    from titan_tts.collect.folder import RECORD_NAME

    target = Path(options.output)
    require(
        target.name != COLLECTION_NAME or not target.with_name(RECORD_NAME).exists(),
        f"{target} is made again by every titan-tts collect, without what is decided here; give its folder",
    )
    segments, path = read_segments(target), database_path(target)
    if options.export and not path.exists():
        raise InputError(f"{target} has no annotations; run titan-tts annotate without --export")
    desk = Desk(path, segments)
    if not options.export:
        _serve(options, target, desk, tokens)
    written, progress = write_annotated(target), desk.progress()
    counts = f"{progress['done']} of {progress['all']} segments annotated"
    show(f"{written}: {counts}, {progress['rejected']} rejected")
    return 0


def _serve(options: Options, target: Path, desk: "Desk", tokens: list[str]) -> None:
    require_modules("fastapi", "uvicorn", "soundfile")
    from titan_tts.annotate.app import build_app
    from titan_tts.launch.supervisor import interrupt_on_signals
    from titan_tts.serving.serve_command import listen, server

    listening = listen(options.host, options.port)
    settings = {"title": target.resolve().name, "tokens": tokens}
    app = build_app(target, desk, settings, options.host)
    listening.listen()  # clients may connect once the line is printed
    address = f"http://{options.host}:{listening.getsockname()[1]}/#{desk.token}"
    interrupt_on_signals()
    with suppress(KeyboardInterrupt):  # the usual end, from here on
        show(f"annotate {len(desk.segments)} segments at {address}")
        show("Ctrl-C ends the server and writes the annotated list")
        server(app).run([listening])
