"""Pretrained encoders are found and loaded exactly or not at all."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config

from tests.helpers.pretrained_checkpoints import WRITERS, write_tiny_t5
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.text.hf_encoder import find_source
from torchtitan.models.dit_tts.text.hf_files import contents_digest, fetch_weights
from torchtitan.models.dit_tts.text.text_encoder import load_text_encoder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    return {name: write(folder / name) for name, write in WRITERS.items()}


def load(path):
    return load_text_encoder(Encoder(model=str(path), dtype="float32"), "cpu")


TEXTS = [list(range(3, 3 + length)) for length in (5, 30, 1, 17)]


def changed(path, folder, change):
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", WRITERS)
def test_one_missing_weight_is_an_error_that_names_it(checkpoints, tmp_path, name):
    def remove_one(weights):
        other = ("decoder", "vision", "multi_modal", "cls")
        key = next(
            k for k in sorted(weights) if "norm" in k.lower() and not any(o in k for o in other)
        )
        remove_one.key = key.rsplit(".", 2)[-2]
        del weights[key]

    path = changed(checkpoints[name], tmp_path / "model", remove_one)
    with pytest.raises(InputError, match=f"1 of the encoder's weights .*{remove_one.key}"):
        load(path)


def test_weights_of_another_shape_are_an_error(checkpoints, tmp_path):
    def widen(weights):
        key = "encoder.block.1.layer.0.SelfAttention.q.weight"
        weights[key] = torch.zeros(48, 50)

    with pytest.raises(InputError, match="shape"):
        load(changed(checkpoints["t5"], tmp_path / "model", widen))


def test_the_layout_without_an_inner_text_model_loads_too(checkpoints, tmp_path):
    """Checkpoints differ in whether the text encoder has a name of its own below the encoder."""
    moved = []

    def toggle(weights):
        for key in list(weights):
            if key.startswith("model.encoder.text_model."):
                moved.append(key)
                weights[key.replace("encoder.text_model.", "encoder.")] = weights.pop(key)
            elif key.startswith("model.encoder.") and "vision" not in key and "multi" not in key:
                moved.append(key)
                new = key.replace("model.encoder.", "model.encoder.text_model.")
                weights[new] = weights.pop(key)

    path = changed(checkpoints["t5gemma2"], tmp_path / "model", toggle)
    assert len(moved) == 6 * 13 + 3
    for one, other in zip(load(path).encode(TEXTS), load(checkpoints["t5gemma2"]).encode(TEXTS)):
        assert torch.equal(one, other)


def test_what_cannot_be_found_or_loaded_is_an_input_error(checkpoints, tmp_path):
    with pytest.raises(InputError, match="neither a folder nor a hub name"):
        find_source("no-such-thing", download=False)
    with pytest.raises(InputError, match="hf download nobody/no-such-model"):
        find_source("nobody/no-such-model", download=False)
    shutil.copytree(checkpoints["t5"], tmp_path / "t5")
    (tmp_path / "t5/model.safetensors").unlink()
    with pytest.raises(InputError, match="cannot be loaded"):
        load(tmp_path / "t5")


@pytest.mark.parametrize(
    ("model", "width", "parameters"),
    [
        ("google/t5gemma-2-270m-270m", 640, 268_098_816),
        ("google/t5gemma-2-1b-1b", 1152, 999_887_104),
        ("google/t5gemma-2-4b-4b", 2560, 3_880_101_888),
        ("google-t5/t5-base", 768, 109_628_544),
    ],
)
def test_known_encoders_have_their_published_sizes(model, width, parameters):
    source = find_source(model, download=False)
    assert source.built_in
    assert (source.width, source.num_parameters()) == (width, parameters)


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
    config |= {"new_option": None, "num_decoder_layers": 9}
    (copy / "config.json").write_text(json.dumps(config))
    assert fingerprint(copy) == first
    config["layer_norm_epsilon"] = 1e-3
    (copy / "config.json").write_text(json.dumps(config))
    assert fingerprint(copy) != first


def test_models_write_to_their_configs_and_the_source_stays(checkpoints):
    source = find_source(str(checkpoints["t5"]))
    before = source.config.to_dict()
    source.build()
    assert source.config.to_dict() == before and isinstance(source.config, T5Config)


def test_a_files_digest_is_stored_and_a_changed_file_is_read_again(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = contents_digest(path)
    monkeypatch.setattr("xxhash.xxh3_128", None)  # a second reading would need it
    assert contents_digest(path) == first
    monkeypatch.undo()
    path.write_bytes(b"two!")
    assert contents_digest(path) != first


def test_weights_that_cannot_be_had(tmp_path, monkeypatch):
    asked = []

    def download(model, allow_patterns):
        asked.append(allow_patterns)
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(InputError, match="hf download nobody/none"):
        fetch_weights("nobody/none")
    assert asked
    with pytest.raises(InputError, match="lacks weights"):
        fetch_weights(str(tmp_path))
