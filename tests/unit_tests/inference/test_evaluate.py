"""`generate` and `evaluate`: who says what for how long, and what the table of errors counts."""

import argparse
import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from tests.helpers.row_model import CHANNELS, RowModel, moved
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.flow.guidance import Guidance
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.inference import evaluate_command, generate_command
from torchtitan.models.dit_tts.inference.audio_files import write_wav
from torchtitan.models.dit_tts.inference.evaluate import HeldOut, listen, read_heldout, speak
from torchtitan.models.dit_tts.inference.load_run import LoadedRun
from torchtitan.models.dit_tts.inference.pictures import MEL_BANDS, log_mel_decibels
from torchtitan.models.dit_tts.prepare.audio_reader import Utterance
from torchtitan.models.dit_tts.text.tokenizer import Tokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary

SPEAKERS = ("ann", "bob")
TOKENIZER = Tokenizer(
    make_vocabulary("bytes", "", ["speaker", "duration"], {"speaker": SPEAKERS}, max_seconds=3.0)
)
LONG_REFERENCE = 9
"""frames; the run takes at most 6"""

HOP = 4
"""samples per frame of the codec below"""


def latents(frames: int, value: float) -> np.ndarray:
    return np.full((frames, CHANNELS), value, np.float16)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Two shards with the same keys; sample n has n + 2 frames of value n, its reference n + 10."""
    folder = tmp_path_factory.mktemp("archives")
    for shard in range(2):
        samples = []
        for key in range(3):
            number = 3 * shard + key
            # The longest reference is neither the first sample's of its speaker nor the last's.
            length = LONG_REFERENCE if number in (2, 3) else 4
            text = " ".join(["one", "two"] * (number + 1))
            metadata = {"text": text, "speaker": SPEAKERS[number % 2], "target_duration": 99.0}
            samples.append(
                Triplet(
                    f"a/{key}", latents(number + 2, number), latents(length, number + 10), metadata
                )
            )
        write_shard(folder / f"s{shard}.tar", samples)
    return folder


@dataclass
class Echo:
    """A codec whose waveform is the latents, and its record."""

    name: str = "echo"
    sample_rate: int = 25 * HOP
    hop_length: int = HOP
    latent_channels: int = CHANNELS
    frames_per_second: float = 25.0

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :HOP].flatten() / 100


def make_run(folder, archives) -> LoadedRun:
    config = load_config([f"--data.path={archives}"])
    config.data.latent_channels = CHANNELS
    config.data.max_speaker_frames = 6
    config.sampling.steps, config.sampling.text_scale = 4, 2.0
    config.sampling.speaker_scale, config.sampling.min_t = 3.0, 0.25
    return LoadedRun(
        folder, config, RowModel(), None, TOKENIZER, FlowMatching(), 7, torch.device("cpu")
    )


@pytest.fixture
def loaded(tmp_path, archives) -> LoadedRun:
    return make_run(tmp_path, archives)


# ---- held-out utterances and what a run says of them


def test_held_out_utterances_keep_what_is_theirs(archives):
    items = read_heldout(open_dataset(str(archives), CHANNELS), 6)
    assert [item.file_name for item in items] == [f"s{n // 3}_a_{n % 3}" for n in range(6)]
    for number, item in enumerate(items):
        assert item.key == f"a/{number % 3}" and item.speaker == SPEAKERS[number % 2]
        assert item.text == item.metadata["text"] == " ".join(["one", "two"] * (number + 1))
        assert item.latents.shape == (number + 2, CHANNELS) and (item.latents == number).all()
        assert item.reference.shape == (6 if number in (2, 3) else 4, CHANNELS)
        assert (item.reference == number + 10).all()


def held_out(number: int) -> HeldOut:
    """One whose text, voice and length are its own."""
    return HeldOut(
        key=str(number),
        file_name=str(number),
        text=chr(97 + number) * (1 + number % 3),
        speaker=SPEAKERS[number % 2],
        latents=torch.zeros(99, CHANNELS),
        reference=torch.full((1 + number % 4, CHANNELS), float(number)),
        metadata={"speaker": SPEAKERS[number % 2], "target_duration": 99.0},
    )


def test_each_item_is_said_in_its_voice_for_its_fitted_time(loaded):
    """More than a batch; duration tokens tell the fitted length, not the recording's."""
    items = [held_out(number) for number in range(18)]

    def fitted(text: str, speaker: str) -> int:
        return 2 + len(text) + 20 * SPEAKERS.index(speaker)

    def said(model) -> list[torch.Tensor]:
        return speak(
            loaded,
            model,
            SimpleNamespace(decode=lambda row: row),
            items,
            SimpleNamespace(frames=fitted),
            Guidance(0.0, 0.0),
            2,
            5,
            list,
        )

    class Still(RowModel):
        def denoise(self, rows, *args):
            return torch.zeros_like(rows)

    noise = said(Still())
    for item, start, found in zip(items, noise, said(RowModel()), strict=True):
        frames = fitted(item.text, item.speaker)
        conditions = {"speaker": item.speaker, "target_duration": frames / 25}
        ids = TOKENIZER.encode(item.text, conditions)
        assert found.shape == (frames, CHANNELS)
        way = moved(ids, item.reference, frames, mean_time=0.75)
        torch.testing.assert_close(found, start - way, atol=1e-2, rtol=1e-5)
    # No two utterances start from one noise, not even the first of two batches.
    assert len({float(start[0, 0]) for start in noise}) == len(items)


class WordsInSamples:
    """A recogniser that reads a word for each sample: the tenth's index among the digits."""

    WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

    def transcribe(self, waveform: torch.Tensor, sample_rate: int) -> list[str]:
        assert sample_rate == 100
        return [self.WORDS[int(10 * value + 0.5)] for value in waveform]

    @classmethod
    def sound(cls, text: str) -> tuple[torch.Tensor, int]:
        return torch.tensor([cls.WORDS.index(word) / 10 for word in text.split()]), 100


def test_word_errors_are_counted_by_speaker_and_over_all_words():
    texts = [("ann", "one two three four"), ("bob", "five six"), ("ann", "seven eight nine six")]
    heard = ["one two four", "six five", "seven eight nine six"]
    items = [
        HeldOut("", "", text, speaker, torch.zeros(1, 1), torch.zeros(1, 1), {})
        for speaker, text in texts
    ]
    errors, words = listen(WordsInSamples(), items, [WordsInSamples.sound(h) for h in heard])
    assert words == [sentence.split() for sentence in heard]
    assert errors.errors == {"ann": 1, "bob": 2} and errors.words == {"ann": 8, "bob": 2}
    assert errors.rates() == {"ann": 1 / 8, "bob": 1.0, "all": 3 / 10}  # not the mean of the two


def parsed(command, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["run", *arguments])


def test_evaluate_compares_each_kind_of_audio_with_the_text_it_should_say(
    loaded, archives, monkeypatch, capsys
):
    """The trained model says all texts, the untrained none; the recordings lie in another order."""
    items = read_heldout(open_dataset(str(archives / "s1.tar"), CHANNELS), 6)
    untrained = RowModel()

    def spoken(run, model, codec, items, durations, guidance, steps, seed, progress):
        assert (guidance, steps, seed) == (Guidance(9.0, 3.0, 0.25), 4, 11)
        wrong = model is untrained
        return [WordsInSamples.sound("nine" if wrong else item.text)[0] for item in items]

    def recordings(path):
        for item in reversed(items):
            text = item.text.replace("two", "three", 1)  # one of each has an error
            yield Utterance(
                item.key, *WordsInSamples.sound(text), text, item.speaker, "heldout", {}
            )

    class Codec(Echo):
        def decode(self, rows):
            number = int(rows[0, 0])
            return WordsInSamples.sound(" ".join(["one"] * 2 * (number + 1)))[0]

    class Durations:
        path = None

    def fitted(dataset):
        Durations.path = dataset.tar_paths
        return Durations

    for name, replacement in (
        ("load_run", lambda *arguments: loaded),
        ("build_run_codec", lambda *arguments: Codec()),
        ("KeywordRecognizer", lambda vocabulary: WordsInSamples()),
        ("untrained_model", lambda run: untrained),
        ("fit_durations", fitted),
        ("speak", spoken),
        ("read_audio_corpus", recordings),
    ):
        monkeypatch.setattr(evaluate_command, name, replacement)
    heldout = ["--heldout", str(archives / "s1.tar"), "--recordings", "corpus.tar"]
    options = parsed(
        evaluate_command, *heldout, "--pictures", "0", "--text-scale", "9", "--seed", "11"
    )
    assert evaluate_command.run(options) == 0
    assert len(Durations.path) == 2  # of the training data, not the held-out
    report = json.loads((loaded.folder / "samples/step-7/evaluation.json").read_text())
    # Items 3, 4 and 5 have 8, 10 and 12 words; bob's are 3 and 5.
    assert report["word_error_rate"] == {
        "recordings": {"ann": 1 / 10, "bob": 2 / 20, "all": 3 / 30},
        "codec": {"ann": 1 / 2, "bob": 1 / 2, "all": 1 / 2},
        "generated": {"ann": 0.0, "bob": 0.0, "all": 0.0},
        "untrained": {"ann": 1.0, "bob": 1.0, "all": 1.0},
    }
    assert report["utterances"] == 3 and report["text_scale"] == 9.0
    for item, row in zip(items, report["heard"], strict=True):
        assert (row["key"], row["text"], row["generated"]) == (item.key, item.text, item.text)
        wav, rate = soundfile.read(loaded.folder / f"samples/step-7/{item.file_name}.wav")
        wanted = WordsInSamples.sound(item.text)[0].numpy()
        assert rate == 100 and np.abs(wav - wanted).max() < 1e-4
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ann", "bob", "all"] in table and ["recordings", "10.0%", "10.0%", "10.0%"] in table


# ---- generate


@pytest.mark.parametrize(
    "arguments, speaker, frames, settings",
    [
        # Sample 3 has the longest of bob's references, and 2 of ann's.
        (["--speaker=bob", "--duration=1.23"], 3, 31, (Guidance(2.0, 3.0, 0.25), 4, 0)),
        (
            ["--speaker=ann", "--duration=0.001", "--text-scale=0", "--speaker-scale=5"]
            + ["--sampling-steps=9", "--seed=6"],
            2,
            1,
            (Guidance(0.0, 5.0, 0.25), 9, 6),
        ),
    ],
)
def test_generate_asks_for_what_the_options_say(
    loaded, archives, tmp_path, monkeypatch, arguments, speaker, frames, settings
):
    asked = {}

    def generated(model, tokenizer, objective, requests, guidance, steps, seed, *more):
        asked.update(requests=requests, settings=(guidance, steps, seed))
        assert model is loaded.model
        return [torch.linspace(-50, 50, requests[0].frames)[:, None].expand(-1, CHANNELS)]

    monkeypatch.setattr(generate_command, "load_run", lambda *arguments: loaded)
    monkeypatch.setattr(generate_command, "build_run_codec", lambda *arguments: Echo())
    monkeypatch.setattr(generate_command, "generate_latents", generated)
    out = tmp_path / "said.wav"
    options = parsed(generate_command, "--text", "one", "--out", str(out), *arguments)
    assert generate_command.run(options) == 0
    [request] = asked["requests"]
    assert asked["settings"] == settings and request.text == "one" and request.frames == frames
    assert request.reference.shape == (6, CHANNELS)  # cut to what the run takes
    assert (request.reference == speaker + 10).all()
    assert request.metadata == {"speaker": options.speaker, "target_duration": frames / 25}
    wav, rate = soundfile.read(out)
    assert rate == 100 and len(wav) == frames * HOP
    assert np.abs(wav - np.repeat(np.linspace(-0.5, 0.5, frames), HOP)).max() < 1e-4


def test_generate_fits_the_length_of_the_speaker(loaded, tmp_path, monkeypatch):
    fit = SimpleNamespace(frames=lambda text, speaker: {("one", "ann"): 17}[text, speaker])
    asked = []
    monkeypatch.setattr(generate_command, "load_run", lambda *arguments: loaded)
    monkeypatch.setattr(generate_command, "build_run_codec", lambda *arguments: Echo())
    monkeypatch.setattr(generate_command, "fit_durations", lambda dataset: fit)
    monkeypatch.setattr(
        generate_command,
        "generate_latents",
        lambda *arguments: asked.append(arguments[3][0].frames) or [torch.zeros(17, CHANNELS)],
    )
    out = str(tmp_path / "said.wav")
    options = parsed(generate_command, "--text", "one", "--out", out, "--speaker", "ann")
    assert generate_command.run(options) == 0 and asked == [17]


# ---- files


def test_a_wav_holds_the_samples(tmp_path):
    write_wav(tmp_path / "a.wav", torch.tensor([0.0, 0.5, -0.25, 3.0, -3.0]), 24_000)
    samples, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == 24_000 and soundfile.info(tmp_path / "a.wav").subtype == "PCM_16"
    np.testing.assert_allclose(samples, [0.0, 0.5, -0.25, 1.0, -1.0], atol=1e-4)


def test_pictures_show_levels_and_pitches():
    """A sine of a tenth of full scale is at -20 dB in the band of its frequency."""
    picture = log_mel_decibels(
        0.1 * torch.sin(2 * torch.pi * 1000 * torch.arange(16_000) / 16_000), 16_000
    )
    assert picture.shape == (100, MEL_BANDS)
    # 1 kHz is 15 mel, half the scale at 8 kHz is 45.2 / 2 mel, and edges lie 45.2 / 81 apart.
    assert picture[50].argmax() == round(15 / (45.2455 / 81)) - 1
    assert float(picture[50].max()) == pytest.approx(-20, abs=3)  # the window spreads a little
    assert float(picture[50, -1]) < -80
