"""[lora]: runs over an exported base, killed and continued, on one rank and on two, and how they speak."""

import numpy as np
import pytest
import torch

from tests.helpers.exported_run import export
from titan_tts import from_pretrained
from titan_tts.cli import main
from titan_tts.speak.adapters import read_adapter
from tools.harness import runs
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.infra.compile import compile_for_any_lengths, compiled_graphs

FSDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=2"]
DDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=1"]
DDP += ["--parallelism.data_parallel_replicate_degree=2"]
LORA = ["--lora.rank=3", "--lora.alpha=12"]


class Runs:
    """Runs over one base, of 6 steps each."""

    def __init__(self, folder):
        self.folder = folder
        make_shards(folder / "data", 24)
        self.common = [*runs.TINY, f"--data.path={folder / 'data'}", "--optimizer.lr=0.02"]
        self.common += ["--ema.decays=0.5,0.9", "--checkpoint.interval=2"]
        run = runs.run(folder, "trained", [*self.common, "--training.steps=3"]).folder
        self.base = export(run, folder / "base")

    def arguments(self, *more):
        start = f"--checkpoint.initial_load_path={self.base}"
        return [*self.common, start, "--training.steps=6", *more]

    def adapt(self, name, *more):
        return runs.run(self.folder, name, self.arguments(*more)).folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    found = Runs(tmp_path_factory.mktemp("adapters"))
    found.lora = found.adapt("lora", *LORA)
    return found


def adapter_of(folder, entry=""):
    return read_adapter(folder / "checkpoint/step-6", entry)


@pytest.mark.parametrize("layout", [FSDP, pytest.param(DDP, marks=pytest.mark.slow)])
def test_killed_runs_on_other_ranks_train_the_same(made, layout):
    name = "killed_ddp" if layout is DDP else "killed_fsdp"
    started = runs.start(made.folder, name, made.arguments(*LORA, *layout), 2)
    saved = made.folder / name / "checkpoint/step-2/manifest.json"
    runs.wait_until(saved.is_file, 120)
    started.kill()
    resumed = made.adapt(name, *LORA)
    for entry in ("", "ema.decay-0.5."):
        expected, found = (adapter_of(each, entry=entry) for each in (made.lora, resumed))
        assert len(expected) == 48 and expected.keys() == found.keys()
        for each, value in expected.items():
            torch.testing.assert_close(found[each], value, atol=1e-3, rtol=0)
    moved = [value for each, value in adapter_of(resumed).items() if each.endswith("lora_b")]
    assert min(value.abs().max() for value in moved) > 1e-2
    # A checkpoint has the adapter alone.
    saved = (made.base.parent / "trained/checkpoint/step-3", made.lora / "checkpoint/step-6")
    whole, alone = (sum(each.stat().st_size for each in folder.iterdir()) for folder in saved)
    assert alone < 0.15 * whole


def speak(synthesizer, voices, text="one two three"):
    found = synthesizer.synthesize([text] * len(voices), voices, seed=3)
    return [each.latents for each in found]


OPTIONS = {"dtype": "float32", "sampling_steps": 2, "speaker_scale": 2.0}


@pytest.fixture(scope="module")
def alone(made):
    """Adapters of two ranks in folders NAME-alone, their reference, and what each merged model and the base say."""
    folder, other = made.folder, made.adapt("other-rank", "--lora.rank=5", "--data.seed=9")
    reference = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
    np.save(folder / "reference.npy", reference.numpy())
    expected = {"base": speak(from_pretrained(made.base, **OPTIONS), [reference])[0]}
    for name, run in {"lora": made.lora, "other": other}.items():
        export(run, folder / f"{name}-alone", "--adapter", "--weights=raw")
        merged = from_pretrained(export(run, folder / f"{name}-merged", "--weights=raw"), **OPTIONS)
        expected[name] = speak(merged, [reference])[0]
    for one, two in (("lora", "base"), ("lora", "other")):
        assert (expected[one] - expected[two]).abs().max() > 1e-3
    return folder, reference, expected


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_voices_of_one_model_speak_as_the_merged_models_do(made, alone, compiled):
    """In one batch, and compiled without another graph."""
    folder, reference, expected = alone
    recording = folder / "reference.npy"
    served = from_pretrained(made.base, **OPTIONS)
    if compiled:
        compile_for_any_lengths(served.run.model, "eager")
    names = ("lora", "other")
    lora, other = (served.adapted(n, folder / f"{n}-alone", recording) for n in names)
    plain = served.voice(reference)
    speak(served, [plain, plain]), speak(served, [plain])
    graphs = compiled_graphs()
    order = {"lora": lora, "base": plain, "other": other}
    for _ in range(2):
        found = speak(served, [*order.values(), plain])
        for (name, _), latents in zip(order.items(), found):
            torch.testing.assert_close(latents, expected[name], atol=1e-5, rtol=0)
        torch.testing.assert_close(found[-1], expected["base"], atol=1e-5, rtol=0)
    assert compiled_graphs() == graphs
    # Another of a name that is there.
    again = served.adapted("lora", folder / "other-alone", recording)
    torch.testing.assert_close(speak(served, [again])[0], expected["other"], atol=1e-5, rtol=0)


def refusal(made, name, *more):
    with pytest.raises(AssertionError) as failed:
        made.adapt(name, *more)
    return str(failed.value)


def test_it_is_never_added_to_other_weights(made, tmp_path, capsys):
    start = f"--checkpoint.initial_load_path={made.lora / 'checkpoint/step-6'}"
    assert "holds an adapter alone ([lora] rank = 3)" in refusal(made, "over-lora", *LORA, start)
    other = made.adapt("other", "--training.steps=1")
    other = export(other, tmp_path / "base")
    assert "of other weights than" in refusal(
        made, "lora", *LORA, f"--checkpoint.initial_load_path={other}"
    )
    alone = export(made.lora, tmp_path / "alone", "--adapter")
    with pytest.raises(InputError, match="an adapter of other weights than"):
        from_pretrained(other).adapted("a", alone)
    assert main(["export", str(other), str(tmp_path / "x"), "--adapter"]) == 2
    assert main(["export", str(made.folder / "trained"), str(tmp_path / "x"), "--adapter"]) == 2
    start = f"--checkpoint.initial_load_path={made.folder / 'trained/checkpoint/step-3'}"
    over = made.adapt("over-a-checkpoint", *LORA, start, "--training.steps=1")
    assert main(["export", str(over), str(tmp_path / "x"), "--adapter"]) == 2
    assert "is not an adapter's run over an exported folder" in capsys.readouterr().err
