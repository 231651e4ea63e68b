"""`titan-tts evaluate`: texts, voices and lengths, and what the table of errors counts."""

import json
from types import SimpleNamespace

import numpy as np
import soundfile
import torch

from tests.helpers.row_model import CHANNELS, RowModel, moved
from tests.helpers.sampled_run import SPEAKERS, TOKENIZER, Echo
from torchtitan.models.dit_tts.cli import main
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.evaluation.evaluate import (
    HeldOut,
    read_heldout,
    synthesize,
    transcribe,
)
from torchtitan.models.dit_tts.flow.guidance import Guidance
from torchtitan.models.dit_tts.prepare.audio_reader import Utterance


def test_held_out_utterances_are_read_with_what_is_theirs(shards):
    items = read_heldout(open_dataset(str(shards), CHANNELS), 6)
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


def test_each_item_is_said_in_its_voice_for_its_estimated_time(loaded):
    """More than a batch; duration tokens have the estimated length, not the recording's."""
    items = [held_out(number) for number in range(18)]

    def fitted(text: str, speaker: str) -> int:
        return 2 + len(text) + 20 * SPEAKERS.index(speaker)

    def speech(model) -> list[torch.Tensor]:
        codec, durations = SimpleNamespace(decode=lambda row: row), SimpleNamespace(frames=fitted)
        return synthesize(loaded, model, codec, items, durations, Guidance(0.0, 0.0), 2, 5, "test")

    class Still(RowModel):
        def denoise(self, rows, *args):
            return torch.zeros_like(rows)

    noise = speech(Still())
    for item, start, found in zip(items, noise, speech(RowModel()), strict=True):
        frames = fitted(item.text, item.speaker)
        conditions = {"speaker": item.speaker, "target_duration": frames / 25}
        ids = TOKENIZER.encode(item.text, conditions)
        assert found.shape == (frames, CHANNELS)
        way = moved(ids, item.reference, frames, mean_time=0.75)
        torch.testing.assert_close(found, start - way, atol=1e-2, rtol=1e-5)
    # No two utterances start from one noise, not even the first of two batches.
    assert len({float(start[0, 0]) for start in noise}) == len(items)


class WordsInSamples:
    """A recognizer that reads a word for each sample: the tenth's index among the digits."""

    WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

    def check_texts(self, texts):
        pass

    def transcribe(self, sound, language: str = "") -> str:
        assert sound.sample_rate == 100
        return " ".join(self.WORDS[int(10 * value + 0.5)] for value in sound.waveform)

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
    errors, words = transcribe(WordsInSamples(), items, [WordsInSamples.sound(h) for h in heard])
    assert words == [sentence.split() for sentence in heard]
    assert errors.errors == {"ann": 1, "bob": 2} and errors.words == {"ann": 8, "bob": 2}
    assert errors.rates() == {"ann": 1 / 8, "bob": 1.0, "all": 3 / 10}  # not the mean of the two


def test_evaluate_compares_each_kind_of_audio_with_the_text_it_should_say(
    loaded, shards, monkeypatch, capsys
):
    """The trained model says all texts, the untrained none; the recordings lie in another order."""
    items = read_heldout(open_dataset(str(shards / "s1.tar"), CHANNELS), 6)
    untrained = RowModel()

    def spoken(run, model, codec, items, durations, guidance, steps, seed, label):
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
        ("config.manager.load_run_config", lambda folder: loaded.config),
        ("inference.load_run.load_run", lambda *arguments: loaded),
        ("codec.build_codec", lambda *arguments: Codec()),
        ("codec.record.check_codec", lambda *arguments: None),
        ("scoring.keyword_recognizer.KeywordRecognizer", lambda vocabulary: WordsInSamples()),
        ("inference.load_run.untrained_model", lambda run: untrained),
        ("sampling.duration.fit_durations", fitted),
        ("evaluation.evaluate.synthesize", spoken),
        ("prepare.audio_reader.read_audio_corpus", recordings),
    ):
        monkeypatch.setattr(f"torchtitan.models.dit_tts.{name}", replacement)
    arguments = ["--recordings=corpus.tar", "--pictures=0", "--text-scale=9", "--seed=11"]
    assert main(["evaluate", "run", f"--heldout={shards / 's1.tar'}", *arguments]) == 0
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
