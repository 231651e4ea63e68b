"""The demo's page, through its own client."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import torch

from tests.helpers.hosts import status_of
from titan_tts.speak.utterance import Utterance, Voice
from torchtitan.models.dit_tts.errors import InputError

pytest.importorskip("gradio", reason="the extra serve is not installed")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def address(synthesizer, monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    from titan_tts.serving.page import build_page
    from titan_tts.serving.served import Served

    synthesizer.speech_data.default_voice = "ann"
    page = build_page(Served(synthesizer, {"aa": Voice(torch.ones(2, 8))}, 100), "tiny", 5)
    yield page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)[1]
    page.close()


def test_what_the_page_answers(address, synthesizer, tmp_path, monkeypatch):
    from gradio_client import Client

    client = Client(address, verbose=False, download_files=str(tmp_path / "files"))
    api = client.view_api(return_format="dict")["named_endpoints"]["/say"]
    defaults = [each["parameter_default"] for each in api["parameters"]]
    assert (defaults[-1], defaults[1]) == (5, "ann")

    def answer(text, speed=1.0, voice="ann", knobs=(2, 0.0, 0.0, 0)):
        return client.predict(text, voice, None, speed, *knobs, api_name="/say")

    sound, picture, about = answer("one two")
    samples, rate = soundfile.read(sound)
    frames = synthesizer.frames([Utterance("one two", synthesizer.speaker("ann"))])[0]
    assert len(samples) / rate == pytest.approx(frames / 25)
    assert picture["plot"].startswith("data:image")
    assert about == f"{len(samples) / rate:.2f} s in 1 piece"
    slow, _, _ = answer("one two", 0.5)
    assert len(soundfile.read(slow)[0]) == pytest.approx(2 * len(samples), abs=4)
    synthesizer.run.config.data.max_frames = 4
    speak, given = synthesizer.speak, []
    monkeypatch.setattr(synthesizer, "speak", lambda *a: given.append(a) or speak(*a))
    for voice, reference in (("aa", 2), ("(any)", 0)):
        answer("one", voice=voice, knobs=(3, 0.5, 1.5, 9))
        [said], *knobs = given.pop()
        scales = {"steps": 3, "text_scale": 0.5, "speaker_scale": 1.5}
        assert knobs == [9, replace(synthesizer.sampling, **scales)]
        assert len(said.voice.latents(synthesizer.run.config.data)) == reference
    # Pieces of a long text are synthesized in batches.
    monkeypatch.setattr("titan_tts.serving.page._BATCH", 2)
    *_, about = answer("One two one. Two one two. One one. Two two.")
    sizes = [len(utterances) for utterances, *_ in given]
    assert max(sizes) == 2 and about.endswith(f"{sum(sizes)} pieces")
    answer("one", knobs=(2, 0.0, 0.0, None))  # somebody has emptied the field of the seed
    assert given.pop()[1] == 0
    with pytest.raises(Exception, match="at most 100"):
        answer("one " * 25 + "t")


def test_the_demo_has_a_folder_of_its_own(monkeypatch, synthesizer):
    """Gradio's default, /tmp/gradio, belongs to whoever came first."""
    from titan_tts.serving import demo_command, page, served

    monkeypatch.setenv("GRADIO_TEMP_DIR", "")  # so that it is restored
    monkeypatch.delenv("GRADIO_TEMP_DIR")
    monkeypatch.setattr("titan_tts.launch.supervisor.interrupt_on_signals", lambda: None)
    monkeypatch.setattr(served, "load_synthesizer", lambda *_: synthesizer)
    seen = []

    original = page.build_page

    def build_page(*given):
        assert original(*given).delete_cache == (3600, 3600)  # or the disk fills
        assert given == (served.Served(synthesizer, {}, 4096), "voice", 5)
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        seen.append((folder, folder.stat().st_mode & 0o777, folder.stat().st_uid))
        raise InputError("enough")

    monkeypatch.setattr(page, "build_page", build_page)
    with pytest.raises(InputError, match="enough"):
        demo_command.run(demo_command.Options(run="voice", seed=5))
    ((folder, mode, owner),) = seen
    assert (mode, owner) == (0o700, os.getuid()) and not folder.exists()


def test_the_demo_refuses_names_of_others(monkeypatch, synthesizer, tmp_path):
    import gradio

    from titan_tts.serving import demo_command, served

    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(served, "load_synthesizer", lambda *_: synthesizer)
    found = []

    def block_thread(page):
        url = f"http://127.0.0.1:{page.server_port}"
        found.extend(status_of(url, host, "/") for host in ("localhost", "evil.example"))

    monkeypatch.setattr(gradio.Blocks, "block_thread", block_thread)
    demo_command._serve(demo_command.Options(run="voice", port=0))
    assert found == [200, 403]
