"""The demo's page: through its own client, and as a user in a browser."""

import io
import os
from pathlib import Path

import pytest
import soundfile

from tests.helpers.browser import browse
from titan_tts.speak.utterance import Utterance
from torchtitan.models.dit_tts.errors import InputError

pytest.importorskip("gradio", reason="the extra serve is not installed")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def address(synthesizer, monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    from titan_tts.serving.page import build_page

    page = build_page(synthesizer, {}, 100, "tiny", 5)
    yield page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)[1]
    page.close()


def seconds_of(synthesizer, text, voice):
    return synthesizer.frames([Utterance(text, synthesizer.speaker(voice))])[0] / 25


def test_what_the_page_answers(address, synthesizer, tmp_path, monkeypatch):
    from gradio_client import Client

    client = Client(address, verbose=False, download_files=str(tmp_path / "files"))
    api = client.view_api(return_format="dict")["named_endpoints"]["/say"]
    assert api["parameters"][-1]["parameter_default"] == 5

    def answer(text, speed=1.0):
        return client.predict(text, "ann", None, speed, 2, 0.0, 0.0, 0, api_name="/say")

    sound, picture, about = answer("one two")
    samples, rate = soundfile.read(sound)
    assert len(samples) / rate == pytest.approx(seconds_of(synthesizer, "one two", "ann"))
    assert picture["plot"].startswith("data:image") and about.endswith("1 piece")
    slow, _, _ = answer("one two", 0.5)
    assert len(soundfile.read(slow)[0]) == pytest.approx(2 * len(samples), abs=4)
    # Pieces of a long text are synthesized in batches.
    from titan_tts.serving import page

    synthesizer.run.config.data.max_frames = 4
    speak, batches = synthesizer.speak, []
    monkeypatch.setattr(page, "_BATCH", 2)
    monkeypatch.setattr(
        synthesizer, "speak", lambda some, *a: batches.append(len(some)) or speak(some, *a)
    )
    *_, about = answer("One two one. Two one two. One one. Two two.")
    assert max(batches) == 2 and about.endswith(f"{sum(batches)} pieces")
    for text, words in ((" ", "empty"), ("one " * 40, "at most 100")):
        with pytest.raises(Exception, match=words):
            answer(text)


def test_the_demo_has_a_folder_of_its_own(monkeypatch, synthesizer):
    """Gradio's default, /tmp/gradio, belongs to whoever came first."""
    from titan_tts.serving import demo_command, page
    from titan_tts.speak import sampling_options

    monkeypatch.setenv("GRADIO_TEMP_DIR", "")  # so that it is restored
    monkeypatch.delenv("GRADIO_TEMP_DIR")
    monkeypatch.setattr("titan_tts.launch.supervisor.interrupt_on_signals", lambda: None)
    monkeypatch.setattr(sampling_options, "load_synthesizer", lambda *_: synthesizer)
    seen = []

    def build_page(*given):
        assert given[-1] == 5
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        seen.append((folder, folder.stat().st_mode & 0o777, folder.stat().st_uid))
        raise InputError("enough")

    monkeypatch.setattr(page, "build_page", build_page)
    with pytest.raises(InputError, match="enough"):
        demo_command.run(demo_command.Options(run="voice", seed=5))
    ((folder, mode, owner),) = seen
    assert (mode, owner) == (0o700, os.getuid()) and not folder.exists()


TYPE = """(() => {
    const field = document.querySelector('#text textarea');
    const setter = Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, 'value').set;
    setter.call(field, 'one two one');
    field.dispatchEvent(new Event('input', {bubbles: true}));
    return true;
})()"""
LENGTH = "document.querySelector('#about textarea, #about input')?.value"
SOUND = "document.querySelector('#speech a[download], #speech audio')"


def test_type_generate_hear(address, synthesizer, tmp_path: Path):
    with browse(tmp_path / "profile") as page:
        page.open(address)
        page.wait_for(
            "!!document.querySelector('#text textarea') && !!document.querySelector('#say')"
        )
        page.run(TYPE)
        page.run("document.querySelector('#say').click()")
        wanted = seconds_of(synthesizer, "one two one", "bob")  # the last of the names
        assert page.wait_for(LENGTH).startswith(f"{wanted:.2f} s")
        source = page.wait_for(f"{SOUND}?.href || {SOUND}?.src")
        content = page.run(
            f"fetch({source!r}).then(r => r.arrayBuffer()).then(b => Array.from(new Uint8Array(b)))"
        )
        samples, rate = soundfile.read(io.BytesIO(bytes(content)))
        assert len(samples) / rate == pytest.approx(wanted)
        assert page.run("document.querySelectorAll('img[src]').length") >= 1  # the spectrogram
