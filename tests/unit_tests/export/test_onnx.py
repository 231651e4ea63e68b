"""`titan-tts export --onnx` and `titan_tts.onnx_voice`: torch's latents, without torch, from folders of anybody, and in a
browser."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.browser import tab
from tests.helpers.exported_run import export
from tests.helpers.hostile_files import fifo, put
from tests.helpers.sentences import refused
from titan_tts import from_pretrained, onnx_voice
from titan_tts.cli import main
from titan_tts.export.onnx_export import quantized, reader_arguments
from titan_tts.onnx_voice.voice import OnnxVoice, Reader
from titan_tts.speak.utterance import Utterance, Voice
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.flow import solvers
from torchtitan.models.dit_tts.flow.counter_rng import normal, stream_keys
from torchtitan.models.dit_tts.run.manifest import read_manifest, write_manifest
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.sampling.sampler import SAMPLING_STREAM
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors
from torchtitan.models.dit_tts.text.aligner import fit_aligner
from torchtitan.models.dit_tts.text.phones import Phonemizer
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed")]

TEXTS = ["one two", "seven 8 nine three four five"]
CAPTIONS = ["calm", "", " \n", "voix âgée!"]  # the last of as many bytes as can be


def randomize(folder: Path) -> None:
    """Every weight: some begin as zero."""
    generator = torch.Generator().manual_seed(len(folder.name))
    weights = load_file(folder / exported.WEIGHTS)
    for name, value in weights.items():
        drawn = torch.randn(value.shape, generator=generator)
        weights[name] = drawn / value.shape[-1] ** 0.5 if value.dim() > 1 else 1 + drawn / 2
    weights["output.bias"].zero_()  # so that a length is about the number of phones
    save_file(weights, folder / exported.WEIGHTS, {"format": "pt"})
    write_manifest(folder, exported.files_read(folder), read_manifest(folder)["trained_with"])


@pytest.fixture
def made(train, tmp_path, tmp_path_factory) -> Path:
    """A folder with an exported model of random weights, and its ONNX voice."""
    kept = tmp_path_factory.getbasetemp() / "made-for-onnx"
    if not kept.exists():
        make_shards(tmp_path / "data", 16, frames=lambda _: 32)
        real = [f"--data.path={tmp_path / 'data'}", "--data.latent_channels=128"]
        real += ["--training.steps=1", "--encoder.model=phones:en-us", "--encoder.normalize=en"]
        real += ["--data.max_caption_tokens=12"]
        sampling = "steps=6 start_t=0.999 solver=midpoint text_scale=1.5 speaker_scale=0.5 min_t=0.4 caption_scale=0.8".split()
        own = [
            "--model.text_positions=aligned",
            "--objective.prediction=noise",
            *(f"--sampling.{each}" for each in sampling),
        ]
        assert train("run", *real, *own) == 0
        length = ["--model.flavor=duration", "--objective.text_dropout=0"]
        assert train("duration", *real, *length, "--activation_checkpoint.mode=none") == 0
        voices = ["--voices=s2", "--voices=s0"]
        export(tmp_path / "run", tmp_path / "made/model", "--weights=raw", *voices)
        voices = tmp_path / "made/model" / exported.VOICES
        found = load_file(voices)
        save_file({"s2": found["s2"], "file": found["s0"]}, voices)  # numpy.savez would not take it
        randomize(tmp_path / "made/model/duration")
        randomize(tmp_path / "made/model")
        export(tmp_path / "made/model", tmp_path / "made/voice", "--onnx")
        shutil.copytree(tmp_path / "made", kept)
    return kept


def test_the_lengths_of_another_model_of_the_same_texts(made, tmp_path):
    """As of the base voice, for what began with it."""
    model = shutil.copytree(made / "model", tmp_path / "model")
    shutil.rmtree(model / "duration")
    assert main(["export", str(model), str(tmp_path / "none"), "--onnx"]) == 2
    export(model, tmp_path / "voice", "--onnx", f"--duration={made / 'model'}")
    graphs = [folder / "voice/length.onnx" for folder in (made, tmp_path)]
    assert graphs[0].read_bytes() == graphs[1].read_bytes()


def test_its_latents_are_those_of_torch(made):
    """Through the whole sampler, with guidance, for texts of different length, with and without a reference and a
    caption."""
    model, voice = from_pretrained(made / "model", dtype="float32"), onnx_voice.load(made / "voice")
    assert voice.settings["voice"] == "s2" and sorted(voice.voices) == ["file", "s2"]
    given = [Voice(), model.speaker("file"), Voice(), Voice(torch.ones(7, 128) / 2)]
    frames = set()
    for text in TEXTS:
        for named, of, caption in zip(("", "file", "", None), given, CAPTIONS, strict=True):
            reference = named if named is not None else of.reference.numpy()
            said = {"caption": caption}
            [length] = model.lengths.frames([Utterance(text, of, said)])
            assert voice.frames(text, reference, caption) == length
            piece = Utterance(text, of, said, frames=length)
            row = torch.tensor([model._request(piece).noise_row()])
            keys = stream_keys(3, torch.tensor(0), row, SAMPLING_STREAM)
            noise = normal(keys, (piece.frames, 128))[0].numpy()
            [speech] = model.speak([piece], seed=3)
            found = voice.latents(text, piece.frames, reference, noise=noise, caption=caption)
            np.testing.assert_allclose(found, speech.latents, rtol=0, atol=1e-3)
            frames.add(piece.frames)
    assert len(frames) > 2 and np.abs(found).max() > 0.5
    refused(lambda: voice.speak("one", caption="voix âgée!!"), "has 13 bytes, but at most 12")
    plain = replace(voice, settings=voice.settings | {"max_caption": 0})
    refused(lambda: plain.speak("one", caption="calm"), "takes no captions; leave caption out")


def test_a_caption_alone_makes_a_voice_for_all_pieces(made, monkeypatch):
    """Not the default one; another voice, or without a caption the default one, is that of all."""
    voice, made_of, real = onnx_voice.load(made / "voice"), [], OnnxVoice.latents

    def latents(self, text, frames, voice, seed, caption):
        found = real(self, text, frames, voice, seed, caption=caption)
        made_of.append((self._reference(voice, caption), found))
        return found

    monkeypatch.setattr(OnnxVoice, "latents", latents)
    short, known = replace(voice, settings=voice.settings | {"max_frames": 20}), voice.voices
    for named, caption, expected in (
        (None, "calm", np.zeros((0, 128))),
        ("file", "calm", known["file"]),
        (None, "", known["s2"]),
    ):
        made_of.clear()
        short.speak("one two three four five seven nine " * 2, named, caption=caption)
        (first, said), *others = made_of
        assert np.array_equal(first, expected)
        assert others and all(np.array_equal(v, first if len(first) else said) for v, _ in others)


@pytest.mark.parametrize("sound", [np.full(640, np.nan), np.zeros((1, 640)), np.zeros(320)])
def test_a_graph_that_gives_no_sound_is_refused(sound):
    session = SimpleNamespace(get_inputs=list, run=lambda *_: [sound])
    voice = OnnxVoice(Path("f"), {"hop": 320}, None, {}, {"sound": session})
    refused(lambda: voice.decode(np.zeros((2, 8))), "sound.onnx", "no finite sound of 640 samples")


@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_its_sound_is_that_of_the_codec(made, tmp_path, rate):
    """The voice rises and pauses; both get the same noise."""
    codec, folder = build_codec("mel_dct+vocoder"), made / "voice"
    if rate != codec.sample_rate:
        codec, folder = build_codec("mel_dct+vocoder24k"), tmp_path / "voice"
        export(made / "model", folder, "--onnx", "--codec=mel_dct+vocoder24k")
    phase = torch.linspace(100, 160, 20 * codec.hop_length).cumsum(0) * (2 * torch.pi / rate)
    sound = sum((k * phase).sin() / k for k in range(1, 20)) / 4
    sound[10 * codec.hop_length : 12 * codec.hop_length] = 0
    latents, voice = codec.encode(sound), onnx_voice.load(folder)
    noise = torch.randn(1, len(sound), generator=torch.Generator().manual_seed(0))[0]
    found = voice.decode(latents.numpy(), noise.numpy())
    assert voice.sample_rate == rate and len(voice.decode(latents.numpy())) == len(sound)
    np.testing.assert_allclose(found, codec.decode(latents), rtol=0, atol=0.01)
    assert np.abs(found).max() > 0.2


def test_int8_is_near(made, tmp_path):
    folder = shutil.copytree(made / "voice", tmp_path / "voice")
    (folder / "step.onnx").write_bytes(quantized((folder / "step.onnx").read_bytes()))
    exact, near = (onnx_voice.load(each).latents(TEXTS[0], 20) for each in (made / "voice", folder))
    assert 0 < np.linalg.norm(near - exact) < 0.2 * np.linalg.norm(exact)


SPEAKING = """
import runpy, sys

class WithoutTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise RuntimeError("somebody imports torch")

sys.meta_path.insert(0, WithoutTorch())
runpy.run_module("titan_tts.onnx_voice", run_name="__main__", alter_sys=True)
"""


def test_it_speaks_where_torch_and_upstream_are_not_installed(made, tmp_path):
    (tmp_path / "packages").mkdir()
    for place in map(Path, sys.path):
        for each in place.iterdir() if place.name == "site-packages" else ():
            link = tmp_path / "packages" / each.name
            if not each.name.startswith("torch") and not link.exists():
                link.symlink_to(each)
    command = [sys.executable, "-S", "-c", SPEAKING, str(made / "voice"), "--out=a.wav"]
    found = f"{Path(onnx_voice.__file__).parents[2]}:{tmp_path / 'packages'}"
    given = {"env": os.environ | {"PYTHONPATH": found}, "cwd": tmp_path, "text": True}
    for said, sentence in (
        (["--text=one two"], ""),
        (["--text=日"], "the voice was not trained with the characters '日'; leave them out"),
        (["--text= "], "the text is empty; give one"),
        (
            ["--text=one", "--out=a.mp3"],
            "--out = a.mp3, but its name must end with .wav; give another",
        ),
        (
            ["--text=one", "--out=/proc/x/a.wav"],
            "--out = /proc/x/a.wav cannot be written; give another path",
        ),
    ):
        spoken = subprocess.run([*command, *said], capture_output=True, **given)
        assert spoken.stderr == (f"error: {sentence}\n" if sentence else "")
        assert spoken.returncode == (2 if sentence else 0)
    assert (tmp_path / "a.wav").stat().st_size > 640 and not (tmp_path / "a.mp3").exists()


@pytest.mark.parametrize("unit", ["bytes", "chars"])
def test_it_reads_texts_as_the_tokenizer_does(unit):
    text = "Dr. Ä took 12 ü"
    aligner = fit_aligner([(text, np.random.default_rng(0).standard_normal((90, 4)))])
    letters = text + "abcdefghijklmnopqrstuvwxyz"
    vocabulary = make_vocabulary(unit, letters, normalize="en")
    tokenizer = UnitTokenizer(vocabulary, aligner=aligner)
    reader = Reader(**reader_arguments(tokenizer), aligner=aligner)
    ids, positions = reader(text)
    assert ids.tolist() == tokenizer.encode(text)
    np.testing.assert_array_equal(positions, tokenizer.text_positions(text))


def test_numbers_need_wetext(monkeypatch):
    monkeypatch.setattr("titan_tts.onnx_voice.voice.find_spec", lambda name: None)
    reader = Reader(dict.fromkeys("DoctrSmih .", 4), (1, 2), False, "", "en")
    assert len(reader("Dr. Smith")[0]) == len("Doctor Smith") + 2
    refused(lambda: reader("Dr. Smith 42"), "the text has '4', which wetext reads", "pip install")


def changed(**values):
    return lambda path: put(path, json.dumps(json.loads(path.read_text()) | values))


def other_weights(path: Path) -> None:
    """A graph whose weights are in a file of somebody else."""
    model = onnx.load(path)
    for weight in model.graph.initializer[:1]:
        onnx.external_data_helper.set_external_data(weight, "/etc/hostname")
        weight.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())


def unknown_operator(path: Path) -> None:
    model = onnx.load(path)
    model.graph.node[0].domain = "somebodys"
    path.write_bytes(model.SerializeToString())


def arrays(**values):
    return lambda path: np.savez(path, **values)


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("voice.json", "[]", "give a folder of titan-tts export --onnx"),
        ("voice.json", changed(patch="4"), "patch = '4'"),
        ("voice.json", changed(max_frames=10**12), "max_frames = '1000000000000'"),
        ("voice.json", changed(steps=[[[1.0], -1e999, []]]), "not finite"),
        ("voice.json", changed(steps=[[[1.0], -1.0, []]] * 5001), "too many"),
        ("voice.json", changed(reader={"codec": 1}), "codec"),
        ("step.onnx", b"no graph", "step.onnx cannot be read"),
        ("step.onnx", fifo, "not a regular file"),
        ("step.onnx", lambda path: shutil.copy(path.parent / "length.onnx", path), "it lacks"),
        ("step.onnx", other_weights, "another file"),
        ("length.onnx", unknown_operator, "length.onnx cannot be read"),
        ("sound.onnx", lambda path: shutil.copy(path.parent / "step.onnx", path), "it lacks"),
        ("voices.npz", arrays(s2=np.zeros((5, 7))), "'s2' is not an array (frames, 128)"),
        ("voices.npz", arrays(s2=np.full((5, 128), np.nan)), "of numbers"),
    ],
)
def test_a_strangers_folder_is_refused_in_a_sentence(made, tmp_path, name, content, sentence):
    folder = shutil.copytree(made / "voice", tmp_path / "voice")
    if content is fifo:
        (folder / name).unlink()
    put(folder / name, content)
    refused(lambda: onnx_voice.load(folder).speak("one"), str(folder), sentence)


def test_what_it_cannot_do_is_said_before_it_is_written(made, tmp_path, capsys, monkeypatch):
    for given, sentence in (
        ("--onnx --dtype=bfloat16", "--onnx is written with --dtype float32 or int8"),
        ("--onnx --license=mit", "without --adapter and --license"),
        ("--adapter --license=mit", "without --voices, --dtype and --license"),
        ("--dtype=int8", "--dtype = int8 is for --onnx"),
        ("--onnx --voices=s7", "--speaker = s7"),
    ):
        assert main(["export", str(made / "model"), str(tmp_path / "out"), *given.split()]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["export", str(made / "model/duration"), str(tmp_path / "out"), "--onnx"]) == 2
    assert "a network that predicts lengths" in capsys.readouterr().err
    own = solvers.Solver(solvers.SOLVERS["midpoint"].times, lambda v, x, step, history: x)
    monkeypatch.setitem(solvers.SOLVERS, "midpoint", own)
    assert main(["export", str(made / "model"), str(tmp_path / "out"), "--onnx"]) == 2
    assert "solver 'midpoint', with which titan_tts.onnx_voice" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


PACKAGES = Path(onnx_voice.__file__).parents[2] / "node_modules"


@contextlib.asynccontextmanager
async def browsed(folder: Path, site: Path):
    """The page of a voice in Chromium, with packages of this machine."""
    if not (PACKAGES / "phonemizer").exists():
        pytest.skip("node_modules has no onnxruntime-web and phonemizer; .ci/run installs them")
    shutil.copytree(folder, site)
    (site / "packages").symlink_to(PACKAGES)
    page, own = site / "index.html", r"./packages/\1/"
    page.write_text(re.sub(r"https://cdn.jsdelivr.net/npm/([\w-]+)@[\d.]+/", own, page.read_text()))
    files = partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        async with tab(
            f"http://127.0.0.1:{server.server_port}/", site.parent / "profile"
        ) as opened:
            await opened.value("voice.then(found => void (window.voice = found))")
            yield opened
        server.shutdown()


SAID = [*TEXTS, "Four hours, in the U.S.A.!", "Oh... (3.5?) it's well-known: to be, or not."]


def test_a_browser_speaks_as_python_does(made, tmp_path):
    voice, phones = onnx_voice.load(made / "voice"), Phonemizer("en-us")

    as_sent = "fetch('').then(sent => sent.text()).then(text => "
    as_sent += (
        "new DOMParser().parseFromString(text, 'text/html').querySelector('button').disabled)"
    )

    async def check():
        async with browsed(made / "voice", tmp_path / "site") as page:
            assert await page.value(as_sent)  # pressed while it loads, it would load again
            await page.until("!document.querySelector('button').disabled")
            for text in SAID:
                assert await page.value(f"voice.phones({json.dumps(text)})") == phones(text)
            texts = *TEXTS, "seven; (nine) — “three”: five…", TEXTS[1]
            for text, of, caption in zip(texts, ("s2", "file", "", "file"), CAPTIONS):
                said = json.dumps(caption)
                frames = await page.value(f"voice.frames({text!r}, {of!r}, {said})")
                assert frames == voice.frames(text, of, caption)
                noise = np.random.default_rng(frames).standard_normal((frames, 128), np.float32)
                given = f"{text!r}, {of!r}, new Float32Array({noise.ravel().tolist()}), {said}"
                found = await page.value(f"voice.latents({given}).then(x => [...x])")
                wanted = voice.latents(text, frames, of, noise=noise, caption=caption)
                np.testing.assert_allclose(np.reshape(found, wanted.shape), wanted, 0, 1e-3)
            caught = "voice.frames('one', '', 'voix âgée!!').catch(error => error.message)"
            assert "has 13 bytes, but at most 12" in await page.value(caught)
            for text, answer in (
                ("one two", "s of sound in"),
                ("one 日", "the characters "),
                ("one two " * 99, "phones, but at most"),
            ):
                await page.value(f"void (document.forms[0].text.value = {text!r})")
                await page.value("document.forms[0].onsubmit(new Event('submit')).catch(() => 0)")
                assert answer in await page.value("said.textContent")

    asyncio.run(check())


@pytest.mark.slow
def test_the_base_voice_is_understood_from_a_browser(tmp_path):
    export(Path("titan_tts:base"), tmp_path / "voice", "--onnx", "--dtype=int8")
    text = "Glue the sheet to the dark blue background."

    async def spoken():
        async with browsed(tmp_path / "voice", tmp_path / "site") as page:
            return await page.value(f"voice.speak({text!r}).then(x => [...x])")

    sound = torch.tensor(asyncio.run(spoken()))
    heard = open_recognizer("whisper-tiny.en").transcribe(Sound(sound, 16_000), "en")
    assert count_errors(text, heard, "en").word_errors <= 2
