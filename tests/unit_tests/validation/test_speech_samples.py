"""Speech samples of a run: the choice of prompts, the files written, and the checks before training."""

import json
import os
import pkgutil
import shutil
import signal
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile
import torch

from tests.helpers.fixed_sets import data_section, fixed_set, write_rows
from tests.helpers.tiny_runs import Folder
from tools.harness.synthetic import flip_bits, make_shards
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.dataset import open_training_data
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.run.trackers import Trackers
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.sampling.plots import save_spectrograms
from torchtitan.models.dit_tts.speech.sampling.sampler import generate_latents
from torchtitan.models.dit_tts.text.durations import LinearDurationModel
from torchtitan.models.dit_tts.validation.speech_samples import SpeechSamples, choose_prompts

ROWS = [
    ("one", "ann", 20, 6),
    ("two", "ann", 9, 16),
    ("three", "bob", 12, 0),
    ("four", None, 20, 4),
    ("five", "bob", 31, 3),
    ("six", "ann", 7, 5),
]


def prompts_of(folder: Path, count: int, bytes_per_frame: float = 1.0, **changes):
    config = JobConfig(data=data_section(folder, **changes))
    fixed = fixed_set(folder, **changes)
    weights = np.append(np.full(256, bytes_per_frame), 1.0)
    durations = LinearDurationModel(weights, {"bob": 2.0})
    return choose_prompts(fixed.dataset, fixed.fitting, count, durations, config)


@pytest.mark.long
def test_which_texts_and_what_is_asked_for(tmp_path):
    """Each speaker's first before any speaker's second."""
    folder = write_rows(tmp_path / "heldout", ROWS, language="en")
    everything = prompts_of(folder, 100)
    texts = [prompt.request.text for prompt in everything]
    assert texts == ["one", "three", "four", "two", "five", "six"]
    names = [prompt.name for prompt in everything]
    assert names[:3] == ["000-ann-utt0", "001-bob-utt2", "002--utt3"]
    assert all(prompt.language == "en" for prompt in everything)
    data = data_section(folder, max_frames=32, max_speaker_frames=5)
    prompts = prompts_of(folder, 3, max_speaker_frames=5)
    dataset = open_training_data(data)
    for prompt, sample in zip(prompts, (0, 2, 3)):
        loaded = dataset.load(sample)
        assert np.array_equal(prompt.recording.numpy(), loaded.latents)
        assert np.array_equal(prompt.request.reference.numpy(), loaded.reference[:5])
    # A frame for each byte and one more; bob speaks at half the rate.
    assert [prompt.request.frames for prompt in prompts] == [4, 12, 5]
    seconds = [prompt.request.metadata["target_duration"] for prompt in prompts]
    assert seconds == pytest.approx([frames / data.frames_per_second for frames in (4, 12, 5)])
    assert prompts[0].request.metadata["speaker"] == "ann"
    # Never longer than what is trained on.
    long = prompts_of(folder, 3, bytes_per_frame=100.0)
    assert [prompt.request.frames for prompt in long] == [32, 32, 32]


def test_a_prompt_that_fills_up_a_ranks_share_does_not_count(tmp_path):
    prompts = prompts_of(write_rows(tmp_path / "heldout", ROWS), 3)
    network = SimpleNamespace(model=None, text_encoder=None, device="cpu", amp=None)
    for rank, wanted in enumerate([[(0, True), (2, True)], [(1, True), (0, False)]]):
        for reports in (True, False):
            given = JobConfig(), tmp_path, prompts, None, None, None, network, rank, 2
            own = SpeechSamples(*given, reports=reports).own
            assert own == [(prompts[number], counts and reports) for number, counts in wanted]


HOSTILE = ["../../up", "/etc/x", "a" * 300, "日本語" * 60, "a b\tc", "x:y*?", "", "ann", "ANN"]


def test_names_that_any_file_system_takes(tmp_path):
    arrays = [np.ones((4, 4), np.float16)] * 2
    samples = [
        Triplet(f"dir/{'k' * 90}{n}", *arrays, {"text": "a", "speaker": speaker})
        for n, speaker in enumerate(HOSTILE)
    ]
    (tmp_path / "heldout").mkdir()
    write_shard(tmp_path / "heldout/000000.tar", samples)
    names = [prompt.name for prompt in prompts_of(tmp_path / "heldout", 100)]
    assert len({name.lower() for name in names}) == len(HOSTILE)
    for number, name in enumerate(names):
        assert name.startswith(f"{number:03d}-") and len(f"{name}.png".encode()) < 128
        assert not set(name) & set("/\\.: \t*?\0")


def test_a_corrupt_prompt_ends_the_run_or_the_next_is_taken(tmp_path):
    folder = write_rows(tmp_path / "heldout", ROWS)
    open_training_data(data_section(folder))
    flip_bits(folder / "000000.tar", [0])
    with pytest.raises(InputError, match="utt0"):
        prompts_of(folder, 2)
    found = prompts_of(folder, 2, on_error="skip", max_corrupt_fraction=0.5)
    assert [prompt.request.text for prompt in found] == ["three", "four"]
    assert [prompt.name[:3] for prompt in found] == ["000", "001"]


# Within runs


@pytest.fixture(scope="session")
def speech_data(tmp_path_factory) -> Path:
    """Of the embedded codec's 128 channels; held-out samples, the later ones without a reference."""
    folder = tmp_path_factory.mktemp("speech")
    frames = lambda generator: int(generator.integers(8, 20))  # noqa: E731
    make_shards(folder / "train", 24, channels=128, frames=frames)
    generator = np.random.default_rng(4)
    samples = []
    for n in range(5):  # of which the runs take four
        latents = (0.5 * generator.standard_normal((10 + n, 128))).astype(np.float16)
        reference = latents[: 0 if n > 1 else 6]
        about = {"text": "one six", "speaker": f"s{n}", "language": ("de", "en")[n % 2]}
        samples.append(Triplet(f"u{n}", latents, reference, about))
    (folder / "heldout").mkdir()
    write_shard(folder / "heldout/000000.tar", samples)
    return folder


@pytest.fixture
def options(speech_data) -> list[str]:
    return [
        f"--data.path={speech_data / 'train'}",
        "--data.latent_channels=128",
        "--validation.times=0.5",
        "--samples.freq=2",
        "--samples.count=4",
        "--validation.samples=3",  # fewer than the prompts, which are of all that fit
        "--sampling.steps=2",
        "--sampling.codec=mel_dct",
        "--training.steps=3",
    ]


@pytest.fixture
def seen(monkeypatch):
    """A stand-in for the trackers."""
    trackers = Mock(spec=Trackers)
    monkeypatch.setattr("torchtitan.models.dit_tts.metrics.Trackers", lambda *_: trackers)
    return trackers


def recognizer(device: str):
    """A user's own, which hears the same in everything, and in German, where it is a word, "um" before it."""

    def check_texts(texts, languages=()):
        assert list(texts) == ["one six"] * 4

    heard = lambda sound, language="": "um " * (language == "de") + "one sick"  # noqa: E731
    return SimpleNamespace(name="deaf", check_texts=check_texts, transcribe=heard)


def opinion(device: str):
    return SimpleNamespace(name="mild", score=lambda sound: 3.0 + (sound.sample_rate == 16000))


@pytest.mark.long
def test_samples_of_a_run(tmp_path, train, options, seen, monkeypatch):
    """With a recognizer and a predictor of the user's own."""
    monkeypatch.setitem(sys.modules, "own_plug_ins", sys.modules[__name__])
    module = "torchtitan.models.dit_tts.validation.speech_samples"
    with_panels, generate = Mock(wraps=save_spectrograms), Mock(wraps=generate_latents)
    monkeypatch.setattr(f"{module}.save_spectrograms", with_panels)
    monkeypatch.setattr(f"{module}.generate_latents", generate)
    options += [
        *("--samples.seed=7", "--sampling.text_scale=2", "--ema.decays=0.9,0.1"),
        "--samples.recognizer=own_plug_ins:recognizer",
        "--samples.opinion=own_plug_ins:opinion",
        "--samples.speaker_scorer=resemblyzer",
    ]
    assert train("run", *options, "--validation.keep_best=wer") == 0
    run = tmp_path / "run"
    assert {path.name for path in (run / "samples").iterdir()} == {"step-2", "step-3"}
    assert "step-2" in Folder(run).checkpoints()  # the first of equal ones
    names = [f"00{n}-s{n}-u{n}" for n in range(4)]
    rows = [row for row in Folder(run).validation() if "real_time_factor" in row]
    assert not any("duration_error" in row for row in rows)  # it would be the fit's at every step
    assert [(row["step"], row["weights"]) for row in rows] == [(2, "ema:0.9"), (3, "ema:0.9")]
    place = run / "samples/step-3"
    files = {f"{name}.{end}" for name in names for end in ("wav", "png")} | {"scores.json"}
    assert {path.name for path in place.iterdir()} == files
    report = json.loads((place / "scores.json").read_text())
    assert rows[1].items() >= {k: v for k, v in report.items() if k != "prompts"}.items()
    assert report["wer"] == 6 / 8 and report["opinion"] == 4.0 and report["real_time_factor"] > 0
    similarities = [prompt["score"]["speaker_similarity"] for prompt in report["prompts"]]
    assert similarities[2:] == [None, None]  # without a reference
    assert all(-1 <= value <= 1 for value in similarities[:2])
    assert report["speaker_similarity"] == pytest.approx(sum(similarities[:2]) / 2)
    for prompt, name, frames in zip(report["prompts"], names, range(10, 14), strict=True):
        samples, rate = soundfile.read(place / f"{name}.wav")
        made = len(samples) / rate * 25
        assert prompt["name"] == name and prompt["seconds"] == pytest.approx(len(samples) / rate)
        assert prompt["duration_error"] == pytest.approx(abs(made / frames - 1), abs=1e-6)
        assert prompt["text"] == "one six" and prompt["score"]["heard"].endswith("one sick")
    for call in generate.call_args_list:
        sampling, seed = call.args[4:6]
        assert (sampling.steps, sampling.text_scale, seed) == (2, 2.0, 7)
        assert call.kwargs == {"cache_blocks": True}
    # The utterance as it is, above what was made of it.
    for number, call in enumerate(with_panels.call_args_list[-4:]):
        (above, recording), (below, made) = call.args[1]
        assert above == 'recording: "one six"' and below.endswith('one sick"')
        assert len(recording) == (10 + number) * 640 and len(made) > 0

    shown: dict[int, dict] = {2: {}, 3: {}}
    for call in seen.log.call_args_list:
        shown.setdefault(call.args[1], {}).update(call.args[0])
    # Names of their own: a tag of TensorBoard's is of one kind.
    for step, name in product((2, 3), names):
        waveform, rate = shown[step][f"speech/{name}"]
        assert rate == 16000 and len(waveform) > 5000
        assert shown[step][f"speech/{name}_spectrogram"].startswith(b"\x89PNG")
    last = shown[3]
    assert last["validation_by_time/heldout_loss_at_0.5"] == last["validation/heldout_loss"]
    assert last["speech/speaker_similarity"] == report["speaker_similarity"]
    assert not any(name.endswith(("/time", "/step")) for name in last)


@pytest.mark.long
def test_a_model_that_ends_the_speech_itself_does_so_in_samples(
    tmp_path, train, options, monkeypatch
):
    asked = []

    def generate(*given, **more):
        """Speaks five frames of the first prompt, and two more of each further one."""
        asked.extend(given[3])
        rows = [torch.ones(each.frames, 128) for each in given[3]]
        for number, row in enumerate(rows):
            row[5 + 2 * number :] = 0
        return rows

    monkeypatch.setattr(
        "torchtitan.models.dit_tts.validation.speech_samples.generate_latents", generate
    )
    options += ["--objective.loss_on_padding", "--data.num_buckets=1", "--data.max_frames=64"]
    assert train("run", *options) == 0
    assert [each.frames for each in asked] == 8 * [64]
    assert {each.metadata["target_duration"] for each in asked} == {64 / 25}
    seconds = [5 / 25, 7 / 25, 9 / 25, 11 / 25]
    for step in (2, 3):
        report = json.loads((tmp_path / f"run/samples/step-{step}/scores.json").read_text())
        assert [each["seconds"] for each in report["prompts"]] == pytest.approx(seconds)
        wrong = 1 - np.array([5 / 10, 7 / 11, 9 / 12, 11 / 13])
        assert report["duration_error"] == pytest.approx(wrong.mean())


@pytest.mark.long
@pytest.mark.parametrize(
    "place, at, rows", [("heldout_loss.stream_keys", 1, []), ("speech_samples.score", 2, [2])]
)
def test_a_signal_ends_them_at_the_next_batch(
    tmp_path, train, options, monkeypatch, place, at, rows
):
    """The step is saved, and the next start measures what is missing."""
    options += ["--validation.batch_size=2", "--checkpoint.interval=100", "--validation.freq=2"]
    assert train("unbroken", *options) == 0
    place = f"torchtitan.models.dit_tts.validation.{place}"
    function, calls = pkgutil.resolve_name(place), []

    def signalled(*given):
        calls.append(given)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*given)

    with monkeypatch.context() as patch:
        patch.setattr(place, signalled)
        assert train("run", *options) == 128 + signal.SIGTERM
    run, unbroken = Folder(tmp_path / "run"), Folder(tmp_path / "unbroken")
    assert len(calls) == at and [row["step"] for row in run.validation()] == rows
    assert (run.state()["state"], run.checkpoints()) == ("preempted", {"step-2"})
    assert train("run", *options) == 0
    names = ("step", "heldout_loss", "weights")
    found, wanted = (
        [tuple(row.get(name) for name in names) for row in each.validation()]
        for each in (run, unbroken)
    )
    assert found == wanted and len(found) == 4


@pytest.mark.long
@pytest.mark.parametrize("option", ["samples.speaker_scorer", "sampling.codec"])
def test_what_cannot_be_asked_is_refused_before_the_run(tmp_path, train, options, capsys, option):
    assert train("run", *options, f"--{option}=nobody") == 2
    assert "nobody" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.long
def test_latents_of_another_codec_are_refused(tmp_path, train, options, speech_data, capsys):
    own, other = (shutil.copytree(speech_data, tmp_path / name) for name in ("own", "other"))
    for folder, fingerprint in ((own, build_codec("mel_dct").fingerprint), (other, "0" * 16)):
        record = {"settings": {"codec": "mel_dct", "codec_fingerprint": fingerprint}}
        (folder / "prepare.json").write_text(json.dumps(record))
    for trained, words in ((own, "names another codec"), (other, "is not the one that")):
        paths = f"--data.path={trained}/train", f"--validation.path={other}/heldout"
        assert train("run", *options, *paths) == 2
        assert words in capsys.readouterr().err
