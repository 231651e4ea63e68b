"""What a resume, or a new run from a checkpoint's weights, may change of a config."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import config_from_dict
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.run import manifest
from torchtitan.models.dit_tts.run.manifest import write_manifest
from torchtitan.models.dit_tts.run.resume_rules import (
    adapter_base,
    check_trained_with,
    misfit,
    trained_with,
)


@pytest.mark.parametrize(
    ("key", "value", "of_weights"),
    [
        ("model.flavor", "small", True),
        ("objective.prediction", "noise", True),
        ("lora.rank", 7, False),
        ("ema.decays", [0.9], False),
        ("training.steps", 7, None),
        ("compile.enable", True, None),
    ],
)
def test_what_a_resume_and_a_new_run_may_change(tmp_path, key, value, of_weights):
    """of_weights: None for what may change, False for what a new run from these weights may."""
    write_manifest(tmp_path, [], trained_with(JobConfig()))
    changed = JobConfig()
    section, name = key.split(".")
    assert getattr(getattr(changed, section), name) != value
    setattr(getattr(changed, section), name, value)

    def check(allowed, resumes):
        check_trained_with(tmp_path, trained_with(changed), allowed, resumes)

    # Weights of another size fit nowhere: nobody is told to allow them.
    never = {"model.flavor": "give --model.flavor debug", "lora.rank": "give --lora.rank 0, or .*"}
    remedy = never.get(key, f".*allow {key}")
    refused = pytest.raises(InputError, match=f"^{key} = .* was trained with .*{remedy}$")
    with nullcontext() if of_weights is None else refused:
        check([], True)
    with refused if of_weights else nullcontext():
        check([], False)
    with refused if key == "lora.rank" else nullcontext():
        check([key], True)


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("alignment.teacher", "", "hubert"),
        ("objective.time_shift", 1.0, 2.0),
        ("data.on_too_long", "drop", "error"),
    ],
)
def test_keys_that_an_earlier_version_had(tmp_path, key, neutral, other):
    """The one that the run was trained with changed nothing, or cannot be the same."""
    now = trained_with(JobConfig())
    section, name = key.split(".")
    for value, refused in ((neutral, False), (other, True)):
        write_manifest(tmp_path, [], {**now, key: value})
        sentence = f"was trained with {value!r}; this version has no such key; .*allow {key}$"
        with pytest.raises(InputError, match=sentence) if refused else nullcontext():
            check_trained_with(tmp_path, now, [], True)
        check_trained_with(tmp_path, now, [key], True)
        check_trained_with(tmp_path, now, [], False)
        with pytest.raises(InputError, match="leave it out") if refused else nullcontext():
            config_from_dict({section: {name: value}}, "outputs/old/config.toml")


@pytest.mark.parametrize(
    "error, sentence",
    [
        ("Missing key in checkpoint state_dict: output.weight.", "an adapter alone .* rank = 3"),
        ("Missing key in checkpoint state_dict: optimizer.a.", "does not fit .*optimizer.a.;"),
        ("Size mismatch between saved (1) and (2) for optimizer.a", "an adapter alone .* rank = 3"),
        ("no space is left", None),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, error, sentence):
    write_manifest(tmp_path, [], {"lora.rank": 3})
    found = misfit(tmp_path, RuntimeError(error))
    assert found is None if sentence is None else re.search(sentence, str(found)), found
    found = misfit(Path("step-2"), RuntimeError(error))
    assert found is None if sentence is None else re.search("step-2 does not fit", str(found))


def test_an_adapter_s_base_is_known_by_its_files(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path, ["b", "a"], {"lora.rank": 0})
    known = {"lora.base": "44210f8bf3000399"}  # as earlier adapters have it
    assert adapter_base(tmp_path) == known


WIDTH = "objective.logit_std"


def test_keys_that_a_checkpoint_is_older_than(monkeypatch):
    """It was trained with their defaults, and not with whatever the config says now."""
    monkeypatch.setattr(manifest, "read_manifest", lambda path: {"trained_with": {}})
    for width, allowed, refused in ((1.0, [], False), (2.0, [], True), (2.0, ["a", WIDTH], False)):
        training = {WIDTH: width, "ema.decays": [0.9999]}
        with pytest.raises(InputError, match=f"{WIDTH} = 2.0, but") if refused else nullcontext():
            check_trained_with(Path("step-2"), training, allowed, True)
