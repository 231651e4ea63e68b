"""A run's weights and the text encoder that they know: what may be loaded with what."""

from dataclasses import replace

import pytest

from tests.helpers.pretrained_checkpoints import write_tiny_t5
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.encoder_record import (
    check_fingerprint,
    check_mode,
    load_run_encoder,
    write_record,
)
from torchtitan.models.dit_tts.text.hf_encoder import find_source, read_record
from torchtitan.models.dit_tts.text.hf_files import weight_files


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return find_source(str(write_tiny_t5(tmp_path_factory.mktemp("encoder") / "t5")))


@pytest.fixture
def runs(tmp_path, source):
    """Folders of a run with the encoder frozen and of one that trained it."""
    encoder = Encoder(model=source.model, dtype="float32")
    for name, frozen in (("frozen", True), ("trained", False)):
        (tmp_path / name).mkdir()
        fingerprint = source.fingerprint("float32") if frozen else ""
        write_record(tmp_path / name, source, replace(encoder, frozen=frozen), fingerprint)
    return tmp_path, encoder


def test_a_frozen_runs_encoder_must_be_the_same(runs, source):
    folder, encoder = runs
    check_fingerprint(folder / "frozen", encoder, source.fingerprint("float32"))
    with pytest.raises(InputError, match="weights"):
        check_fingerprint(folder / "frozen", encoder, "0" * 16)
    with pytest.raises(InputError, match="dtype float32, but now has bfloat16"):
        check_fingerprint(folder / "frozen", replace(encoder, dtype="bfloat16"), "0" * 16)
    check_fingerprint(folder / "none", encoder, "0" * 16)


@pytest.mark.parametrize(
    ("was", "frozen", "resumes", "model_only", "found"),
    [
        ("frozen", True, True, False, False),
        ("trained", False, True, False, False),
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
    arguments = (folder / was, source, replace(encoder, frozen=frozen), resumes, model_only)
    if isinstance(found, bool):
        assert check_mode(*arguments) is found
    else:
        with pytest.raises(InputError, match=found):
            check_mode(*arguments)


def test_an_encoder_is_not_trained_on_from_weights_that_knew_another(runs, tmp_path):
    folder, encoder = runs
    other = find_source(str(write_tiny_t5(tmp_path / "other", seed=1)))
    with pytest.raises(InputError, match="is not the encoder that the run"):
        check_mode(folder / "frozen", other, replace(encoder, frozen=False), False, True)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '"model"', "[" * 99999])
def test_a_corrupt_record_is_refused(runs, source, content):
    folder, _ = runs
    (folder / "frozen" / "text_encoder.json").write_text(content)
    for read in (read_record, lambda there: find_source(source.model, folder=there)):
        with pytest.raises(InputError, match="restore the file that the run wrote"):
            read(folder / "frozen")


def test_an_encoders_folder_that_has_gone(runs, tmp_path):
    """What it was is known from the run; its weights are not, and nobody asks the hub for them."""
    folder, encoder = runs
    place = write_tiny_t5(tmp_path / "t5")
    known = find_source(str(place))
    write_record(folder, known, encoder, known.fingerprint("float32"))
    place.rename(tmp_path / "moved")
    source = find_source(str(place), folder=folder)
    assert source.width == known.width and weight_files(source.model) == []
    gone = replace(encoder, model=str(place))
    with pytest.raises(InputError, match="t5' is not there any more.*by --encoder"):
        load_run_encoder(folder, gone, "cpu")
    load_run_encoder(folder, replace(encoder, model=str(tmp_path / "moved")), "cpu")
