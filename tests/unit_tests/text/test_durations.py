"""How long a text takes to say, fitted on texts and speakers whose rates are known."""

import numpy as np
import pytest

from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.durations import (
    LinearDurationModel,
    durations_from_json,
    fit_durations,
    stored_durations,
)

LETTERS = "abcdefghij"
FRAMES = np.arange(2, 12)
"""frames that each of the letters takes"""


def frames_of(text: str, rate: float = 1.0) -> int:
    return int(rate * (6 + sum(FRAMES[LETTERS.index(letter)] for letter in text)))


@pytest.fixture(scope="module")
def fit(tmp_path_factory):
    """`fast` and `slow` say the same texts, `slow` in three times the frames."""
    generator = np.random.default_rng(0)
    samples = []
    for number in range(60):
        text = "".join(generator.choice(list(LETTERS), size=int(generator.integers(5, 40))))
        for speaker, rate in (("fast", 1), ("slow", 3)):
            latents = np.zeros((frames_of(text, rate), 1), np.float16)
            metadata = {"text": text, "speaker": speaker}
            samples.append(Triplet(f"{speaker}{number}", latents, latents[:1], metadata))
    path = tmp_path_factory.mktemp("rates") / "a.tar"
    write_shard(path, samples)
    return fit_durations(open_dataset(str(path), 1))


@pytest.mark.parametrize("text", ["abcdefghijabcdefghij", "jjjjjjjjjjjj"])
def test_letters_and_speakers_have_rates_of_their_own(fit, text):
    """Within what the ridge takes."""
    assert fit.frames(text, "fast") == pytest.approx(frames_of(text), rel=0.03)
    assert fit.frames(text, "slow") == pytest.approx(3 * frames_of(text), rel=0.03)
    for unknown in (None, "", "nobody"):
        assert fit.frames(text, unknown) == pytest.approx(2 * frames_of(text), rel=0.03)


def test_the_weights_are_those_of_ridge_regression(fit):
    """A text's constant is the fitted one, and letters that were never seen take no time."""
    assert fit.weights[-1] * 0.5 == pytest.approx(6, abs=2)
    assert fit.weights[ord("z")] == 0 and fit.unseen("abzzé") == ["z", "é"]
    assert (
        fit.estimate("a\ud800", None) > 0
    )  # of a reference it is asked before anything is checked
    assert fit.frames("", "fast") >= 1 and fit.frames("zzz", "fast") == fit.frames("", "fast")


def test_room_of_the_bytes(fit):
    """Of unknown ones that of a letter in the middle, and of none less than a tenth of a frame."""
    widths = fit.char_widths()
    frames = np.array(widths.frames_per_byte)
    assert frames[list(LETTERS.encode())] == pytest.approx(2 * FRAMES, rel=0.1, abs=0.5)
    assert frames[ord("z")] == pytest.approx(2 * np.median(FRAMES), rel=0.1)
    assert widths.edge_frames == pytest.approx(6, abs=1)
    silent = LinearDurationModel(np.array([-3.0, 1.0] + [0.0] * 254 + [-4.0]), {}).char_widths()
    assert silent.frames_per_byte[:2] == (0.1, 1.0) and silent.edge_frames == 0
    empty = LinearDurationModel(np.zeros(257), {}).char_widths()
    assert set(empty.frames_per_byte) == {1.0}


def english(count: int) -> tuple[list[str], list[int]]:
    """Texts of five to forty words, and frames: 5 and 1.5 a letter, give or take a tenth."""
    generator = np.random.default_rng(1)
    letters = list("etaoinshrdlu")

    def word() -> str:
        return "".join(generator.choice(letters, generator.integers(1, 9)))

    texts = [" ".join(word() for _ in range(generator.integers(5, 40))) for _ in range(count)]
    noise = generator.normal(1.0, 0.1, count)
    return texts, [int(5 + 1.5 * len(text) * factor) for text, factor in zip(texts, noise)]


class _Samples:
    """What the fit reads of a dataset."""

    def __init__(self, texts: list[str], frames: list[int]):
        self.texts, self.frames = texts, np.array(frames)

    def metadata_of(self, samples: list[int]) -> list[dict[str, str]]:
        return [{"text": self.texts[sample]} for sample in samples]


@pytest.mark.parametrize(
    "text, frames",
    [("all that is in the tale instead of a line " * 300, 150), ("a short one", 30_000)],
)
def test_a_text_that_is_not_its_speechs_bends_no_fit(text, frames):
    texts, lengths = english(400)
    clean = fit_durations(_Samples(texts, lengths))
    bent = fit_durations(_Samples([*texts, text], [*lengths, frames]))
    for sentence in texts[:5]:
        assert bent.frames(sentence, None) == pytest.approx(clean.frames(sentence, None), rel=0.02)
    assert bent.char_widths().edge_frames == pytest.approx(clean.char_widths().edge_frames, abs=0.5)


def test_bytes_have_the_same_room_where_lengths_do_not_tell():
    """Pieces of ten seconds each, whatever they say: their fit would put all text at one point."""
    texts, lengths = english(400)
    assert fit_durations(_Samples(texts, lengths)).explained > 0.9
    cut = fit_durations(_Samples(texts, [250] * 400))
    assert cut.explained < 0.3
    assert set(cut.char_widths().frames_per_byte) == {1.0} and cut.char_widths().edge_frames == 0.0
    assert durations_from_json(cut.to_json(), "x").char_widths() == cut.char_widths()


def test_corrupt_texts_are_left_out(tmp_path):
    samples = [
        Triplet(
            f"s{n}", np.zeros((8 + n, 1), np.float16), np.zeros((1, 1), np.float16), {"text": "a"}
        )
        for n in range(2)
    ]
    path = tmp_path / "a.tar"
    write_shard(path, samples)
    dataset = open_dataset(str(path), 1)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"text": "a"', b'"text": "b"', 1))
    left = fit_durations(dataset)
    assert left.frames("a", None) == 6  # 2/3 of 9 frames, by the ridge; of both samples it were 7
    path.write_bytes(content.replace(b'"text": "a"', b'"text": "b"'))
    with pytest.raises(InputError, match="no sample to fit durations on"):
        fit_durations(dataset)


def test_it_is_stored_to_the_bit(fit, tmp_path):
    assert stored_durations(tmp_path) is None
    path = tmp_path / "durations.json"
    path.write_text(fit.to_json())
    found = stored_durations(tmp_path)
    assert (found.weights == fit.weights).all() and found.speaker_scale == fit.speaker_scale


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"weights": [1.0], "speaker_scale": {}}',
        '{"weights": %s, "speaker_scale": {"a": NaN}}' % ([0.0] * 257),
        '{"weights": %s}' % ([0.0] * 257),
    ],
)
def test_what_is_no_fit_is_refused(content):
    with pytest.raises(InputError, match="outputs/a/durations.json .*restore the file"):
        durations_from_json(content, "outputs/a/durations.json")
