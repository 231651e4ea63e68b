"""Runs with alignment heads: what changes, what is the same on any split, resume, and starts from weights
without heads and with them."""

import pytest
import torch

from tests.helpers.small_models import assert_equal
from tests.helpers.tiny_runs import Folder, killed
from titan_tts.speak.load_run import load_run
from torchtitan.models.dit_tts.model.alignment import is_of_head

CTC = ["--alignment.ctc_weight=0.1"]


@pytest.mark.long
def test_a_head_acts_on_the_weights_and_not_on_the_loss(tmp_path, train, caplog):
    caplog.set_level("INFO")
    runs = {}
    for name, arguments in {
        "plain": [],
        "ctc": CTC,
        "whole": [*CTC, "--training.local_batch_size=8"],
        "heavier": ["--alignment.ctc_weight=0.2"],
    }.items():
        caplog.clear()
        assert train(name, "--training.steps=4", *arguments) == 0
        runs[name] = Folder(tmp_path / name).metrics()
        assert ("8,513 of the alignment head" in caplog.text) == (name != "plain")
    plain, ctc, whole, heavier = runs.values()
    # The loss is the flow's alone, and the first is of the same weights.
    assert plain[0]["loss"] == ctc[0]["loss"] == heavier[0]["loss"]
    assert plain[0]["grad_norm"] < ctc[0]["grad_norm"] < heavier[0]["grad_norm"]
    assert ctc[0]["ctc"] == heavier[0]["ctc"] > 1.0 and "ctc" not in plain[0]
    assert abs(plain[-1]["loss"] - ctc[-1]["loss"]) > 1e-5
    assert ctc[-1]["ctc"] < ctc[0]["ctc"] - 0.5
    # However the batch is split.
    for row, other in zip(ctc, whole, strict=True):
        for name in ("loss", "grad_norm", "ctc"):
            assert row[name] == pytest.approx(other[name], rel=1e-5), name


@pytest.mark.long
def test_a_killed_run_with_heads_ends_as_the_unbroken_one(tmp_path, train, after_step):
    unbroken, run = Folder(tmp_path / "unbroken"), Folder(tmp_path / "killed")
    assert train("unbroken", "--training.steps=6", *CTC) == 0
    steps = {5: killed}
    after_step(steps)
    with pytest.raises(RuntimeError, match="killed"):
        train("killed", "--training.steps=6", *CTC)
    del steps[5]
    assert train("killed", "--training.steps=6", *CTC) == 0
    assert run.losses() == unbroken.losses()
    values = [[row["ctc"] for row in folder.metrics()] for folder in (unbroken, run)]
    assert values[0] == values[1]
    assert_equal(run.tensors(6), unbroken.tensors(6))
    found, expected = run.checkpoint(6), unbroken.checkpoint(6)
    heads = [name for name in expected if is_of_head(name)]
    assert len(heads) == 3 and not any("alignment" in name for name in expected["ema"])
    for weights in ("raw", "ema:0.999"):
        model = load_run(run.path, weights=weights).model
        assert model.alignment is None and not any(map(is_of_head, model.state_dict()))
    for name in heads:
        moment = f"state.{name}.exp_avg"
        assert torch.equal(found["optimizer"][moment], expected["optimizer"][moment])
        assert expected["optimizer"][moment].any()


@pytest.mark.long
def test_what_trains_is_refused_to_change_on_resume(tmp_path, train, capsys):
    assert train("plain", "--training.steps=2") == 0
    assert train("plain", "--training.steps=4", *CTC) == 2
    refused = capsys.readouterr().err
    assert "alignment.ctc_weight = 0.1, but" in refused and "trained with 0.0" in refused
    assert train("plain", "--training.steps=4", *CTC, "--resume.allow=alignment.ctc_weight") == 0
    rows = Folder(tmp_path / "plain").metrics()
    assert [("ctc" in row) for row in rows] == [False, False, True, True]
    optimizer = Folder(tmp_path / "plain").checkpoint(4)["optimizer"]
    assert optimizer["state.layers.0.mlp.down.weight.step"] == 4
    assert optimizer["state.alignment.ctc.output.weight.step"] < 4
    # And without it again.
    assert train("plain", "--training.steps=6", "--resume.allow=alignment.ctc_weight") == 0
    assert "ctc" not in Folder(tmp_path / "plain").metrics()[-1]


@pytest.mark.long
def test_a_run_starts_from_weights_without_heads_and_with_them(tmp_path, train):
    names = {"plain": [], "ctc": CTC}
    for name, arguments in names.items():
        assert train(name, "--training.steps=2", *arguments) == 0
    for state, steps in ([], 4), (["--checkpoint.no-initial_load_model_only"], 2):
        for name, other in (("plain", "ctc"), ("ctc", "plain")):
            new = f"{name}_{steps}_from_{other}"
            initial = f"--checkpoint.initial_load_path={tmp_path}/{other}/checkpoint/step-2"
            assert train(new, "--training.steps=4", initial, *state, *names[name]) == 0
            rows = Folder(tmp_path / new).metrics()
            assert len(rows) == steps and ("ctc" in rows[0]) == (name == "ctc")
