"""Adapters, ours and PEFT's: PEFT computes what ours mean, ours what PEFT's mean, and strangers' are judged before use."""

import copy
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.hostile_files import link, put
from tests.helpers.sentences import refused
from tests.helpers.small_models import full_inputs, random_model, small_args
from titan_tts.speak.adapters import CONFIG, PEFT_CONFIG, PEFT_WEIGHTS, Adapters, write_adapter
from torchtitan.models.dit_tts.config.job_config import Lora
from torchtitan.models.dit_tts.infra.adapters import add_adapter, is_trained
from torchtitan.models.dit_tts.run.manifest import MANIFEST, write_manifest
from torchtitan.models.dit_tts.run.resume_rules import BASE

ARGS = small_args(text_vocab_size=8, n_heads=4, mlp_dim=48)


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    put(folder / "weights", "of the base")
    write_manifest(folder, ["weights"], {})
    return folder


@torch.no_grad()
def spoken(model):
    torch.manual_seed(1)
    return model(**full_inputs(ARGS, rows=2, frames=3, text=4, speaker=5))


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def trained(folder, rank, base):
    """The speech of a model with an adapter that is written to a folder."""
    options, adapted = Lora(rank, alpha=6.0), random_model(ARGS)
    add_adapter(adapted, options)
    values = {n: p.detach() for n, p in adapted.named_parameters() if is_trained(n)}
    for value in values.values():
        torch.nn.init.normal_(value, std=0.3)
    folder.mkdir()
    write_adapter(folder, options, values, base, {"step": 4}, random_model(ARGS))
    return spoken(adapted)


@pytest.fixture
def made(base, tmp_path):
    """The adapters of a model, of which "a" is in use, and their folders."""
    found = Adapters(random_model(ARGS), base)
    for name, rank in {"a": 2, "b": 3}.items():
        trained(tmp_path / name, rank, base)
        found.open(name, tmp_path / name)
    found.use("a")
    return found, tmp_path


def changed_json(name, change):
    def apply(folder):
        (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))

    return apply


def weights(change):
    def apply(folder):
        values = load_file(folder / PEFT_WEIGHTS)
        save_file(change(values, next(iter(values))), folder / PEFT_WEIGHTS)

    return apply


def replaced(name, content):
    def replace(folder):
        (folder / name).unlink()
        put(folder / name, content)

    return replace


def flipped(folder):
    data = bytearray((folder / PEFT_WEIGHTS).read_bytes())
    data[-3] ^= 1
    (folder / PEFT_WEIGHTS).write_bytes(data)


TRUSTED_MANIFEST = {
    "another version": (changed_json(CONFIG, lambda c: c | {"version": 9}), "is not of version 1"),
    "other weights": (changed_json(CONFIG, lambda c: c | {BASE: "x"}), "of other weights"),
    "no object": (replaced(CONFIG, "[]"), CONFIG),
    "NaN": (weights(lambda values, n: values | {n: values[n] * math.nan}), "not finite"),
    "infinite in the product": (weights(lambda v, _: {n: v[n] * 1e30 for n in v}), "infinite"),
    "no safetensors": (replaced(PEFT_WEIGHTS, b"\xff" * 99), PEFT_WEIGHTS),
}
AS_IT_CAME = {
    "another bit": (flipped, "has other content than"),
    "another step": (changed_json(CONFIG, lambda c: c | {"step": 40}), "has other bytes than"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "has no file manifest.json"),
    "a config without an end": (replaced(CONFIG, link("/dev/zero")), "has no file"),
    "a manifest of something else": (replaced(MANIFEST, '{"files": {}, "trained_with": {}}'), "list"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*TRUSTED_MANIFEST, *AS_IT_CAME])
def test_an_adapter_that_does_not_fit_is_refused_when_it_is_opened(made, case):
    adapters, folder = made
    change, words = (TRUSTED_MANIFEST | AS_IT_CAME)[case]
    before = spoken(adapters._model)
    change(folder / "b")
    if case in TRUSTED_MANIFEST:
        write_manifest(folder / "b", [CONFIG, PEFT_CONFIG, PEFT_WEIGHTS], {})
    refused(lambda: adapters.open("b", folder / "b"), words)
    # The voice that was there under its name is, too.
    adapters.use("b"), adapters.use("a")
    assert torch.equal(spoken(adapters._model), before)


def test_an_adapter_opened_while_another_speaks_is_in_its_place(made, base):
    adapters, folder = made
    expected = trained(folder / "c", 4, base)
    adapters.open("c", folder / "c")
    close(spoken(adapters._model), expected)


def test_who_may_read_the_folder_may_read_the_adapter(made):
    _, folder = made
    modes = {path.stat().st_mode for path in (folder / "a").iterdir()}
    assert len(modes) == 1 and modes.pop() & 0o777 == (folder / "a").stat().st_mode & 0o666


def test_peft_loads_what_we_export(base, tmp_path):
    peft = pytest.importorskip("peft", reason="the extra dev is not installed")
    expected, plain = trained(tmp_path / "a", 3, base), random_model(ARGS)
    assert (expected - spoken(plain)).abs().max() > 0.1
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "a").eval()
    assert loaded.peft_config["default"].base_model_name_or_path == "base"
    close(spoken(loaded), expected)
    close(spoken(loaded.merge_and_unload()), expected)
    # And we read these files alone.
    for name in (CONFIG, MANIFEST):
        (tmp_path / "a" / name).unlink()
    Adapters(plain, base).open("a", tmp_path / "a")
    close(spoken(plain), expected)


def trained_by_peft(folder, **settings):
    """Outputs of a model with an adapter that PEFT trained and saved to a folder."""
    peft = pytest.importorskip("peft", reason="the extra dev is not installed")
    targets = r"layers\.\d+\.(attention\.qkv_gate|mlp\.down)"
    settings = {"r": 2, "lora_alpha": 5, "target_modules": targets} | settings
    found = peft.get_peft_model(random_model(ARGS), peft.LoraConfig(**settings)).eval()
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    found.save_pretrained(folder)
    return spoken(found)


RANKS = {
    "target_modules": r"layers\.\d+\.attention\.(text_kv|out)",
    "rank_pattern": {"out": 5},
    "alpha_pattern": {"layers.1.attention.text_kv": 9, "text_kv": 3},  # the first that fits
}


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, RANKS])
def test_we_load_what_peft_saved(base, tmp_path, settings):
    expected, model = trained_by_peft(tmp_path / "a", **settings), random_model(ARGS)
    before, adapters = spoken(model), Adapters(model, base)
    assert (expected - before).abs().max() > 0.1
    adapters.open("a", tmp_path / "a")
    close(spoken(model), expected)
    adapters.use("")
    assert torch.equal(spoken(model), before)


def config(**entries):
    return changed_json(PEFT_CONFIG, lambda content: content | entries)


def nothing(folder):
    """Leaves the folder as PEFT saved it, which is refused."""


REFUSED = {
    "another kind": (config(peft_type="IA3"), {}, "peft_type = 'IA3' is not supported"),
    "other weights": (config(init_lora_weights="pissa"), {}, "init_lora_weights = 'pissa'"),
    "biases": (config(bias="all"), {}, "bias = 'all'"),
    "magnitudes": (nothing, {"use_dora": True}, "lora_magnitude_vector"),
    "other layers": (nothing, {"target_modules": ["adaln.up"]}, "not an update of a proj"),
    "a pattern": (config(alpha_pattern={"q.*": 3}), {}, "alpha_pattern names 'q.*'"),
    "no alpha": (config(lora_alpha=None), {}, PEFT_CONFIG),
    "a list": (lambda f: (f / PEFT_CONFIG).write_text("[]"), {}, PEFT_CONFIG),
    "alpha of text": (config(alpha_pattern={"down": "x"}), {}, PEFT_WEIGHTS),
    "infinite": (config(lora_alpha=1e300), {}, "infinite"),
    "empty": (weights(lambda found, name: {}), {}, PEFT_WEIGHTS),
    "half": (weights(lambda found, name: {n: found[n] for n in found if n != name}), {}, "lacks"),
    "shape": (weights(lambda f, n: f | {n: f[n][:1].clone()}), {}, "do not fit the model"),
    "a huge rank": (
        weights(lambda f, n: {k: torch.ones(*v.shape[:-1], 999) if "_B" in k else torch.ones(999, v.shape[1]) for k, v in f.items()}),
        {},
        "do not fit the model",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses_what_it_would_compute_otherwise(base, tmp_path, case):
    change, settings, words = REFUSED[case]
    trained_by_peft(tmp_path / "a", **settings)
    change(tmp_path / "a")
    model = random_model(ARGS)
    before, adapters = spoken(model), Adapters(model, base)
    refused(lambda: adapters.open("a", tmp_path / "a"), words)
    adapters.use("")
    assert torch.equal(spoken(model), before)
