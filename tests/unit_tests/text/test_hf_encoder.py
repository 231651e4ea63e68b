"""Pretrained encoders are found and loaded exactly or not at all."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.pretrained_checkpoints import WRITERS, encoded, write_tiny_t5
from tests.helpers.sentences import refused
from torchtitan.models.dit_tts import files
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.text.hf_encoder import fetch_weights, find_source, weight_files
from torchtitan.models.dit_tts.text.text_encoder import load_text_encoder


def load(path):
    return load_text_encoder(Encoder(model=str(path), dtype="float32"), "cpu")


def changed(path, folder, change):
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", WRITERS)
def test_a_weight_that_is_missing_or_of_another_shape_is_named(checkpoints, tmp_path, name):
    others = ("decoder", "vision", "multi_modal", "cls")
    names = sorted(load_file(checkpoints[name] / "model.safetensors"))
    key = next(k for k in names if "norm" in k.lower() and not any(o in k for o in others))
    words = ("1 of the encoder's weights", key.rsplit(".", 2)[-2])
    missing = changed(checkpoints[name], tmp_path / "a", lambda weights: weights.pop(key))
    refused(lambda: load(missing), *words)
    wide = changed(checkpoints[name], tmp_path / "b", lambda w: w.update({key: torch.zeros(7)}))
    refused(lambda: load(wide), *words)


def test_the_layout_without_an_inner_text_model_loads_too(checkpoints, tmp_path):
    """Checkpoints differ in whether the text encoder has a name of its own below the encoder."""
    outer, inner, moved = "model.encoder.", "model.encoder.text_model.", []

    def toggle(weights):
        for key in list(weights):
            old, new = (inner, outer) if key.startswith(inner) else (outer, inner)
            if key.startswith(old) and "vision" not in key and "multi" not in key:
                moved.append(key)
                weights[new + key.removeprefix(old)] = weights.pop(key)

    path = changed(checkpoints["t5gemma2"], tmp_path / "model", toggle)
    assert len(moved) == 6 * 13 + 3
    texts = [list(range(3, 3 + length)) for length in (5, 30, 1, 17)]
    found = (encoded(load(each), texts) for each in (path, checkpoints["t5gemma2"]))
    assert all(map(torch.equal, *found))


def test_what_cannot_be_had(tmp_path, monkeypatch):
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(files, "require_hub", lambda: asked.append("the hub") or 1 / 0)
        refused(lambda: find_source("none", download=False), "neither a folder nor a hub name")
        refused(lambda: find_source("nobody/none", download=False), "hf download nobody/none")

    def download(model, allow_patterns):
        asked.append(allow_patterns)
        if len(asked) == 3:
            raise OSError("no route to the hub\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    fetch_weights("nobody/none")
    # The second only where there are none.
    assert "*.safetensors" in asked[0] and asked[1] == ["pytorch_model*"]
    words = "(no route to the hub)", "hf download nobody/none"
    refused(lambda: fetch_weights("nobody/none"), *words)
    folder = write_tiny_t5(tmp_path / "t5")
    (folder / "model.safetensors").unlink()
    refused(lambda: fetch_weights(str(folder)), "has no weights")
    refused(lambda: load(folder), "cannot be loaded")
    parts = [folder / "a.safetensors", folder / "b.safetensors"]
    shared = json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}})
    (folder / "model.safetensors.index.json").write_text(shared)
    for present, expected in ((0, []), (1, parts)):
        parts[present].touch()
        assert weight_files(str(folder)) == expected


def test_a_fingerprint_is_of_weights_sizes_and_precision(checkpoints, tmp_path):
    def fingerprint(path, dtype="float32"):
        return find_source(str(path)).fingerprint(dtype)

    copy = shutil.copytree(checkpoints["t5"], tmp_path / "copy")
    first = fingerprint(checkpoints["t5"])
    assert fingerprint(copy) == first
    assert fingerprint(copy, "bfloat16") != first
    assert fingerprint(write_tiny_t5(tmp_path / "other", seed=1)) != first
    config = json.loads((copy / "config.json").read_text())
    # What another version of transformers writes, or another use of the model.
    config["use_cache"] = not config.get("use_cache", True)
    for changes, same in (
        ({"new_option": None, "num_decoder_layers": 9}, True),
        ({"layer_norm_epsilon": 1e-3}, False),
    ):
        (copy / "config.json").write_text(json.dumps(config | changes))
        assert (fingerprint(copy) == first) == same
