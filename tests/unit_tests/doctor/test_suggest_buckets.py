"""Suggested buckets: what padding they cost, and that the loader takes them."""

import shlex

import numpy as np
import pytest

from tests.helpers.sound_samples import CHANNELS, changed, sound_samples, write_shards
from titan_tts.doctor.findings import Limits
from titan_tts.doctor.suggest_buckets import suggest
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.data.buckets import make_batch_policy, select_samples
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary


@pytest.fixture
def dataset(tmp_path):
    write_shards(tmp_path / "set", sound_samples())
    return open_dataset(str(tmp_path / "set"), CHANNELS)


def suggestion_of(dataset, limits=Limits(), paths=("set",)):
    return suggest(dataset, limits, paths)


def test_suggestion_can_be_pasted_and_trains(dataset):
    """The loader takes the options, which give the padding that is promised."""
    paths = ['/a "quoted" \\ folder', "/Ordner für 王"]
    suggestion = suggestion_of(dataset, paths=paths)
    options = load_config(shlex.split(suggestion["command_line"])).data
    assert options.path == paths
    options.batch_multiple, options.speaker_patch_size = 8, 4
    tokens = dataset.text_bytes + 2
    frames = select_samples(dataset.frames, tokens, options).frames
    policy = make_batch_policy(options, 32, frames, dataset.reference_frames, tokens)
    assert list(policy.edges) == suggestion["bucket_frames"]
    useful = [choice["useful_fraction"] for choice in suggestion["choices"]]
    enough = [number for number, each in enumerate(useful, 1) if each >= max(useful) - 0.02]
    assert suggestion["num_buckets"] == enough[0] > 1
    assert suggestion["samples"] == 24
    # The longest has 124 frames and a text of 69 + 2, references 30.
    names = "max_frames", "max_text_tokens", "max_speaker_frames"
    assert [suggestion[name] for name in names] == [128, 72, 32]
    assert policy.useful_fraction == pytest.approx(useful[enough[0] - 1], abs=1e-6)
    for stream in ("", "text_", "reference_"):
        padding = 1 - getattr(policy, f"useful_{stream}fraction")
        assert suggestion[f"{stream}padding_fraction"] == pytest.approx(padding, abs=1e-6)


def test_a_suggestion_keeps_the_speech_or_says_what_it_costs(tmp_path):
    """One long text and one long recording, each a part of the speech that counts, and a text that is none."""
    samples = sound_samples()
    long = np.random.default_rng(0).standard_normal((1000, CHANNELS)).astype(np.float16)
    samples[3] = changed(samples[3], metadata={"text": "long " * 60})
    samples[7] = changed(samples[7], latents=long)
    samples.append(changed(samples[0], key="short", latents=long[:9], metadata={"text": "x" * 999}))
    write_shards(tmp_path / "set", samples)
    dataset = open_dataset(str(tmp_path / "set"), CHANNELS)
    found = suggestion_of(dataset)
    assert (found["max_frames"], found["max_text_tokens"]) == (1000, 304)
    assert (found["samples"], found["left_out"]) == (24, 1)
    config = load_config(shlex.split(found["command_line"]))
    fits = (dataset.frames <= config.data.max_frames) & (dataset.text_bytes + 2 <= 304)
    assert dataset.frames[fits].sum() > 0.99 * dataset.frames.sum()
    # What the user gives is taken, and its cost named: the longest first, in seconds.
    words = suggestion_of(dataset, Limits(max_frames=768, max_text_tokens=192))["left_out_words"]
    lost = 1000 + 9 + len(samples[3].latents)
    assert (
        f"3 of 25 samples, {lost / 1500:.1f} of {dataset.frames.sum() / 1500:.1f} minutes" in words
    )
    assert words.index("utt007 (40.0 s)") < words.index("utt003") < words.index("short (0.4 s)")


def test_a_limit_of_phones_is_that_of_the_tokenizer_of_training(tmp_path):
    """Numbers have more phones than characters: a limit of bytes would leave most of these texts out."""
    text = "Am 24.12.1998 um 17:45"
    samples = [changed(each, metadata={"text": text, "language": "de"}) for each in sound_samples()]
    write_shards(tmp_path / "dates", samples)
    dataset = open_dataset(str(tmp_path / "dates"), CHANNELS)
    in_bytes = suggestion_of(dataset)["max_text_tokens"]
    found = suggestion_of(dataset, Limits(text_unit="phones:de"))
    vocabulary = Vocabulary("phones", "a", {}, 0.0, None, "de", (), "")
    needed = len(UnitTokenizer(vocabulary).encode(text))
    assert in_bytes < needed <= found["max_text_tokens"] < needed + 8
    short = suggestion_of(dataset, Limits(text_unit="phones:de", max_text_tokens=in_bytes))
    assert short is None


def test_without_stored_references_no_limit_of_them_is_suggested(tmp_path):
    """Those that training draws would be cut to it."""
    samples = [changed(each, reference=each.reference[:0]) for each in sound_samples()]
    write_shards(tmp_path / "set", samples)
    suggestion = suggestion_of(open_dataset(str(tmp_path / "set"), CHANNELS))
    assert "max_speaker_frames" not in suggestion["command_line"]


@pytest.mark.parametrize(
    ("paths", "training"),
    [
        (["heldout", "train", "other"], ["other", "train"]),
        (["*/shard-*.tar"], ["other", "train"]),
        (["other", "dev"], ["other"]),
        (["heldout"], []),
    ],
)
def test_held_out_shards_are_left_out(tmp_path, paths, training):
    parts = {
        name: sound_samples()[n::4] for n, name in enumerate(("train", "heldout", "other", "dev"))
    }
    for name, samples in parts.items():
        write_shards(tmp_path / name, samples, shards=1)
    given = [str(tmp_path / path) for path in paths]
    dataset = open_dataset(given, CHANNELS)
    suggestion = suggestion_of(dataset, Limits(max_frames=100), paths=given)
    if not training:
        assert suggestion is None
        return
    found = load_config(shlex.split(suggestion["command_line"])).data.path
    found = [found] if isinstance(found, str) else found
    assert sorted(found) == [str(tmp_path / name) for name in training]
    lengths = [len(sample.latents) for name in training for sample in parts[name]]
    assert suggestion["samples"] == sum(length <= 100 for length in lengths)
    assert suggestion["left_out"] == sum(length > 100 for length in lengths) > 0
    assert suggestion["held_out"] == len(dataset) - len(lengths)
