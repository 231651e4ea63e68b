"""How long a text takes to say, fitted on texts and speakers whose rates are known."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.text import durations
from torchtitan.models.dit_tts.text.durations import (
    fit_durations,
    language_unlike_phones,
    read_evenly,
    stored_durations,
)

LETTERS = "abcdefghij"
FRAMES = np.arange(2, 12)
"""frames that each of the letters takes"""


def frames_of(text: str) -> int:
    return 6 + sum(FRAMES[LETTERS.index(letter)] for letter in text)


def write_samples(path, samples):
    """samples: (frames, metadata)."""
    triplets = []
    for number, (frames, metadata) in enumerate(samples):
        latents = np.zeros((frames, 1), np.float16)
        triplets.append(Triplet(f"s{number}", latents, latents[:1], metadata))
    write_shard(path, triplets)
    return open_dataset(str(path), 1)


@pytest.fixture(scope="module")
def fit(tmp_path_factory):
    """`fast` and `slow` say the same texts, `slow` in three times the frames."""
    generator = np.random.default_rng(0)
    samples = []
    for _ in range(60):
        text = "".join(generator.choice(list(LETTERS), size=int(generator.integers(5, 40))))
        for speaker, rate in (("fast", 1), ("slow", 3)):
            samples.append((rate * frames_of(text), {"text": text, "speaker": speaker}))
    return fit_durations(
        write_samples(tmp_path_factory.mktemp("rates") / "a.tar", samples), Encoder()
    )


def test_letters_and_speakers_have_rates_of_their_own(fit):
    """Within what the ridge takes; letters that were never seen take no time."""
    for text in ("abcdefghijabcdefghij", "jjjjjjjjjjjj"):
        for speaker, rate in (("fast", 1), ("slow", 3), (None, 2), ("nobody", 2)):
            assert fit.frames(text, speaker) == pytest.approx(rate * frames_of(text), rel=0.03)
    assert fit.weights[-1] * 0.5 == pytest.approx(6, abs=2)
    assert fit.weights[ord("z")] == 0
    assert fit.estimate("a\ud800", None) > 0  # asked of a reference before anything is checked
    assert fit.frames("", "fast") >= 1 and fit.frames("zzz", "fast") == fit.frames("", "fast")
    assert replace(fit, weights=-fit.weights).frames("abc", "fast") == 1


class Samples:
    """What the fit reads of a dataset: texts of five to forty words, 5 frames and 1.5 a letter, give or
    take a tenth; and others."""

    def __init__(self, *others: tuple[str, int]):
        generator = np.random.default_rng(1)
        letters = list("etaoinshrdlu")

        def word() -> str:
            return "".join(generator.choice(letters, generator.integers(1, 9)))

        texts = [" ".join(word() for _ in range(generator.integers(5, 40))) for _ in range(400)]
        noise = generator.normal(1.0, 0.1, 400)
        frames = [int(5 + 1.5 * len(text) * n) for text, n in zip(texts, noise)]
        self.texts = [*texts, *(text for text, _ in others)]
        self.frames = np.array([*frames, *(n for _, n in others)])

    def metadata_of(self, samples: list[int]) -> list[dict[str, str]]:
        return [{"text": self.texts[sample]} for sample in samples]


@pytest.mark.parametrize(
    "text, frames",
    [("all that is in the tale instead of a line " * 300, 150), ("a short one", 30_000)],
)
def test_a_text_that_is_not_its_speechs_bends_no_fit(text, frames):
    clean, bent = (fit_durations(each, Encoder()) for each in (Samples(), Samples((text, frames))))
    for sentence in Samples().texts[:5]:
        assert bent.frames(sentence, None) == pytest.approx(clean.frames(sentence, None), rel=0.02)
    assert bent.weights[-1] == pytest.approx(clean.weights[-1], abs=1)


def test_a_few_texts_leave_what_the_base_knows(fit, tmp_path):
    """Eight texts of half of the letters, said more slowly: the others keep their ratios at the new rate."""
    generator, samples = np.random.default_rng(2), []
    for _ in range(8):
        text = "".join(generator.choice(list("abcde"), size=12))
        noise = float(generator.normal(1, 0.03))
        samples.append((round(3 * frames_of(text) * noise), {"text": text, "speaker": "new"}))
    data = write_samples(tmp_path / "a.tar", samples)
    started, alone = fit_durations(data, Encoder(), fit), fit_durations(data, Encoder())
    for text in ("fghij", "jjjjjjjj", "abcdefghij"):
        assert started.frames(text, "new") == pytest.approx(3 * frames_of(text), rel=0.1)
    assert alone.frames("fghij", "new") < started.frames("fghij", "new")
    # Rates belong to voices: the base's keep theirs, and a voice without a name has the base's.
    for name, rate in (("fast", 1), ("slow", 3), (None, 2)):
        assert started.frames("fghij", name) == pytest.approx(rate * frames_of("fghij"), rel=0.05)
    unnamed = [(frames, {"text": each["text"]}) for frames, each in samples]
    others = [(frames, each | {"speaker": f"{n}"}) for n, (frames, each) in enumerate(samples)]
    for number, given in enumerate((unnamed, others)):  # what every voice has, or most voices
        spread = fit_durations(write_samples(tmp_path / f"{number}.tar", given), Encoder(), fit)
        for name, rate in ((None, 3), ("fast", 1)):
            assert spread.frames("fghij", name) == pytest.approx(rate * frames_of("fghij"), rel=0.1)


def test_another_language_begins_with_the_letters_of_the_base(fit, tmp_path):
    """If both are phones; letters of a text are said otherwise in each language."""
    samples = [(frames_of("abc") * 2, {"text": "abc", "speaker": "new"})] * 4
    data = write_samples(tmp_path / "a.tar", samples)
    for language, knows in (("en-us", True), ("", False)):
        base = replace(fit, language=language, normalize="en" if language else "")
        found = fit_durations(data, Encoder(model="phones:es"), base)
        assert (found.language, found.normalize) == ("es", "")
        assert ("fast" in found.speaker_scale) == knows
        assert (found.weights[ord("j")] > 5) == knows


def test_an_event_takes_its_time(tmp_path):
    """And the tokens of turns none; stored and read."""
    generator, tokens, samples = np.random.default_rng(1), ["[S1]", "(laugh)"], []
    for number in range(80):
        text = "".join(generator.choice(list(LETTERS), size=int(generator.integers(5, 40))))
        laughs = number % 3
        said = f"[S1] {text}" + " (laugh)" * laughs
        samples.append((frames_of(text) + 20 * laughs, {"text": said}))
    data = write_samples(tmp_path / "a.tar", samples)
    path = tmp_path / "durations.json"
    path.write_text(fit_durations(data, Encoder(added_tokens=tokens)).to_json())
    fit = stored_durations(tmp_path)
    for laughs in (0, 1, 4):
        text = "[S1] abc" + " (laugh)" * laughs
        assert fit.frames(text, None) == pytest.approx(frames_of("abc") + 20 * laughs, abs=2)
    earlier = json.loads(fit.to_json()) | {"weights": fit.weights[:257].tolist()}
    path.write_text(json.dumps(earlier))  # as written before tokens counted
    assert stored_durations(tmp_path).frames("[S1] abc (laugh)", None) == fit.frames("abc", None)


def test_corrupt_texts_are_left_out_and_a_large_dataset_is_read_evenly(tmp_path, monkeypatch):
    path = tmp_path / "a.tar"
    dataset = write_samples(path, [(number + 8, {"text": "a"}) for number in range(5)])
    monkeypatch.setattr(durations, "_MAX_SAMPLES", 3)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"text": "a"', b'"text": "b"', 1))
    metadata, frames = read_evenly(dataset)
    assert [each["text"] for each in metadata] == ["a"] * 2 and frames.tolist() == [10, 12]
    path.write_bytes(content.replace(b'"text": "a"', b'"text": "b"'))
    refused(lambda: fit_durations(dataset, Encoder()), "no sample to fit durations on")


def test_it_is_stored_to_the_bit(fit, tmp_path):
    refused(lambda: stored_durations(tmp_path), "durations.json", "restore the file")
    path = tmp_path / "durations.json"
    path.write_text(fit.to_json())
    found = stored_durations(tmp_path)
    assert (found.weights == fit.weights).all() and found.speaker_scale == fit.speaker_scale
    zeros = {"weights": [0.0] * 257, "speaker_scale": {}}
    wrong = ({"weights": [1.0]}, {"speaker_scale": {"a": math.nan}})
    for content in ("{", *map(json.dumps, [{}, [], *(zeros | each for each in wrong)])):
        path.write_text(content)
        refused(lambda: stored_durations(tmp_path), f"{path} ", "restore the file")


@pytest.mark.parametrize(
    "model, labels, found",
    [
        ("phones:en-us", ["de", "de-AT", "en", "de-AT"], "de-AT"),
        ("phones:en-us", ["EN", "en_GB", "de", None], ""),
        ("phones:en-us", ["de", None, None], ""),
        ("phones:cmn", ["zh"], ""),
        ("phones:de", ["German"], ""),
        ("chars", ["de"], ""),
    ],
)
def test_a_language_unlike_the_phones_is_told(tmp_path, model, labels, found):
    labels = [{} if each is None else {"language": each} for each in labels]
    dataset = write_samples(tmp_path / "a.tar", [(4, {"text": "a"} | each) for each in labels])
    assert language_unlike_phones(dataset, model) == found
