"""A run's model, as it is built to sample from: its weights, and those that it started from."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_tts.cli import main
from titan_tts.evaluate.evaluate import Evaluation
from titan_tts.evaluate.options import Options as EvaluateOptions
from titan_tts.evaluate.systems import find_places
from titan_tts.speak.load_run import LoadedRun, load_run, untrained_model
from torchtitan.models.dit_tts import DiTTTSModel, model_flavors
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import JsonLines
from torchtitan.models.dit_tts.flow.objective import build_objective
from torchtitan.models.dit_tts.run.checkpoint_storage import CheckpointWriter

SEED = 3
CONFIG = f"""
[model]
flavor = "debug"
[encoder]
n_layers = 1
n_heads = 2
[debug]
seed = {SEED}
[objective]
prediction = "noise"
"""


def test_sampling_does_not_need_the_runs_attention_kernel(tmp_path):
    """It compiles nothing, and uncompiled flex attention would hold all scores."""
    config = load_config(["--attention.backend=flex"])
    loaded = torch.nn.Linear(2, 2).bfloat16()
    run = LoadedRun(
        tmp_path, config, loaded, None, None, build_objective(config), 1, torch.device("cpu")
    )
    model = untrained_model(run)
    assert model.args.attention == "sdpa" and not model.training
    assert model.input.weight.dtype == torch.bfloat16  # as the trained one's
    assert config.attention.backend == "flex"


@pytest.fixture(scope="module")
def initial(tmp_path_factory):
    """The model as training starts it."""
    path = tmp_path_factory.mktemp("initial") / "config.toml"
    path.write_text(CONFIG)
    config = load_config([f"--job.config_file={path}"])
    config.encoder.vocab_size = 259
    args = model_flavors()["debug"]
    args.update_from_config(config)
    model = DiTTTSModel(args)
    torch.manual_seed(SEED)
    with torch.no_grad():
        model.init_weights()
    return model


def write_checkpoint(folder, step, initial, weights, averaged):
    """A checkpoint as training saves it: each weight is the initial one plus a number."""
    named = dict(initial.named_parameters())
    state = {name: p.detach() + weights for name, p in named.items()}
    if averaged is not None:
        slow = {f"decay-0.99.{name}": p.detach() + averaged + 1 for name, p in named.items()}
        fast = {f"decay-0.9.{name}": p.detach() + averaged for name, p in named.items()}
        state["ema"] = {"num_updates": step, **fast, **(slow if step == 10 else {})}
    prediction = {2: "velocity", 6: "noise", 10: "noise"}[step]
    writer = CheckpointWriter(
        folder / "checkpoint" / f"step-{step}", {"objective.prediction": prediction}
    )
    dcp.save(state, storage_writer=writer, no_dist=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory, initial):
    """Steps 2, 6 and 10, and 11 as a kill left it; averages are the weights plus one, and plus two."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.toml").write_text(CONFIG)
    write_checkpoint(folder, 2, initial, 2.0, None)
    write_checkpoint(folder, 6, initial, 6.0, 7.0)  # with one average
    write_checkpoint(folder, 10, initial, 10.0, 11.0)
    (folder / "checkpoint/step-11.saving").mkdir()
    return folder


def above(model, initial) -> float:
    """The number that every weight lies above its initial value."""
    differences = torch.cat(
        [
            (p - start).detach().flatten()
            for p, start in zip(model.parameters(), initial.parameters(), strict=True)
        ]
    )
    mean = float(differences.double().mean())
    assert (differences - mean).abs().max() < 1e-4
    return round(mean, 4)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_which_weights_are_loaded(run, initial):
    slowest = load_run(run)
    assert slowest.step == 10 and above(slowest.model, initial) == 12
    assert slowest.weights == "ema:0.99"
    assert not slowest.model.training and slowest.objective.prediction == "noise"
    assert above(load_run(run, weights="ema:0.9").model, initial) == 11
    assert above(load_run(run, weights="raw").model, initial) == 10
    assert above(load_run(run, step=6).model, initial) == 7
    earlier = load_run(run, step=2, weights="raw")
    assert earlier.step == 2 and above(earlier.model, initial) == 2
    assert earlier.objective.prediction == "velocity"  # as that checkpoint was trained
    assert load_run(run, step=2).weights == "raw"  # which has no averages
    with pytest.raises(InputError, match="step-2 holds no weights 'ema'.* --weights: raw"):
        load_run(run, step=2, weights="ema")
    with pytest.raises(InputError, match="no weights 'ema:0.5'.*: ema:0.9, ema:0.99, raw"):
        load_run(run, weights="ema:0.5")
    with pytest.raises(InputError, match="has no checkpoint step-11; it has steps: 2, 6, 10"):
        load_run(run, step=11)
    with pytest.raises(InputError, match="has no best step.*: 2, 6, 10"):
        load_run(run, step="best")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_validation_chooses_step_and_weights(run, initial, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    rows = [
        {"step": 2, "best_heldout_loss": 0.5, "best_weights": "raw"},
        {"step": 6, "best_heldout_loss": 0.3, "best_weights": "raw"},
        {"step": 10, "best_heldout_loss": 0.4, "best_weights": "ema:0.9"},
        {"step": 10, "wer": 0.1, "weights": "ema:0.99"},
    ]
    # A kill may come between a row and its checkpoint.
    rows.append({"step": 12, "best_heldout_loss": 0.1, "best_weights": "raw", "wer": 0.0})
    for row in rows:
        JsonLines(folder / "validation.jsonl").append(row)
    assert above(load_run(folder).model, initial) == 11
    best = load_run(folder, step="best")
    assert (best.step, best.weights, above(best.model, initial)) == (6, "raw", 6)
    # By another figure: with the weights that it was measured with.
    (folder / "config.toml").write_text(CONFIG + '[validation]\nkeep_best = "wer"\n')
    best = load_run(folder, step="best")
    assert (best.step, best.weights, above(best.model, initial)) == (10, "ema:0.99", 12)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_the_best_of_the_raw_weights_is_spoken_by_them(run, initial, tmp_path, monkeypatch):
    """Also where an average has the lowest loss of that step."""
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "config.toml").write_text(CONFIG + '[validation]\nkeep_best = "wer_raw"\n')
    for row in (
        {"step": 6, "best_heldout_loss": 0.3, "best_weights": "ema:0.9"},
        {"step": 6, "wer_raw": 0.1, "wer": 0.4, "weights": "ema:0.9"},
        {"step": 10, "wer_raw": 0.2, "wer": 0.1, "weights": "ema:0.99"},
    ):
        JsonLines(folder / "validation.jsonl").append(row)
    loaded = []

    def load(*arguments):
        loaded.append(load_run(*arguments))
        raise InputError("that is enough")

    inference = "titan_tts.speak"
    monkeypatch.setattr(f"{inference}.load_run.load_run", load)
    monkeypatch.setattr(f"{inference}.speech_data.open_speech_data", lambda *_: object())
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "one"}')
    for said in (["--text=one"], ["--text-list", str(texts)]):
        out = f"--out={tmp_path / 'new.wav'}"
        assert main(["generate", str(folder), "--step=best", out, *said]) == 2
    options = EvaluateOptions(run=str(folder), step="best", test="")
    for places in (find_places([str(folder)], "best"), find_places([f"{folder}@best"])):
        with pytest.raises(InputError, match="that is enough"):
            Evaluation(options, tmp_path, places, None, None, False).rows()
    found = [(each.step, each.weights, above(each.model, initial)) for each in loaded]
    assert found == [(6, "raw", 6)] * 4


def test_a_corrupt_checkpoint_is_not_sampled(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    data = folder / "checkpoint/step-10/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match="__0_0.distcp has other content .*--step, of: 2, 6, 10"):
        load_run(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_the_untrained_model_is_the_one_that_training_started_from(run, initial):
    loaded = load_run(run)
    torch.manual_seed(99)  # whatever was drawn before
    model = untrained_model(loaded)
    assert model is not loaded.model and not model.training
    for (name, p), start in zip(model.named_parameters(), initial.parameters(), strict=True):
        assert torch.equal(p, start), name
    assert above(loaded.model, initial) == 12
