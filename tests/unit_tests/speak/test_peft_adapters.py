"""Adapters in PEFT's files, against the package itself: PEFT computes what ours mean, and ours what PEFT's mean."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.sentences import refused
from tests.helpers.small_models import full_inputs, random_model, small_args
from titan_tts.speak.adapters import Adapters, write_adapter
from titan_tts.speak.peft_adapters import CONFIG, WEIGHTS
from torchtitan.models.dit_tts.config.job_config import Lora
from torchtitan.models.dit_tts.infra.adapters import add_adapter, is_trained
from torchtitan.models.dit_tts.run.manifest import write_manifest

peft = pytest.importorskip("peft", reason="the extra dev is not installed")

ARGS = small_args(text_vocab_size=8, n_heads=4, mlp_dim=48)


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "weights").write_text("of the base")
    write_manifest(folder, ["weights"], {})
    return folder


@torch.no_grad()
def spoken(model):
    torch.manual_seed(1)
    return model(**full_inputs(ARGS, rows=2, frames=3, text=4, speaker=5))


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_peft_loads_what_we_export(base, tmp_path):
    options, adapted = Lora(3, alpha=6.0), random_model(ARGS)
    add_adapter(adapted, options)
    values = {n: p.detach() for n, p in adapted.named_parameters() if is_trained(n)}
    for value in values.values():
        torch.nn.init.normal_(value, std=0.3)
    (tmp_path / "a").mkdir()
    write_adapter(tmp_path / "a", options, values, base, {}, random_model(ARGS))
    plain, expected = random_model(ARGS), spoken(adapted)
    assert (expected - spoken(plain)).abs().max() > 0.1
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "a").eval()
    assert loaded.peft_config["default"].base_model_name_or_path == "base"
    close(spoken(loaded), expected)
    close(spoken(loaded.merge_and_unload()), expected)
    # And we read these files alone.
    for name in ("adapter.json", "adapter.safetensors", "manifest.json"):
        (tmp_path / "a" / name).unlink()
    ours = Adapters(plain, base)
    ours.open("a", tmp_path / "a"), ours.use("a")
    close(spoken(plain), expected)


TARGETS = r"layers\.\d+\.(attention\.qkv_gate|mlp\.down)"


def trained_by_peft(folder, **settings):
    """Outputs of a model with an adapter that PEFT trained and saved to a folder."""
    settings = {
        "r": 2,
        "lora_alpha": 5,
        "target_modules": TARGETS,
    } | settings
    found = peft.get_peft_model(random_model(ARGS), peft.LoraConfig(**settings)).eval()
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    found.save_pretrained(folder)
    return spoken(found)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {
            "target_modules": r"layers\.\d+\.attention\.(text_kv|out)",
            "rank_pattern": {"out": 5},
            "alpha_pattern": {"layers.1.attention.text_kv": 9},
        },
    ],
)
def test_we_load_what_peft_saved(base, tmp_path, settings):
    expected, model = trained_by_peft(tmp_path / "a", **settings), random_model(ARGS)
    before, adapters = spoken(model), Adapters(model, base)
    assert (expected - before).abs().max() > 0.1
    adapters.open("a", tmp_path / "a")
    close(spoken(model), expected)
    adapters.use("")
    assert torch.equal(spoken(model), before)


def values(change):
    def apply(folder):
        found = load_file(folder / WEIGHTS)
        save_file(change(found, next(iter(found))), folder / WEIGHTS)

    return apply


def config(**entries):
    def apply(folder):
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(content | entries))

    return apply


REFUSED = {
    "another kind": (config(peft_type="IA3"), {}, "peft_type = 'IA3' is not supported"),
    "other weights": (config(init_lora_weights="pissa"), {}, "init_lora_weights = 'pissa'"),
    "biases": (config(bias="all"), {}, "bias = 'all'"),
    "magnitudes": (lambda folder: None, {"use_dora": True}, "lora_magnitude_vector"),
    "other layers": (lambda folder: None, {"target_modules": ["adaln.up"]}, "no update of a proj"),
    "a pattern": (config(alpha_pattern={"q.*": 3}), {}, "alpha_pattern names 'q.*'"),
    "no alpha": (config(lora_alpha=None), {}, CONFIG),
    "a list": (lambda folder: (folder / CONFIG).write_text("[]"), {}, CONFIG),
    "alpha of text": (config(alpha_pattern={"down": "x"}), {}, WEIGHTS),
    "infinite": (config(lora_alpha=1e300), {}, "infinite"),
    "nothing": (values(lambda found, name: {}), {}, WEIGHTS),
    "half": (values(lambda found, name: {n: found[n] for n in found if n != name}), {}, "lacks"),
    "shape": (values(lambda f, n: f | {n: f[n][:1].clone()}), {}, "do not fit the model"),
    "a huge rank": (
        values(lambda f, n: {k: torch.ones(*v.shape[:-1], 999) if "_B" in k else torch.ones(999, v.shape[1]) for k, v in f.items()}),
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
