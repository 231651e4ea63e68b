"""Which of two texts a draw takes, and how often a sample is drawn by the weight in its JSON."""

from collections import Counter

import numpy as np
import pytest

from tests.helpers.loaders import CHANNELS, assert_same, build, build_and_load, global_batches, take
from tests.helpers.sentences import refused
from tests.helpers.tokens import byte_tokenizer
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.text.token_counts import count_text_tokens


@pytest.fixture
def folder(tmp_path):
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
            decoded.append((name, byte_tokenizer().decode(ids[:count].tolist())))
    return decoded


@pytest.mark.parametrize("batching", [{}, {"batching": "packed", "longest_per_row": 4}])
def test_each_draw_takes_one_of_the_texts_by_its_position(folder, batching):
    dataset = open_dataset(str(folder), CHANNELS)
    known = {
        dataset.sample_id(i): [m["text"], m.get("text_verbatim") or m["text"]]
        for i, m in enumerate(dataset.metadata_of(range(60)))
    }
    for fraction in (0.0, 1.0) if not batching else ():
        drawn = texts(global_batches(folder, 1, 1, 12, verbatim_fraction=fraction))
        assert all(text == known[name][int(fraction)] for name, text in drawn)
    if batching:
        loader = build(folder, verbatim_fraction=0.4, **batching)
        assert loader.policy.longest[1] == max(len(each[1].encode()) for each in known.values()) + 2
        assert len(take(loader, 6)) == 6
        return
    one = global_batches(folder, 1, 1, 24, verbatim_fraction=0.4)
    drawn = [(name, text) for name, text in texts(one) if known[name][0] != known[name][1]]
    assert all(text in known[name] for name, text in drawn)
    verbatim = np.mean([text == known[name][1] for name, text in drawn])
    assert len(drawn) > 80 and abs(verbatim - 0.4) < 0.15
    # A sample meets both, and the split over ranks and a resume change nothing.
    assert max(Counter(name for name, _ in set(drawn)).values()) == 2
    for left, right in zip(one, global_batches(folder, 2, 2, 24, verbatim_fraction=0.4)):
        assert_same(left, right)
    loader = build(folder, verbatim_fraction=0.4)
    take(loader, 9)
    resumed = build_and_load(folder, loader.state_dict(), verbatim_fraction=0.4)
    for left, (inputs, labels) in zip(one[9:], take(resumed, 6)):
        inputs.pop("accumulation_steps")
        assert_same(left, inputs | {"labels": labels})


def test_lengths_and_characters_are_of_both_texts(folder):
    plain, both = (open_dataset(str(folder), CHANNELS, verbatim=each) for each in (False, True))
    assert "é" not in plain.characters and "é" in both.characters
    rows = plain.metadata_of(range(60))
    longer = [m.get("text_verbatim") or m["text"] for m in rows]
    assert plain.text_bytes.tolist() == [len(m["text"].encode()) for m in rows]
    assert both.text_bytes.tolist() == [len(text.encode()) for text in longer]
    assert both.text_chars.tolist() == [len(text) for text in longer]

    class Words:
        fingerprint = "words"

        def counts(self, texts):
            return [len(text.split()) for text in texts]

    for _ in range(2):  # made, then read
        assert count_text_tokens(plain, Words()).tolist() == [len(m["text"].split()) for m in rows]
        assert count_text_tokens(both, Words()).tolist() == [len(text.split()) for text in longer]
    # A text that only verbatim is too long is left out.
    limit = max(len(m["text"].encode()) for m in rows) + 2
    left_out = sum(len(text.encode()) + 2 > limit for text in longer)
    assert 0 < left_out
    loader = build(folder, max_text_tokens=limit, verbatim_fraction=0.1)
    assert sum(loader.policy.sample_counts) == 60 - left_out


def test_samples_are_drawn_by_the_weights_in_their_json(folder):
    dataset = open_dataset(str(folder), CHANNELS)
    assert Counter(dataset.weight.tolist()) == {1.0: 58, 5.0: 1, 0.5: 1}
    loader = build(folder, use_sample_weights=True, num_buckets=1)
    counts, epochs = Counter(), 40
    for number in range(loader.order.batches_before_epoch(epochs)):
        counts.update(loader.order.batch(number).samples.tolist())
    total = 58 + 5 + 0.5
    for sample, weight in enumerate(dataset.weight.tolist()):
        assert abs(counts[sample] - epochs * 60 * weight / total) <= 2
    assert Counter(map(int, build(folder).order.batch(0).samples)).most_common(1)[0][1] == 1


@pytest.mark.parametrize("weight", [0, -1, "2", True, float(2**40)])
def test_a_weight_that_is_none_is_named_where_it_is_asked_for(tmp_path, weight):
    samples = make_samples(8, channels=CHANNELS)
    samples[3].metadata["weight"] = weight
    write_shard(tmp_path / "000000.tar", samples)
    build(tmp_path)
    refused(
        lambda: build(tmp_path, use_sample_weights=True),
        "\"weight\" in the JSON of sample '000000:utt000003' is no number from 1e-6 to 1e6",
    )
