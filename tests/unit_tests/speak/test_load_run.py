"""The model that is loaded from a run: which checkpoint, which weights."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.helpers.sentences import refused
from tests.helpers.small_models import initialized_model, small_args
from titan_tts.speak.load_run import load_run
from titan_tts.speak.open_run import open_run
from torchtitan.models.dit_tts import model_config, model_flavors
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.files import JsonLines
from torchtitan.models.dit_tts.model_config import DiTTTSModelConfig
from torchtitan.models.dit_tts.run.checkpoint_storage import CheckpointWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

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
[attention]
backend = "varlen"
"""


@pytest.fixture(scope="module")
def initial(tmp_path_factory):
    """The model as training starts it."""
    path = tmp_path_factory.mktemp("initial") / "config.toml"
    path.write_text(CONFIG)
    config = load_config([f"--job.config_file={path}"])
    config.encoder.vocab_size = 259
    with pytest.MonkeyPatch.context() as monkeypatch:
        arguments = DiTTTSModelConfig(**vars(small_args(n_layers=1)))
        monkeypatch.setitem(model_config._FLAVORS, "debug", arguments)
        args = model_flavors()["debug"]
        args.update_from_config(config)
        yield initialized_model(args, SEED)


@pytest.fixture
def run(tmp_path, initial):
    """Steps 2, 6 and 10, and 11 as a kill left it. Weights are the initial ones plus the step; averages are
    these plus one, and plus two."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    named = dict(initial.named_parameters())
    for step, decays in ((2, []), (6, ["0.9"]), (10, ["0.9", "0.99"])):
        state = {name: p.detach() + step for name, p in named.items()}
        if decays:
            state["ema"] = {"num_updates": step}
        for more, decay in enumerate(decays, 1):
            for name, p in named.items():
                state["ema"][f"decay-{decay}.{name}"] = p.detach() + step + more
        trained_with = {"objective.prediction": "velocity" if step == 2 else "noise"}
        writer = CheckpointWriter(folder / f"checkpoint/step-{step}", trained_with)
        dcp.save(state, storage_writer=writer, no_dist=True)
    (folder / "checkpoint/step-11.saving").mkdir()
    return folder


def which(loaded, initial) -> tuple[int, str, float]:
    """(step, weights, the number that every weight lies above its initial value)."""
    pairs = zip(loaded.model.parameters(), initial.parameters(), strict=True)
    differences = torch.cat([(p - start).detach().flatten() for p, start in pairs])
    mean = float(differences.double().mean())
    assert (differences - mean).abs().max() < 1e-4 and not loaded.model.training
    return loaded.step, loaded.weights, round(mean, 4)


@pytest.mark.long
def test_which_weights_are_loaded(run, initial):
    for given, expected, prediction in (
        ({}, (10, "ema:0.99", 12), "noise"),
        ({"weights": "ema:0.9"}, (10, "ema:0.9", 11), "noise"),
        ({"weights": "raw"}, (10, "raw", 10), "noise"),
        ({"step": 6}, (6, "ema:0.9", 7), "noise"),
        ({"step": 2}, (2, "raw", 2), "velocity"),  # as that checkpoint was trained
    ):
        loaded = load_run(run, **given)
        assert which(loaded, initial) == expected and loaded.objective.prediction == prediction
    for given, *words in (
        ({"step": 2, "weights": "ema"}, "step-2 holds no weights 'ema'", "--weights: raw"),
        ({"weights": "ema:0.5"}, "no weights 'ema:0.5'", ": ema:0.9, ema:0.99, raw"),
        ({"step": 11}, "has no checkpoint step-11; it has steps: 2, 6, 10"),
        ({"step": "best"}, "has no best step", ": 2, 6, 10"),
    ):
        refused(lambda given=given: load_run(run, **given), *words)
    data = run / "checkpoint/step-10/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    refused(lambda: load_run(run), "__0_0.distcp has other content", "--step, of: 2, 6, 10")


@pytest.mark.long
def test_validation_chooses_step_and_weights(run, initial):
    """The best step has the weights that its figure was measured with."""
    rows = [
        {"step": 2, "best_heldout_loss": 0.5, "best_weights": "raw"},
        {"step": 6, "best_heldout_loss": 0.3, "best_weights": "raw"},
        {"step": 6, "wer_raw": 0.1, "wer": 0.4, "weights": "ema:0.9"},
        {"step": 10, "best_heldout_loss": 0.4, "best_weights": "ema:0.9"},
        {"step": 10, "wer_raw": 0.2, "wer": 0.1, "weights": "ema:0.99"},
        # A kill may come between a row and its checkpoint.
        {"step": 12, "best_heldout_loss": 0.1, "best_weights": "raw", "wer": 0.0, "wer_raw": 0.0},
    ]
    for row in rows:
        JsonLines(run / "validation.jsonl").append(row)
    assert which(load_run(run), initial) == (10, "ema:0.9", 11)
    assert which(load_run(run, step=6), initial) == (6, "raw", 6)
    for figure, step, weights, above in (
        ("best_heldout_loss", 6, "raw", 6),
        ("wer", 10, "ema:0.99", 12),
        ("wer_raw", 6, "raw", 6),
    ):
        (run / "config.toml").write_text(CONFIG + f'[validation]\nkeep_best = "{figure}"\n')
        assert which(load_run(run, step="best"), initial) == (step, weights, above)
        found = open_run(run, "best")
        assert (found.step, found.weights) == (step, weights)
    assert which(load_run(run, step="best", weights="ema"), initial) == (6, "ema:0.9", 7)
    gone = {"step": 10, "best_heldout_loss": 0.2, "best_weights": "ema:0.5"}
    JsonLines(run / "validation.jsonl").append(gone)
    assert which(load_run(run), initial) == (10, "ema:0.99", 12)


@pytest.mark.parametrize("amx, avx512", [(False, False), (True, False), (False, True)])
def test_a_cpu_that_multiplies_bfloat16_speaks_in_it(run, monkeypatch, amx, avx512):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    expected = {"auto": amx or avx512, "float32": False, "bfloat16": True}
    for dtype, narrow in expected.items():
        model = load_run(run, dtype=dtype).model
        assert model.args.attention == "sdpa"
        found = {p.dtype for p in model.parameters()}
        assert found == {torch.bfloat16 if narrow else torch.float32}
