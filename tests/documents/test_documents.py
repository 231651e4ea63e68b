"""Every command of the documents runs as printed, in order, page by page, each page in a fresh folder."""

import contextlib
import json
import re
import sqlite3
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import soundfile

from tests.documents import commands, world
from tests.documents.pages import blocks, documents
from tests.helpers.collected import write_collected
from titan_tts.annotate.segments import Desk, read_segments
from torchtitan.models.dit_tts.files import JsonLines

pytestmark = pytest.mark.documents

# What the reader of a page has, which the page does not make.
ASSUMED = {
    "README.md": "/data/recordings",
    "docs/ablations.md": "outputs/my_grid outputs/debug",
    "docs/checkpoints.md": "outputs/NAME outputs/debug outputs/data /data/ready",
    "docs/collect.md": "/data/podcasts /data/ready outputs/base",
    "docs/convert.md": "/models/irodori /models/tokenizer /models/dacvae voice.wav",
    "docs/codec.md": "/data/speech /models/dacvae dacvae outputs/NAME voice.wav",
    "docs/doctor.md": "outputs/data",
    "docs/evaluate.md": "outputs/NAME outputs/a outputs/b /data/ready",
    "docs/export.md": "outputs/debug outputs/mine outputs/data outputs/duration /data/new",
    "docs/fine_tune.md": "outputs/base /data/new /data/old recordings.jsonl voice.wav",
    "docs/generate.md": "voice voice.wav outputs/debug outputs/NAME outputs/data /data/ready",
    "docs/many_gpus.md": "/data/ready",
    "docs/monitor.md": "/data/recordings outputs/NAME outputs/data",
    "docs/prepare.md": "/data/LJSpeech-1.1 /data/LibriTTS_R /data/mine/train.jsonl "
    "/data/vctk.jsonl /data/emilia /data/hub/datasets--x--y/snapshots/1a2b/data",
    "docs/share.md": "outputs/data",
    "docs/text.md": "/data/recordings outputs/data",
    "docs/train_your_voice.md": "recordings.jsonl voice.jsonl voice.wav",
}


# Commands that are not run here, by why.
NOT_RUN = {"network": 22, "GPU": 9, "machines": 6, "minutes": 8, "here: it is this": 1}


@pytest.fixture(scope="session")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    hub = world.write_hub(folder / "hub")
    with commands.titan_tts(folder, **hub) as program:
        yield world.build(folder / "world", program, hub)


@pytest.fixture
def reader(request, here, tmp_path):
    """Who follows the page that the test has as its parameter, and leaves nothing beside its folder."""
    before = world.files_of_the_checkout()
    yield here.page(tmp_path, ASSUMED.get(request.param, "").split())
    assert world.files_of_the_checkout() == before


def read(reader: world.Reader, page: str, **variables: str) -> list[str]:
    """What each block of a page printed."""
    return [reader.run("\n".join(block.commands), **variables) for block in blocks(page)]


def losses(reader: world.Reader, name: str) -> list[float]:
    metrics = JsonLines(reader.folder / f"outputs/{name}/metrics.jsonl")
    return [row["loss"] for row in metrics.read()]


def trained(reader: world.Reader, name: str) -> None:
    """The run is complete and has kept what it trained."""
    run = reader.folder / "outputs" / name
    assert json.loads((run / "state.json").read_text())["state"] == "completed"
    assert list(run.glob("checkpoint/step-*/manifest.json"))


def speaks(reader: world.Reader, *names: str) -> None:
    """The files hold sound, and are of no other length than speech of a few words can be."""
    for name in names:
        samples, rate = soundfile.read(reader.folder / name)
        assert 0.2 < len(samples) / rate < 30 and abs(samples).max() > 1e-3, name


def evaluated(reader: world.Reader, test: str) -> None:
    """The utterances of an evaluation are of all speakers of the test data."""
    [path, *_] = reader.folder.rglob(f"*{Path(test).parent.name}-heldout*/evaluation.json")
    heard = {row["speaker"] for row in json.loads(path.read_text())["utterances"]}
    recorded = set()
    for shard in reader.path(test).glob("*.tar"):
        with tarfile.open(shard) as tar:
            recorded |= {
                json.load(tar.extractfile(member))["speaker"]
                for member in tar
                if member.name.endswith(".json")
            }
    assert heard == recorded


@contextlib.contextmanager
def served(reader: world.Reader, command: str) -> Iterator[str]:
    """The port of a server, which is not the printed one, as that may be taken."""
    server = reader.start(re.sub(r"--port \d+", "--port 0", command))
    too_late = threading.Timer(120, server.kill)  # which ends its output
    too_late.start()
    try:
        for line in server.stdout:
            if port := re.search(r"http://[\d.]+:(\d+)", line):
                too_late.cancel()
                yield port[1]
                break
        else:
            pytest.fail("it served nothing")
    finally:
        too_late.cancel()
        server.kill()
        server.wait()


def starts_from_the_base(reader: world.Reader, name: str, base: str) -> None:
    """Its first loss is near the base's last ones, not where random weights begin."""
    known = losses(reader, base)
    assert losses(reader, name)[0] < (known[0] + known[-1]) / 2


def test_what_is_not_run_is_counted():
    left_out = [pair for page in documents() for block in blocks(page) for pair in block.left_out]
    assert Counter(why for _, why in left_out) == NOT_RUN


_looked_at: set[str] = set()


def follows(*pages: str):
    _looked_at.update(pages)
    return pytest.mark.parametrize(
        "reader, page", [(each, each) for each in pages], indirect=["reader"]
    )


@follows("README.md")
def test_the_first_page(reader, page):
    main_job, listed, digits = [each for each in blocks(page) if each.commands]
    reader.run("\n".join(main_job.commands))
    speaks(reader, "hello.wav", "outputs/rms/hello.wav")
    assert (reader.folder / "outputs/rms/comparison.html").is_file()
    reader.run("\n".join(listed.commands))
    trained(reader, "mine")
    evaluated(reader, "/data/ready/heldout")
    reader.run("\n".join(digits.commands).replace("scratch.sh", "scratch.sh --training.steps 4"))
    trained(reader, "debug")
    assert list(reader.folder.glob("outputs/debug/evaluation/*/evaluation.html"))
    speaks(reader, "speech.wav", "two_four_six.wav")


@follows("docs/train_your_voice.md")
def test_the_way_to_a_voice(reader, page):
    read(reader, page)
    for name in ("mine", "mine300"):
        trained(reader, name)
    speaks(reader, "morning.wav")
    assert (reader.folder / "anna/evaluation/evaluation.html").is_file()


@follows("docs/collect.md")
def test_recordings_are_collected(reader, page):
    printed = reader.run("\n".join(blocks(page)[0].commands))
    assert printed.count("recordings  ") == 2 and "0 of them new" in printed
    lines = (reader.path("/data/collected") / "collection.jsonl").read_text().splitlines()
    assert {json.loads(line)["source"] for line in lines} == {"0.wav", "1.wav"}


@follows("docs/collect.md")
def test_what_is_annotated_is_trained_on(reader, page):
    _, listen, export, tune, recognizer = [each.commands for each in blocks(page)]
    folder = reader.path("/data/collected")
    write_collected(folder, [0.5] * 20)
    with served(reader, f"{listen[0]} --port 0"):  # and ended by SIGKILL
        with sqlite3.connect(folder / "annotations.sqlite") as connection:
            assert connection.execute("SELECT token FROM access").fetchone()[0]
        desk = Desk(folder / "annotations.sqlite", read_segments(folder))
        for _ in range(16):
            segment = desk.next()
            desk.judge(segment.id, "accept", "two four", "uh two four")
    assert "16 of 20 segments annotated, 0 rejected" in reader.run(export[0])
    reader.run(tune[0])
    prepared = json.loads((reader.folder / "anna/data/prepare.json").read_text())["summary"]
    assert prepared["train"]["samples"] + prepared["heldout"]["samples"] == 16
    assert "held-out rows:" in reader.run("\n".join(recognizer))
    assert (reader.folder / "my_whisper/model.safetensors").is_file()


@follows("docs/fine_tune.md")
def test_a_fine_tune_starts_from_the_weights(reader, page):
    read(reader, page)
    trained(reader, "tuned")
    starts_from_the_base(reader, "tuned", "base")
    speaks(reader, "morning.wav")
    for page_of in ("anna/evaluation", "kept/evaluation", "kept/forgotten"):
        assert (reader.folder / page_of / "evaluation.html").is_file()


@follows("docs/export.md")
def test_an_exported_folder_speaks_is_fine_tuned_and_served(reader, page):
    found = [each.commands for each in blocks(page)]
    exported, _, tuned, served_, captioned, guarded, *onnx = found
    assert onnx == [[], []]  # minutes, network
    reader.run("\n".join(exported))
    speaks(reader, "speech.wav")
    evaluated(reader, "outputs/data/spoken_digits/heldout")
    reader.run("\n".join(tuned))
    trained(reader, "tuned")
    starts_from_the_base(reader, "tuned", "debug")
    (reader.folder / "speech.wav").unlink()
    serve, ask = served_
    with served(reader, serve) as port:
        reader.run("\n".join([ask, *captioned]).replace(":8000", f":{port}"))
    speaks(reader, "speech.wav")
    words = json.loads((reader.folder / "captioned.json").read_text())["timestamps"]
    assert [each["word"] for each in words] == ["two", "four.", "six."]
    with served(reader, guarded[0]) as port:
        status = reader.run(
            f"curl -so no.wav -w '%{{http_code}}' -d '{{}}' http://127.0.0.1:{port}/v1/audio/speech"
        )
        assert status == "401"
        assert "Say it" in reader.run(f"curl -s http://127.0.0.1:{port}/")


@follows("docs/checkpoints.md")
def test_a_run_is_changed_and_branched_off(reader, page):
    mine = "titan-tts train one_gpu --data.path /data/ready/train --job.experiment mine"
    reader.run(mine, STEPS=str(world.BASE_STEPS))
    verified, *_ = read(reader, page, STEPS=str(world.BASE_STEPS + 2))
    assert f"step-{world.BASE_STEPS}: valid" in verified
    assert len(losses(reader, "mine")) == world.BASE_STEPS + 2
    trained(reader, "longer")
    # The optimizer's state, its schedule and the step go on, too.
    assert len(losses(reader, "longer")) == 2


@follows("docs/evaluate.md")
def test_evaluations_are_of_all_voices(reader, page):
    read(reader, page)
    evaluated(reader, "/data/ready/heldout")


@follows("docs/text.md")
def test_a_condition_is_given(reader, page):
    reader.run(
        "titan-tts prepare /data/recordings /data/ready --language en --heldout-fraction 0.05;"
        "titan-tts train debug --data.path /data/ready/train --data.conditioning language --job.experiment NAME"
    )
    read(reader, page)
    [sound] = reader.folder.glob("*.wav")
    speaks(reader, sound.name)


@follows("docs/generate.md")
def test_texts_are_said_and_a_student_speaks_by_itself(reader, page):
    read(reader, page)
    speaks(reader, "speech.wav", "speech.flac", "story.ogg", "played.wav", "there.wav", "fast.wav")
    speaks(reader, "speech/greeting.wav")
    for name in ("duration", "distill", "fast"):
        trained(reader, name)
    evaluated(reader, "/data/ready/heldout")


@follows(*[each for each in documents() if each not in _looked_at])
def test_any_other_page(reader, page):
    read(reader, page)
