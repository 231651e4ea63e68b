"""Adapters of strangers: what is no whole adapter of the model is refused before it is spoken with."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.hostile_files import link, put
from tests.helpers.sentences import refused
from tests.helpers.small_models import full_inputs, random_model, small_args
from titan_tts.speak.adapters import CONFIG, WEIGHTS, Adapters, write_adapter
from torchtitan.models.dit_tts.config.job_config import Lora
from torchtitan.models.dit_tts.infra.adapters import add_adapter, is_trained
from torchtitan.models.dit_tts.run.manifest import MANIFEST, write_manifest

ARGS = small_args(text_vocab_size=8, n_heads=4, mlp_dim=48)
RANKS = {"a": 2, "b": 3}


@pytest.fixture
def made(tmp_path):
    """The adapters of a model, of which "a" is in use, and their folders."""
    base = tmp_path / "base"
    base.mkdir()
    put(base / "weights", "of the base")
    write_manifest(base, ["weights"], {})
    found = Adapters(random_model(ARGS), base)
    for name, rank in RANKS.items():
        adapted = random_model(ARGS)
        add_adapter(adapted, Lora(rank, alpha=2.0))
        values = {n: torch.randn(p.shape) for n, p in adapted.named_parameters() if is_trained(n)}
        (tmp_path / name).mkdir()
        write_adapter(
            tmp_path / name, Lora(rank, alpha=2.0), values, base, {"step": 4}, random_model(ARGS)
        )
        found.open(name, tmp_path / name)
    found.use("a")
    return found, tmp_path


def changed_config(**lora):
    def change(folder):
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(content | {"lora": content["lora"] | lora}))

    return change


def changed_values(change):
    def apply(folder):
        values = load_file(folder / WEIGHTS)
        save_file(change(values, next(iter(values))), folder / WEIGHTS)

    return apply


def replaced(name, content):
    def replace(folder):
        (folder / name).unlink()
        put(folder / name, content)

    return replace


def flipped(folder):
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-3] ^= 1
    (folder / WEIGHTS).write_bytes(data)


def first(change):
    return changed_values(lambda values, name: values | {name: change(values[name])})


TRUSTED_MANIFEST = {
    "smaller tensors": (changed_config(rank=8), "of rank 8 it is"),
    "rank 0": (changed_config(rank=0), "rank = 0"),
    "rank of text": (changed_config(rank="x"), "rank"),
    "alpha of NaN": (changed_config(alpha=math.nan), "be finite"),
    "no object": (replaced(CONFIG, "[]"), CONFIG),
    "bool": (first(torch.Tensor.bool), "of BOOL"),
    "a vector": (first(torch.Tensor.flatten), "does not fit the model"),
    "one more": (changed_values(lambda values, _: values | {"x": torch.ones(2)}), "not there"),
    "one less": (changed_values(lambda v, name: {n: v[n] for n in v if n != name}), "is missing"),
    "NaN": (first(lambda value: value * math.nan), "not finite"),
    "infinite in the product": (changed_values(lambda v, _: {n: v[n] * 1e30 for n in v}), "infin"),
    "no safetensors": (replaced(WEIGHTS, b"\xff" * 99), WEIGHTS),
}
AS_IT_CAME = {
    "another bit": (flipped, "has other content than"),
    "another rank": (changed_config(rank=8), "has other bytes than"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "has no file manifest.json"),
    "a config without an end": (replaced(CONFIG, link("/dev/zero")), "has no file"),
    "a manifest of something else": (replaced(MANIFEST, '{"files": {}, "trained_with": {}}'), "list"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*TRUSTED_MANIFEST, *AS_IT_CAME])
def test_an_adapter_that_does_not_fit_is_refused_when_it_is_opened(made, case):
    adapters, folder = made
    change, words = (TRUSTED_MANIFEST | AS_IT_CAME)[case]
    inputs = full_inputs(ARGS, rows=2, frames=3, text=4, speaker=5)
    with torch.no_grad():
        before = adapters._model(**inputs)
        change(folder / "b")
        if case in TRUSTED_MANIFEST:
            write_manifest(folder / "b", [CONFIG, WEIGHTS], {})
        refused(lambda: adapters.open("b", folder / "b"), words)
        # The voice that was there under its name is, too.
        adapters.use("b"), adapters.use("a")
        torch.testing.assert_close(adapters._model(**inputs), before, atol=0, rtol=0)


def test_who_may_read_the_folder_may_read_the_adapter(made):
    _, folder = made
    modes = {path.stat().st_mode for path in (folder / "a").iterdir()}
    assert len(modes) == 1 and modes.pop() & 0o777 == (folder / "a").stat().st_mode & 0o666
