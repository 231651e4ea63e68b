"""A run's weights and the text encoder that they know: what may be loaded with what."""

from dataclasses import replace

import pytest

from tests.helpers.pretrained_checkpoints import write_tiny_t5
from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.text.encoder_record import (
    check_fingerprint,
    check_mode,
    load_run_encoder,
    write_record,
)
from torchtitan.models.dit_tts.text.hf_encoder import find_source, read_record
from torchtitan.models.dit_tts.text.hf_files import weight_files


@pytest.fixture(scope="module")
def source(checkpoints):
    return find_source(str(checkpoints["t5"]))


@pytest.fixture
def runs(tmp_path, source):
    """Folders of a run with the encoder frozen and of one that trained it."""
    encoder = Encoder(model=source.model, dtype="float32")
    for name, frozen in (("frozen", True), ("trained", False)):
        (tmp_path / name).mkdir()
        fingerprint = source.fingerprint("float32") if frozen else ""
        write_record(tmp_path / name, source, replace(encoder, frozen=frozen), fingerprint)
    return tmp_path, encoder


def test_a_frozen_runs_encoder_must_be_the_same(runs, source, tmp_path):
    folder, encoder = runs
    check_fingerprint(folder / "frozen", encoder, source.fingerprint("float32"))
    check_fingerprint(folder / "none", encoder, "0" * 16)
    for name, own in (("frozen", source.fingerprint("float32")), ("trained", "")):
        record, dtype = read_record(folder / name), "float32" if own else ""
        assert (record["model"], record["frozen"]) == (source.model, bool(own))
        assert (record["dtype"], record["fingerprint"]) == (dtype, own)
    for now, words in ((encoder, "weights"), (replace(encoder, dtype="bfloat16"), "has bfloat16")):
        refused(lambda: check_fingerprint(folder / "frozen", now, "0" * 16), words)
    other = find_source(str(write_tiny_t5(tmp_path / "other", seed=1)))
    arguments = (folder / "frozen", other, replace(encoder, frozen=False), False, True)
    refused(lambda: check_mode(*arguments), "is not the encoder that the run")
    elsewhere = replace(encoder, model=other.model)
    refused(lambda: load_run_encoder(folder / "frozen", elsewhere, "cpu"), "trained with weights")


@pytest.mark.parametrize(
    ("was", "frozen", "resumes", "model_only", "found"),
    [
        ("frozen", True, True, False, False),
        ("trained", False, False, True, False),
        ("frozen", False, False, True, True),
        ("frozen", False, False, False, "initial_load_model_only = true"),
        ("frozen", False, True, False, "set it back"),
        ("trained", True, True, False, "set it back"),
        ("trained", True, False, True, "set frozen = false"),
    ],
)
def test_what_a_run_can_go_on_from(runs, source, was, frozen, resumes, model_only, found):
    folder, encoder = runs
    now = replace(encoder, frozen=frozen, dtype="bfloat16")  # other than the record's
    arguments = (folder / was, source, now, resumes, model_only)
    if isinstance(found, bool):
        assert check_mode(*arguments) is found
    else:
        refused(lambda: check_mode(*arguments), found)


def test_a_corrupt_record_and_an_encoder_that_has_gone(runs, source, tmp_path):
    folder, encoder = runs
    # The encoder's sizes are known from the run; its weights are not, and nobody asks the hub for them.
    path = write_tiny_t5(tmp_path / "t5")
    known = find_source(str(path))
    write_record(folder, known, encoder, known.fingerprint("float32"))
    path.rename(tmp_path / "moved")
    gone = find_source(str(path), folder=folder)
    assert gone.width == known.width and weight_files(gone.model) == []
    words = ("t5' does not exist any more", "by --encoder")
    refused(lambda: load_run_encoder(folder, replace(encoder, model=str(path)), "cpu"), *words)
    load_run_encoder(folder, replace(encoder, model=str(tmp_path / "moved")), "cpu")
    for content in ("{", "{}", "[]", '"model"'):
        (folder / "frozen" / "text_encoder.json").write_text(content)
        refused(lambda: read_record(folder / "frozen"), "restore the file that the run wrote")
