"""The choices of the stream: how many corrupt samples, datasets mixed, texts and weights of samples, epochs."""

from collections import Counter
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.helpers.loaders import CHANNELS, build, config, split, take
from tests.helpers.sentences import refused
from tests.helpers.tokens import byte_tokenizer, token
from tools.harness.synthetic import flip_bits, make_samples, make_shards
from torchtitan.models.dit_tts.data.build import build_dataloader
from torchtitan.models.dit_tts.data.corrupt_samples import CorruptSampleCounter
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, open_dataset
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary


@pytest.mark.parametrize(
    "reads, left_out, allowed",
    [
        (8, 0, 10),  # 1 % of the first 1000, however early they come
        (50_000, 0, 100),  # five passes over the data read no more than is there
        (2000, 50, 10),  # half of the per cent was left out when the data were opened
    ],
)
def test_the_limit_is_a_fraction_of_what_was_read(reads, left_out, allowed):
    counter, dataset = CorruptSampleCounter("skip", 0.01), MagicMock(corrupt_samples=left_out)
    dataset.__len__.return_value = 10_000
    counter.reads = reads
    error = CorruptSampleError("a bit flipped")
    for sample in [*range(allowed), *range(allowed)]:  # what comes again counts once
        counter.skip(dataset, sample, error)
    with pytest.raises(InputError, match=f"{allowed + 1} corrupt samples .* a bit flipped"):
        counter.skip(dataset, allowed, error)


def test_a_shard_that_is_none_counts_for_all_its_samples(tmp_path):
    folder = make_shards(tmp_path, 120, seed=7, channels=CHANNELS, shards=4)
    (folder / "000002.tar").write_bytes(b"<html>not found</html>" * 99)
    with pytest.raises(ValueError, match="about 30 corrupt samples and 90 valid ones are 25.0%"):
        build(folder, on_error="skip", max_corrupt_fraction=0.2)
    assert len(build(folder, on_error="skip", max_corrupt_fraction=0.25).dataset) == 90


def test_a_bucket_without_a_valid_sample_is_an_error(tmp_path):
    folder = make_shards(tmp_path, 12, channels=CHANNELS, shards=1, frames=lambda _: 20)
    loader = build(folder, on_error="skip", max_corrupt_fraction=1.0)
    flip_bits(folder / "000000.tar", range(0, 36, 3))
    with pytest.raises(InputError, match="100 samples in a row are corrupt in the bucket of 24 fr"):
        take(loader, 1)
    loader.close()
    with pytest.raises(RuntimeError, match="the loader was closed"):
        take(loader, 1)


def test_the_duration_token_has_the_length_of_the_sample(tmp_path):
    folder = make_shards(tmp_path, 60, seed=7, channels=CHANNELS)
    # A token stands for two frames.
    timed = make_vocabulary(
        "bytes", conditioning=["duration"], duration_token_seconds=0.16, max_seconds=16.0
    )
    settings = config(folder, total=8, frames_per_second=12.5)
    for inputs, _ in take(build_dataloader(1, 0, UnitTokenizer(timed), settings), 5):
        for ids, frames in zip(inputs["text_ids"], inputs["frames"].tolist()):
            assert token(timed, int(ids[1])) == f"<duration:{frames // 2}>"


def test_mixed_datasets(tmp_path):
    """Two datasets whose shards have the same names."""
    a = make_shards(tmp_path / "a", 90, seed=1, channels=CHANNELS)
    b = make_shards(tmp_path / "b", 30, seed=2, channels=CHANNELS)
    settings = {"path": [str(a), str(b)], "weights": [1.0, 3.0]}
    state = build(None, **settings).state_dict()
    assert split(None, 2, 1, 5, state, **settings) == split(None, 1, 1, 5, **settings)
    with pytest.raises(ValueError, match="its dataset is .* restore the shards of .data. path"):
        build(a).load_state_dict(state)
    with pytest.raises(ValueError, match="its samples is .* weights or balance_by"):
        build(None, **{**settings, "weights": [1.0, 2.0]}).load_state_dict(state)
    with pytest.raises(ValueError, match="balance_by = 'quality', but no sample's JSON"):
        build(None, **settings, balance_by="quality")


def test_who_is_left_out_takes_nothing_of_the_others(tmp_path):
    """Weights and classes are those of the samples that are used."""
    for name, frames, rare in (("a", [100] * 10 + [40] * 10, 0), ("b", [40] * 20, 15)):
        lengths = iter(frames)
        samples = make_samples(20, seed=7, channels=CHANNELS, frames=lambda _: next(lengths))
        for number, sample in enumerate(samples):
            sample.metadata["speaker"] = "rare" if number >= rare else "common"
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "000000.tar", samples)
    settings = {"weights": [1.0, 3.0], "balance_by": "speaker", "balance_beta": 0.99999}
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    loader = build(None, path=paths, **settings, max_frames=48, num_buckets=1)
    order = loader.order
    drawn = [order.batch(k).samples for k in range(order.batches_before_epoch(20))]
    keys = [loader.dataset.sample_id(sample) for sample in np.concatenate(drawn).tolist()]
    of_b = [int(key[-2:]) for key in keys if key.startswith("b/")]
    assert len(of_b) / len(keys) == pytest.approx(0.75, abs=0.02)
    assert sum(number >= 15 for number in of_b) / len(of_b) == pytest.approx(0.5, abs=0.02)


def test_held_out_shards_are_refused_unless_allowed(tmp_path):
    for number, name in enumerate(("train", "heldout")):
        make_shards(tmp_path / name, 60, seed=number, channels=CHANNELS)
    both = str(tmp_path / "{train,heldout}")
    with pytest.raises(InputError, match=f"shards of {tmp_path}/heldout, .* --data.allow-heldout"):
        build(both)
    assert len(build(tmp_path / "train").dataset) == 60
    assert len(build(both, allow_heldout=True).dataset) == 120


def test_the_arithmetic_that_the_log_shows(tmp_path, monkeypatch):
    """The second shard has corrupt samples, and others that are too long or say too much."""
    lines, warnings = [], []
    monkeypatch.setattr("torchtitan.models.dit_tts.data.build.logger.info", lines.append)
    monkeypatch.setattr("torchtitan.models.dit_tts.data.build.logger.warning", warnings.append)
    lengths = iter([16] * 6 + [40, 40, 40, 20] + [100, 100, 20, 30, 30])
    samples = make_samples(15, channels=CHANNELS, frames=lambda _: next(lengths))
    for number, sample in enumerate(samples):
        sample.metadata.update(text="x" * (30 if number == 12 else 12))
        object.__setattr__(sample, "reference", sample.latents[:8])
    write_shard(tmp_path / "0.tar", samples[:10])
    write_shard(tmp_path / "1.tar", samples[10:])
    flip_bits(tmp_path / "1.tar", [3 * 3, 3 * 4])
    settings = {"bucket_frames": [16, 40], "max_frames": 48, "max_text_tokens": 24}
    settings |= {"frames_per_second": 0.1, "on_error": "skip", "max_corrupt_fraction": 0.2}
    build(tmp_path, **settings, ranks=2, accumulation=2)
    log = " ".join("\n".join(lines).split())
    for words in (
        "data: 10 samples, 0.66 hours, 2 shards; left out: 2 too long, 1 with too much text;",
        f"data: {tmp_path}/1.tar: 2 problems left out, the first: the .npy of sample 'utt000013'",
        "data: 8 to 16 samples per step = 2 ranks x 2 accumulation steps x 2 to 4; 0.9 steps per epoch;",
        "padding: 7.8% of the frames, 12.5% of the text",
    ):
        assert words in log, words
    [line] = warnings
    assert "3 of 13 samples, 36.7 of 76.0 minutes" in line and line.endswith("tokens 32")
    lines.clear()
    build(tmp_path, **settings, ranks=2, rank=1)
    assert not lines and len(warnings) == 1
    refused(
        lambda: build(tmp_path, **settings, max_dropped_fraction=0.2),
        "leaves out 15.4% of the 13 samples and max_text_tokens = 24 another 7.7%; ",
        "--data.max_frames 104 --data.max_text_tokens 32, or accept",
        "max_dropped_fraction = 0.24 (now 0.2)",
    )


def test_epochs_set_the_steps(tmp_path):
    folder = make_shards(tmp_path, 60, seed=7, channels=CHANNELS)
    settings = config(folder, total=8, epochs=3, num_buckets=1)
    build_dataloader(1, 0, byte_tokenizer(), settings)
    assert settings.training.steps == 3 * 60 // 8
    with pytest.raises(InputError, match="epochs = 1 of 60 samples are less than one global batch"):
        build_dataloader(1, 0, byte_tokenizer(), config(folder, total=64, epochs=1, num_buckets=1))


@pytest.fixture
def two_texts(tmp_path):
    """Even samples have a verbatim text, of letters that no text has; sample 0 is drawn five times as often."""
    samples = make_samples(60, seed=3, channels=CHANNELS)
    for number, sample in enumerate(samples):
        if number % 2 == 0:
            sample.metadata["text_verbatim"] = f"éh, {sample.metadata['text']}, éh."
    samples[1].metadata["text_verbatim"] = None
    samples[0].metadata["weight"] = 5
    samples[2].metadata["weight"] = 0.5
    for number in range(2):
        write_shard(tmp_path / f"{number:06d}.tar", samples[number::2])
    return tmp_path


def texts(batches):
    """[(sample id, text)] of the rows that byte tokens were made of."""
    decoded = []
    for inputs in batches:
        for name, ids, count in zip(
            inputs["sample_id"], inputs["text_ids"], inputs["text_tokens"], strict=True
        ):
            decoded.append((name, bytes(ids[1 : count - 1] - 3).decode()))
    return decoded


def test_each_draw_takes_one_of_the_texts(two_texts):
    dataset = open_dataset(str(two_texts), CHANNELS)
    known = {
        dataset.sample_id(i): [m["text"], m.get("text_verbatim") or m["text"]]
        for i, m in enumerate(dataset.metadata_of(range(60)))
    }

    def drawn(fraction):
        return texts(inputs for inputs, _ in take(build(two_texts, verbatim_fraction=fraction), 24))

    for fraction in (0, 1):
        assert all(text == known[name][fraction] for name, text in drawn(fraction))
    both = [(name, text) for name, text in drawn(0.4) if known[name][0] != known[name][1]]
    assert all(text in known[name] for name, text in both)
    verbatim = np.mean([text == known[name][1] for name, text in both])
    assert len(both) > 80 and abs(verbatim - 0.4) < 0.15
    # A sample meets both.
    assert max(Counter(name for name, _ in set(both)).values()) == 2
    packed = build(two_texts, verbatim_fraction=0.4, batching="packed", longest_per_row=4)
    assert packed.policy.longest[1] == max(len(each[1].encode()) for each in known.values()) + 2


def test_lengths_and_characters_are_of_both_texts(two_texts):
    plain, both = (open_dataset(str(two_texts), CHANNELS, verbatim=each) for each in (False, True))
    assert "é" not in plain.characters and "é" in both.characters
    rows = plain.metadata_of(range(60))
    longer = [m.get("text_verbatim") or m["text"] for m in rows]
    assert plain.text_bytes.tolist() == [len(m["text"].encode()) for m in rows]
    assert both.text_bytes.tolist() == [len(text.encode()) for text in longer]
    assert both.text_chars.tolist() == [len(text) for text in longer]
    # A text that only verbatim is too long is left out.
    limit = max(len(m["text"].encode()) for m in rows) + 2
    left_out = sum(len(text.encode()) + 2 > limit for text in longer)
    loader = build(two_texts, max_text_tokens=limit, verbatim_fraction=0.1)
    assert 0 < left_out == 60 - sum(loader.policy.sample_counts)


def test_samples_are_drawn_by_the_weights_in_their_json(two_texts):
    dataset = open_dataset(str(two_texts), CHANNELS)
    assert Counter(dataset.weight.tolist()) == {1.0: 58, 5.0: 1, 0.5: 1}
    loader = build(two_texts, use_sample_weights=True, num_buckets=1)
    counts, epochs = Counter(), 40
    for number in range(loader.order.batches_before_epoch(epochs)):
        counts.update(loader.order.batch(number).samples.tolist())
    total = 58 + 5 + 0.5
    for sample, weight in enumerate(dataset.weight.tolist()):
        assert abs(counts[sample] - epochs * 60 * weight / total) <= 2
    assert Counter(map(int, build(two_texts).order.batch(0).samples)).most_common(1)[0][1] == 1


@pytest.mark.parametrize("weight", [0, -1, "2", True, float(2**40)])
def test_a_weight_that_is_none_is_named_where_it_is_asked_for(tmp_path, weight):
    samples = make_samples(8, channels=CHANNELS)
    samples[3].metadata["weight"] = weight
    write_shard(tmp_path / "000000.tar", samples)
    build(tmp_path)
    length = len(samples[3].latents)
    build(tmp_path, use_sample_weights=True, max_frames=length - 1)  # it is left out
    words = "\"weight\" in the JSON of sample '000000:utt000003' is not a number from 1e-6 to 1e6"
    refused(lambda: build(tmp_path, use_sample_weights=True), words)
