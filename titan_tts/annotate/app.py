"""The annotation server's answers. All but the page itself, which holds no data, need the token of the page's address,
so that no other page in the browser and no other machine can ask."""

import re
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

import torch
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, field_validator

from titan_tts.annotate.segments import Desk, Segment, load_audio
from titan_tts.annotate.store import Edit
from titan_tts.records.json_lines import is_utf8
from titan_tts.report.page import STYLE
from titan_tts.serving.refusals import BodyLimit, HostCheck, KeyCheck, Refusal, add_refusals
from torchtitan.models.dit_tts.speech.audio import to_mono
from torchtitan.models.dit_tts.speech.sampling.sound_files import encoded

_PAGE = Path(__file__).with_name("page.html")
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; media-src blob:; "
    "frame-ancestors 'none'"
)
_FACTS = ("agreement", "speaker", "language", "source", "quality", "snr_db")


class Judgement(BaseModel):
    segment: str
    action: Literal["accept", "reject", "skip"]
    text: str
    text_verbatim: str | None = None

    @field_validator("*")
    @classmethod
    def is_text(cls, value: str | None) -> str | None:
        if not is_utf8(value or ""):
            raise ValueError("half a surrogate pair, which is not a character")
        return value


def build_app(
    target: Path, desk: Desk, settings: dict[str, Any], host: str = "127.0.0.1"
) -> FastAPI:
    """The application. `settings`: title and tokens, for the page. `host`: where it listens."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_refusals(app)
    app.add_middleware(BodyLimit, limit=2**20)
    app.add_middleware(KeyCheck, key=desk.token)
    app.add_middleware(HostCheck, host=host)

    def find(segment: str) -> Segment:
        if segment not in desk.segments:
            raise Refusal(404, f"there is no segment {segment!r}", "segment_not_found")
        return desk.segments[segment]

    def answer(of: Segment | None, undone: Edit | None = None) -> dict[str, Any]:
        if of is None:
            return {"segment": None, "progress": desk.progress()}
        shown, (clean, verbatim) = undone or of, differences(of.text, of.text_verbatim or "")
        segment = {
            "id": of.id,
            "recognized": {"text": of.text, "text_verbatim": of.text_verbatim},
            "heard": {"text": clean, "text_verbatim": verbatim},
            "texts": {"text": shown.text, "text_verbatim": shown.text_verbatim},
            "undone": undone and undone.action,
            "facts": {name: of.labels.get(name) for name in _FACTS},
        }
        return {"segment": segment, "progress": desk.progress()}

    @app.get("/")
    def page() -> HTMLResponse:
        style = STYLE.read_text(encoding="utf-8")
        content = _PAGE.read_text(encoding="utf-8").replace("/* page_style */", style)
        return HTMLResponse(content, headers={"Content-Security-Policy": _POLICY})

    @app.get("/v1/settings")
    def get_settings() -> dict[str, Any]:
        return settings

    @app.post("/v1/next")
    def next_segment() -> dict[str, Any]:
        return answer(desk.next())

    @app.post("/v1/judge")
    def judge(body: Judgement) -> dict[str, Any]:
        desk.judge(find(body.segment).id, body.action, body.text, body.text_verbatim)
        return answer(desk.next())

    @app.post("/v1/undo")
    def undo() -> dict[str, Any]:
        return answer(*desk.undo())

    @app.get("/v1/audio")
    def audio(segment: str) -> Response:
        found = load_audio(target, find(segment))
        sound = torch.from_numpy(to_mono(found.samples))
        return Response(encoded(sound, found.rate, "wav"), media_type="audio/wav")

    return app


def differences(first: str, second: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Each text in runs of words, with whether a run differs from the other text; case and punctuation do not differ.

    Of texts without blanks, such as Chinese ones, every character is a word.
    """
    gap = " " if " " in first + second else ""
    a, b = (text.split() if gap else list(text) for text in (first, second))
    plain = [[re.sub(r"[^\w'’]", "", word).lower() for word in words] for words in (a, b)]
    runs: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([], [])
    for kind, *place in SequenceMatcher(None, plain[0], plain[1], autojunk=False).get_opcodes():
        for found, words in zip(runs, (a[slice(*place[:2])], b[slice(*place[2:])])):
            found += [(gap.join(words), kind != "equal")] if words else []
    return runs
