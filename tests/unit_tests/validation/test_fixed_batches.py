"""The samples of every validation: which they are, and what stands in the place of text and reference."""

import numpy as np
import pytest
import torch

from tests.helpers.fixed_sets import CONDITIONS, HELDOUT, data_section, fixed_set, write_rows
from tools.harness.synthetic import flip_bits
from torchtitan.models.dit_tts.data.dataset import open_training_data
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.aligner import choose_recordings, fit_aligner
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer, with_duration
from torchtitan.models.dit_tts.validation.fixed_batches import CAPTION, SPEAKER, TEXT

ROWS = [*HELDOUT, ("one", "ann", 7, 5)]


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "heldout", ROWS)


@pytest.fixture
def four(tmp_path):
    """In one batch: ann's "one", bob's "two three", ann's "four" without a reference, ann's "one"."""
    return write_rows(tmp_path / "four", [ROWS[number] for number in (0, 1, 2, 5)])


def test_every_sample_in_batches_of_similar_lengths(rows):
    fixed = fixed_set(rows, batch_size=4, max_speaker_frames=6, speaker_patch_size=1)
    assert fixed.samples.tolist() == [5, 1, 2, 0, 3, 4]  # by frames; equal ones in their order
    # Of about one size: no sample is alone in the last, where no other text would be.
    assert [batch.tolist() for batch in fixed.batches] == [[5, 1, 2], [0, 3, 4]]
    first, second = fixed.load(0), fixed.load(1)
    assert first.rows.tolist() == [0, 1, 2] and second.rows.tolist() == [3, 4, 5]
    assert first.inputs["frames"].tolist() == [7, 9, 12]
    assert first.inputs["sample_id"] == [f"000000:utt{number}" for number in (5, 1, 2)]
    whole = fixed_set(rows, batch_size=4, max_frames=64, whole_rows=True)  # as generation's
    assert [whole.load(n).inputs["latents"].shape[1] for n in (0, 1)] == [64, 64]
    # No longer than a model's multiple above its longest.
    assert first.inputs["latents"].shape[1] < 32 and second.inputs["latents"].shape[1] == 32
    dataset = fixed.dataset
    for row, sample in enumerate((5, 1, 2)):
        loaded = dataset.load(sample)
        latents, length = first.inputs["latents"][row], len(loaded.latents)
        assert np.array_equal(latents[:length].numpy(), loaded.latents)
        assert not latents[length:].any()
        # A reference that is too long gives its first frames, as in generation.
        reference = first.inputs["speaker"][row, : first.inputs["speaker_frames"][row]]
        assert np.array_equal(reference.numpy(), loaded.reference[:6])


def test_an_even_selection(tmp_path):
    folder = write_rows(tmp_path / "many", [(f"n {n}", "ann", 10, 4) for n in range(101)])
    assert fixed_set(folder, count=5).samples.tolist() == [0, 25, 50, 75, 100]
    assert len(fixed_set(folder, count=101)) == len(fixed_set(folder, count=500)) == 101
    chosen = fixed_set(folder, count=64).samples
    assert len(chosen) == 64 and set(np.diff(chosen)) == {1, 2}


def test_another_rows_text_under_its_own_conditions(four):
    tokenizer = UnitTokenizer(CONDITIONS, conditioning_dropout=0.9)  # which is training's alone
    fixed = fixed_set(four, batch_size=4, tokenizer=tokenizer, frames_per_second=25.0)
    assert tokenizer.conditioning_dropout == 0.9
    batch = fixed.load(0)
    plain = UnitTokenizer(CONDITIONS)
    # Row 0 says "one" as row 3 does: the next that differs is taken, in a circle.
    for row, partner in enumerate((1, 2, 3, 1)):
        metadata, other = fixed.dataset.metadata_of([fixed.samples[n] for n in (row, partner)])
        own = with_duration(metadata, int(batch.inputs["frames"][row]), 25.0)
        for entries, text in (
            (batch.inputs, metadata["text"]),
            (batch.others[TEXT][0], other["text"]),
        ):
            ids = plain.encode(text, own)
            assert entries["text_ids"][row, : len(ids)].tolist() == ids
            assert entries["text_tokens"][row] == len(ids)
            assert not entries["text_ids"][row, len(ids) :].any()
    assert batch.others[TEXT][1].all()


def test_the_reference_of_another_speaker(four):
    batch = fixed_set(four, batch_size=4).load(0)
    assert batch.others[SPEAKER][1].tolist() == [True, True, False, True]
    inputs, other = batch.inputs, batch.others[SPEAKER][0]
    for row, partner in enumerate((1, 3, 2, 1)):
        for name in ("speaker", "speaker_frames"):
            assert torch.equal(other[name][row], inputs[name][partner])
    assert set(other) == {"speaker", "speaker_frames"}
    assert set(batch.others[TEXT][0]) == {"text_ids", "text_tokens", "text_positions"}
    assert (batch.others[TEXT][0]["text_positions"] == -1).all()


def test_another_caption(tmp_path):
    """The next in the circle that is another; rows without one, or for which there is none, do not count."""
    captions = [{"caption": "old"}, {"caption": "old "}, {}, {"caption": "très wild"}]
    for number, metadata in enumerate(captions):
        write_rows(tmp_path / str(number), [(f"n {number}", "ann", 10, 4)], **metadata)
    folders = [str(tmp_path / str(number)) for number in range(4)]
    fixed = fixed_set(tmp_path, batch_size=4, path=folders, max_caption_tokens=20)
    batch = fixed.load(0)
    assert batch.inputs["caption_ids"].shape == (4, 16)  # of the longest, not of 20
    other, measured = batch.others[CAPTION]
    assert measured.tolist() == [True, True, False, True]
    for row, partner in enumerate((3, 3, 2, 0)):
        for name in ("caption_ids", "caption_tokens"):
            assert torch.equal(other[name][row], batch.inputs[name][partner])
    assert fixed.gains == (TEXT, SPEAKER, CAPTION)
    plain = fixed_set(tmp_path, path=folders)
    assert plain.gains == (TEXT, SPEAKER) and CAPTION not in plain.load(0).others


def test_references_are_drawn_where_none_is_stored(tmp_path):
    spoken = [("one", "ann", 20), ("two", "bob", 9), ("four", "ann", 12), ("ten", "eve", 8)]
    folder = write_rows(tmp_path / "none", [(*each, 0) for each in spoken])
    assert not fixed_set(folder).load(0).inputs["speaker_frames"].any()
    drawn = fixed_set(folder, references="drawn")
    inputs = drawn.load(0).inputs
    ann = {20: 12, 12: 16}  # ann's other utterance, at most 16 frames
    frames = inputs["frames"].tolist()
    assert inputs["speaker_frames"].tolist() == [ann.get(each, 0) for each in frames]
    row = frames.index(20)
    four = drawn.dataset.load(2).latents
    assert np.array_equal(inputs["speaker"][row, :12], four)
    assert torch.equal(
        fixed_set(folder, references="drawn").load(0).inputs["speaker"], inputs["speaker"]
    )


def test_own_and_other_texts_are_placed_by_the_same_recording(four):
    recordings = choose_recordings(open_training_data(data_section(four)), 10**6)
    tokenizer = UnitTokenizer(CONDITIONS, aligner=fit_aligner(recordings))
    fixed = fixed_set(four, batch_size=4, tokenizer=tokenizer)
    batch = fixed.load(0)
    for row, partner in enumerate((1, 2, 3, 1)):
        text, other = (
            fixed.dataset.metadata_of([fixed.samples[n]])[0]["text"] for n in (row, partner)
        )
        latents, _ = fixed.dataset.read(fixed.samples[row])
        for entries, said in ((batch.inputs, text), (batch.others[TEXT][0], other)):
            wanted = tokenizer.text_positions(said, tokenizer.aligner.frames(said, latents))
            found = entries["text_positions"][row].tolist()
            assert found == pytest.approx([*wanted, *[-1] * (len(found) - len(wanted))])


@pytest.mark.parametrize(
    "rows, text, speaker",
    [
        ([("a", "ann", 5, 4), ("b", "ann", 6, 4)], True, False),  # one speaker
        ([("a b", "ann", 5, 4), ("a  b", "bob", 6, 4)], False, True),  # one text
        ([("a", None, 5, 4), ("b", "ann", 6, 4)], True, False),  # it may be she
        ([("a", "ann", 5, 0), ("b", "bob", 6, 4)], True, False),
        ([("a", "ann", 5, 4)], False, False),
    ],
)
def test_rows_without_another(tmp_path, rows, text, speaker):
    batch = fixed_set(write_rows(tmp_path / "rows", rows)).load(0)
    assert batch.others[TEXT][1].tolist() == [text] * len(rows)
    assert batch.others[SPEAKER][1].tolist() == [speaker] * len(rows)
    if not text:  # something must go through the network all the same
        assert torch.equal(batch.others[TEXT][0]["text_ids"], batch.inputs["text_ids"])
    if not speaker:
        assert torch.equal(batch.others[SPEAKER][0]["speaker"], batch.inputs["speaker"])


def test_long_samples_are_left_out_as_in_training(rows):
    kept = fixed_set(rows, max_frames=16)
    assert kept.samples.tolist() == [5, 1, 2] and kept.fitting.tolist() == [1, 2, 5]
    short = fixed_set(rows, max_text_tokens=8)
    assert 1 not in short.samples and len(short) == 5
    with pytest.raises(InputError, match="none of the 6 samples fits"):
        fixed_set(rows, max_frames=4)


def test_a_corrupt_sample_ends_the_run_or_is_left_out(rows, caplog):
    open_training_data(data_section(rows))  # indexed while it is valid
    flip_bits(rows / "000000.tar", [3 * 3])
    with pytest.raises(InputError, match="utt3"):
        fixed_set(rows, batch_size=6).load(0)
    fixed = fixed_set(rows, batch_size=6, on_error="skip", max_corrupt_fraction=0.5)
    assert fixed.samples.tolist() == [5, 1, 2, 0, 4]
    assert fixed.load(0).others[TEXT][1].all()
    assert caplog.text.count("validation skips it") == 1
