"""A run's weights and the text encoder that they know: what may be loaded with what."""

from dataclasses import replace

import pytest

from tests.helpers.pretrained_checkpoints import write_tiny_t5
from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.text.encoder_record import (
    begins_to_train,
    check_fingerprint,
    read_record,
    write_record,
)
from torchtitan.models.dit_tts.text.hf_encoder import find_source, weight_files
from torchtitan.models.dit_tts.text.text_encoder import load_run_encoder


@pytest.fixture(scope="module")
def source(checkpoints):
    return find_source(str(checkpoints["t5"]))


@pytest.fixture
def runs(tmp_path, source):
    """Folders of a run with the encoder frozen and of one that trained it."""
    encoder = Encoder(model=source.model, dtype="float32")
    record = source.model, source.config.to_dict()
    for name, frozen in (("frozen", True), ("trained", False)):
        (tmp_path / name).mkdir()
        fingerprint = source.fingerprint("float32") if frozen else ""
        write_record(tmp_path / name, *record, replace(encoder, frozen=frozen), fingerprint)
    return tmp_path, encoder


def test_a_frozen_runs_encoder_must_be_the_same(runs, source, tmp_path):
    folder, encoder = runs
    fingerprint = source.fingerprint("float32")
    for name in ("frozen", "trained", "none"):
        check_fingerprint(folder / name, encoder, fingerprint if name == "frozen" else "0" * 16)
    for now, weights in ((encoder, "0" * 16), (replace(encoder, dtype="bfloat16"), fingerprint)):
        words = f"with weights {fingerprint} in float32, but these are {weights} in {now.dtype};"
        refused(lambda: check_fingerprint(folder / "frozen", now, weights), words)
    other = find_source(str(write_tiny_t5(tmp_path / "other", seed=1)))
    arguments = (folder / "frozen", replace(encoder, frozen=False), other.fingerprint, True)
    refused(lambda: begins_to_train(*arguments), "is not the encoder that the run")
    elsewhere = replace(encoder, model=other.model)
    refused(lambda: load_run_encoder(folder / "frozen", elsewhere, "cpu"), "trained with weights")


@pytest.mark.parametrize(
    "was, frozen, may_begin, found",
    [
        ("frozen", True, False, False),
        ("trained", False, True, False),
        ("frozen", False, True, True),
        ("frozen", False, False, "frozen = false"),
        ("trained", True, True, "frozen = true"),
    ],
)
def test_what_a_run_can_go_on_from(runs, source, was, frozen, may_begin, found):
    folder, encoder = runs
    now = replace(encoder, frozen=frozen, dtype="bfloat16")  # other than the record's
    arguments = (folder / was, now, source.fingerprint, may_begin)
    if isinstance(found, bool):
        assert begins_to_train(*arguments) is found
    else:
        refused(lambda: begins_to_train(*arguments), found, "with the opposite; set it back")


def test_a_corrupt_record_and_an_encoder_that_has_gone(runs, source, tmp_path):
    folder, encoder = runs
    # The encoder's sizes are known from the run; its weights are not, and nobody asks the hub for them.
    path = write_tiny_t5(tmp_path / "t5")
    known = find_source(str(path))
    write_record(folder, known.model, known.config.to_dict(), encoder, known.fingerprint("float32"))
    path.rename(tmp_path / "moved")
    gone = find_source(str(path), folder=folder)
    assert gone.width == known.width and weight_files(gone.model) == []
    words = ("t5' has no weights", "by --encoder")
    refused(lambda: load_run_encoder(folder, replace(encoder, model=str(path)), "cpu"), *words)
    load_run_encoder(folder, replace(encoder, model=str(tmp_path / "moved")), "cpu")
    for content in ("{", "{}", "[]", '"model"'):
        (folder / "frozen" / "text_encoder.json").write_text(content)
        refused(lambda: read_record(folder / "frozen"), "restore the file that the run wrote")
