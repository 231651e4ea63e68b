"""Pretrained text encoders: loaded exactly or not at all, on real tokens only, wherever they run."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, T5Config
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

from tests.helpers.pretrained_checkpoints import write_tiny_bert, write_tiny_t5, write_tiny_t5gemma2
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.model.args import TextEncoderSizes
from torchtitan.models.dit_tts.model.flops import text_encoder_flops
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model_config import DiTTTSModelConfig
from torchtitan.models.dit_tts.text.hf_encoder import KNOWN_SIZES, find_source
from torchtitan.models.dit_tts.text.hf_files import contents_digest, fetch_weights
from torchtitan.models.dit_tts.text.packing import SORTED_GROUPS, pack_rows
from torchtitan.models.dit_tts.text.text_encoder import (
    PretrainedTextEncoder,
    load_text_encoder,
)

WRITERS = {"t5gemma2": write_tiny_t5gemma2, "t5": write_tiny_t5, "bert": write_tiny_bert}
LENGTHS = (5, 30, 1, 17, 0, 23, 9, 4, 30)
ROUNDING = 1e-4
"""Thirty times what float32 leaves of features near 1 when rows are laid out otherwise; a token too many
or too few, or another place, changes more than a hundredth"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    return {name: write(folder / name) for name, write in WRITERS.items()}


def load(path, dtype="float32", device="cpu"):
    return load_text_encoder(Encoder(model=str(path), dtype=dtype), device)


def texts(lengths=LENGTHS):
    generator = np.random.default_rng(3)
    return [generator.integers(3, 300, size=length).tolist() for length in lengths]


def full_models_encoder(path):
    """The encoder inside the whole model, loaded in transformers' usual way."""
    model = AutoModel.from_pretrained(path).eval()
    return model.get_encoder() if model.config.is_encoder_decoder else model


@torch.no_grad()
def alone(encoder, ids):
    """A text without padding through an encoder of transformers."""
    row = torch.tensor([ids])
    return encoder(input_ids=row, attention_mask=torch.ones_like(row)).last_hidden_state[0]


@pytest.mark.parametrize("name", WRITERS)
def test_a_text_alone_has_the_full_models_features(checkpoints, name):
    encoder, reference = load(checkpoints[name]), full_models_encoder(checkpoints[name])
    for ids in texts((5, 30, 1, 17)):
        [features] = encoder.encode([ids])
        expected = alone(reference, ids)
        assert expected.std() > 0.5  # equality of nothing would say nothing
        torch.testing.assert_close(features, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", WRITERS)
def test_features_do_not_depend_on_the_other_texts_of_a_batch(checkpoints, name):
    encoder, reference = load(checkpoints[name]), full_models_encoder(checkpoints[name])
    for ids, features in zip(texts(), encoder.encode(texts()), strict=True):
        assert features.shape == (len(ids), encoder.width)
        if ids:
            torch.testing.assert_close(features, alone(reference, ids), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", WRITERS)
def test_padding_on_either_side_and_its_ids_change_nothing(checkpoints, name):
    encoder = load(checkpoints[name])
    ids = torch.randint(3, 300, (4, 20))
    mask = torch.zeros(4, 20, dtype=torch.bool)
    for row, (first, last) in enumerate([(0, 12), (8, 20), (5, 6), (7, 7)]):
        mask[row, first:last] = True
    once = encoder(ids, mask)
    again = encoder(torch.where(mask, ids, 7), mask)
    assert torch.equal(once, again)
    assert (once[~mask] == 0).all()
    reference = full_models_encoder(checkpoints[name])
    torch.testing.assert_close(
        once[1, 8:], alone(reference, ids[1, 8:].tolist()), rtol=0, atol=ROUNDING
    )


def test_bfloat16_is_near_float32(checkpoints):
    exact, rough = (
        load(checkpoints["t5gemma2"], dtype).encode(texts()) for dtype in ("float32", "bfloat16")
    )
    assert rough[0].dtype == torch.bfloat16
    error = torch.cat(rough).float() - torch.cat(exact)
    assert 1e-4 < error.square().mean().sqrt() < 0.1


def test_a_frozen_encoder_is_frozen_and_stays_in_evaluation_mode(checkpoints):
    encoder = load(checkpoints["t5"])  # its config has a dropout of 0.1
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    encoder.train()
    assert not any(module.training for module in encoder.modules())
    first, second = (encoder.encode(texts())[1] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", WRITERS)
def test_ids_that_the_encoder_does_not_have_stand_before_the_text(checkpoints, name):
    """Conditioning tokens: at the start of every row, and nowhere the encoder looks, also where a
    packed row has padding."""
    encoder = load(checkpoints[name])
    lengths = np.random.default_rng(1).integers(1, 60, size=40)
    mask = (np.arange(64) >= 2) & (np.arange(64) < 2 + lengths[:, None])
    ids = np.full((40, 64), 515)
    ids[mask] = np.random.default_rng(2).integers(3, 300, size=lengths.sum())
    rows = encoder.rows(mask)
    assert any((group.segment == 0).any() for group in rows.groups)
    assert not encoder.packs or rows.groups[0].token.shape[0] > 1
    features = encoder(torch.from_numpy(ids), torch.from_numpy(mask), rows)
    for row in (0, 17, 39):
        [alone_] = encoder.encode([ids[row][mask[row]].tolist()])
        torch.testing.assert_close(features[row][mask[row]], alone_, rtol=0, atol=ROUNDING)


def test_a_text_beyond_the_positions_is_one_sentence(checkpoints):
    encoder = load(checkpoints["bert"])
    assert encoder.source.max_tokens == 126
    assert find_source(str(checkpoints["t5"])).max_tokens is None
    encoder.encode(texts((126,)))
    with pytest.raises(InputError, match="127 tokens is longer than the 126"):
        encoder.encode(texts((127,)))


# What a checkpoint lacks.


def test_the_obvious_call_gives_random_weights_and_ours_does_not(checkpoints):
    """The trap: this class loads nothing of a whole checkpoint, without an error."""
    _, info = T5Gemma2Encoder.from_pretrained(checkpoints["t5gemma2"], output_loading_info=True)
    assert any(key.startswith("text_model.layers") for key in info["missing_keys"])
    ids = texts((12,))
    [features], [again] = (
        load(checkpoints["t5gemma2"]).encode(ids),
        load(checkpoints["t5gemma2"]).encode(ids),
    )
    assert torch.equal(features, again)


def damaged(path, folder, change):
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", WRITERS)
def test_one_missing_weight_is_an_error_that_names_it(checkpoints, tmp_path, name):
    def remove_one(weights):
        key = next(
            k
            for k in sorted(weights)
            if "decoder" not in k
            and "norm" in k.lower()
            and "vision" not in k
            and "multi_modal" not in k
            and "cls" not in k
        )
        remove_one.key = key.rsplit(".", 2)[-2]
        del weights[key]

    path = damaged(checkpoints[name], tmp_path / "model", remove_one)
    with pytest.raises(
        InputError, match="1 of the encoder's weights are not in the checkpoint"
    ) as e:
        load(path)
    assert remove_one.key in str(e.value)


def test_renamed_weights_are_all_missing(checkpoints, tmp_path):
    def rename(weights):
        for key in list(weights):
            weights["old." + key] = weights.pop(key)

    path = damaged(checkpoints["t5gemma2"], tmp_path / "model", rename)
    with pytest.raises(InputError, match="of the encoder's weights are not in the checkpoint"):
        load(path)


def test_weights_of_another_shape_are_an_error(checkpoints, tmp_path):
    def widen(weights):
        key = "encoder.block.1.layer.0.SelfAttention.q.weight"
        weights[key] = torch.zeros(48, 50)

    with pytest.raises(InputError, match="shape"):
        load(damaged(checkpoints["t5"], tmp_path / "model", widen))


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

    path = damaged(checkpoints["t5gemma2"], tmp_path / "model", toggle)
    assert len(moved) == 6 * 13 + 3
    for one, other in zip(
        load(path).encode(texts()), load(checkpoints["t5gemma2"]).encode(texts())
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("no-such-thing", "neither a folder nor a hub name"),
        ("nobody/no-such-model", "hf download nobody/no-such-model"),
    ],
)
def test_an_unknown_model_is_one_sentence(monkeypatch, model, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        find_source(model, download=False)
    assert "\n" not in str(error.value)


def test_a_folder_without_weights_is_one_sentence(checkpoints, tmp_path):
    shutil.copytree(checkpoints["t5"], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="cannot be loaded") as error:
        load(tmp_path / "model")
    assert "\n" not in str(error.value)


# Sizes.


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
    assert source.built_in and set(KNOWN_SIZES) >= {model}
    assert (source.width, source.num_parameters()) == (width, parameters)


def test_the_tiny_encoder_has_the_size_it_should(checkpoints):
    source = find_source(str(checkpoints["t5gemma2"]))
    assert (source.width, source.vocab_size, source.num_parameters()) == (64, 512, 243_520)


@pytest.mark.parametrize("name", ["t5gemma2", "t5"])
def test_flops_are_the_counters(checkpoints, name):
    source = find_source(str(checkpoints[name]))
    sizes = TextEncoderSizes(*source.matmul_sizes(), trained=False)
    encoder = load(checkpoints[name])
    with torch.device("meta"):
        meta = PretrainedTextEncoder(source)
    mask = np.arange(24) < np.array([24, 10, 14, 3])[:, None]
    rows = encoder.rows(mask)
    with FlopCounterMode(display=False) as counter:
        meta(torch.zeros(4, 24, dtype=torch.long, device="meta"), mask, rows.to("meta"))
    expected = sum(text_encoder_flops(sizes, *shape) for shape in rows.shapes)
    assert counter.get_total_flops() == expected
    assert text_encoder_flops(TextEncoderSizes(*source.matmul_sizes(), True), 2, 9) == 3 * (
        text_encoder_flops(sizes, 2, 9)
    )


# Fingerprints.


def test_a_fingerprint_is_of_weights_sizes_and_precision(checkpoints, tmp_path):
    source = find_source(str(checkpoints["t5"]))
    shutil.copytree(checkpoints["t5"], tmp_path / "copy")
    assert find_source(str(tmp_path / "copy")).fingerprint("float32") == source.fingerprint(
        "float32"
    )
    assert source.fingerprint("bfloat16") != source.fingerprint("float32")
    other = find_source(str(write_tiny_t5(tmp_path / "other", seed=1)))
    assert other.fingerprint("float32") != source.fingerprint("float32")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    # What another version of transformers writes, or another use of the model.
    config |= {
        "use_cache": not config.get("use_cache", True),
        "new_option": None,
        "num_decoder_layers": 9,
    }
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    assert find_source(str(tmp_path / "copy")).fingerprint("float32") == source.fingerprint(
        "float32"
    )
    config["layer_norm_epsilon"] = 1e-3
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    assert find_source(str(tmp_path / "copy")).fingerprint("float32") != source.fingerprint(
        "float32"
    )


# Filling an encoder that was built without weights.


@pytest.mark.parametrize("name", WRITERS)
def test_an_empty_encoder_is_filled_exactly(checkpoints, name):
    source = find_source(str(checkpoints[name]))
    with torch.device("meta"):
        encoder = PretrainedTextEncoder(source)
    encoder.to_empty(device="cpu")
    for tensor in (*encoder.parameters(), *encoder.buffers()):
        tensor.data.copy_(torch.full_like(tensor, 77))
    encoder.load_weights(lambda parameter, value: parameter.copy_(value))
    for one, other in zip(encoder.encode(texts()), load(checkpoints[name]).encode(texts())):
        assert torch.equal(one, other)
    weights = {name: parameter.clone() for name, parameter in encoder.named_parameters()}
    for buffer in encoder.buffers():
        buffer.copy_(torch.full_like(buffer, 77))
    encoder.reset_buffers()
    assert all(torch.equal(weights[n], p) for n, p in encoder.named_parameters())
    for one, other in zip(encoder.encode(texts()), load(checkpoints[name]).encode(texts())):
        assert torch.equal(one, other)


# Inside the model, where it trains.


def model_args(path, folder, *arguments):
    """Sizes of a model whose tokenizer has 3 ids more than the encoder."""
    args = DiTTTSModelConfig(
        dim=16,
        n_layers=1,
        n_heads=2,
        mlp_dim=16,
        speaker_dim=16,
        speaker_n_layers=1,
        speaker_n_heads=2,
        speaker_mlp_dim=16,
        adaln_rank=2,
        timestep_dim=8,
    )
    options = [f"--encoder.model={path}", f"--job.dump_folder={folder}", "--encoder.vocab_size=515"]
    args.update_from_config(load_config([*options, "--data.latent_channels=8", *arguments]))
    return args


@torch.no_grad()
@pytest.mark.parametrize("name", WRITERS)
def test_features_inside_the_model(checkpoints, tmp_path, name):
    """Tokens of the text have the encoder's features, ids behind them rows of the model's own."""
    args = model_args(checkpoints[name], tmp_path, "--encoder.no-frozen")
    assert (args.condition_base, args.condition_ids) == (512, 3)
    model = DiTTTSModel(args)
    model.init_weights()
    seen = []
    model.text_input.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    ids = torch.tensor([[514, 512, 5, 6, 7, 8], [513, 9, 511, 0, 0, 0]])
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    speaker = torch.zeros(2, 4, 8), torch.ones(2, 4, dtype=torch.bool)
    model.encode_conditions(ids, mask, *speaker)
    encoder, table = load(checkpoints[name]), model.condition_embedding.weight
    texts = encoder.encode([[5, 6, 7, 8], [9, 511]])
    torch.testing.assert_close(
        seen[0][0], torch.cat([table[[2, 0]], texts[0]]), rtol=0, atol=ROUNDING
    )
    torch.testing.assert_close(
        seen[0][1, :3], torch.cat([table[[1]], texts[1]]), rtol=0, atol=ROUNDING
    )


@pytest.mark.long
@torch.no_grad()
def test_a_run_with_a_checkpoint_takes_the_encoder_from_it(checkpoints, tmp_path):
    """Else a resumed run would fine-tune from the start again; and what no checkpoint fills is NaN."""

    def starts(*arguments):
        args = model_args(checkpoints["t5"], tmp_path, "--encoder.no-frozen", *arguments)
        model = DiTTTSModel(args)
        model.init_weights()
        found = [parameter.isfinite().all().item() for parameter in model.text_encoder.parameters()]
        assert len(set(found)) == 1
        return found[0]

    enabled = "--checkpoint.enable"
    assert starts() and starts(enabled)
    (tmp_path / "checkpoint" / "step-3").mkdir(parents=True)
    assert starts(enabled)  # a step that was not finished
    (tmp_path / "checkpoint" / "step-3" / ".metadata").touch()
    assert starts("--checkpoint.no-enable") and not starts(enabled)
    assert starts(enabled, "--checkpoint.create_seed_checkpoint")


def test_models_write_to_their_configs_and_the_source_stays(checkpoints):
    source = find_source(str(checkpoints["t5"]))
    before = source.config.to_dict()
    source.build()
    assert source.config.to_dict() == before and isinstance(source.config, T5Config)


# Packing.


def mask_of(lengths, first=0):
    return np.stack(
        [
            (np.arange(first + max(lengths)) >= first)
            & (np.arange(first + max(lengths)) < first + n)
            for n in lengths
        ]
    )


def test_packed_rows_hold_each_token_once_and_hardly_any_padding():
    lengths = np.random.default_rng(0).integers(10, 60, size=64)
    rows = pack_rows(mask_of(lengths, first=3))
    [group] = rows.groups
    kept = group.segment > 0
    assert kept.float().mean() > 0.95
    tokens = group.token[kept]
    assert len(set(tokens.tolist())) == len(tokens) == lengths.sum()
    # There and back again: the place that a token came from finds it.
    flat = group.token.flatten()
    valid = torch.from_numpy(mask_of(lengths, first=3))
    assert torch.equal(flat[rows.origin[valid]], valid.flatten().nonzero().flatten())
    assert (rows.origin[~valid] == group.token.numel()).all()


def test_a_text_sees_itself_only_and_counts_from_its_start():
    [group] = pack_rows(mask_of([400, 200, 100, 100])).groups
    assert group.token.shape == (2, 400)
    for row in range(2):
        segment, position = group.segment[row].tolist(), group.position[row].tolist()
        for a in range(0, 400, 20):
            for b in range(0, 400, 25):
                assert group.same_segment[row, 0, a, b] == (segment[a] == segment[b])
        for a in range(400):
            if a and segment[a] == segment[a - 1] and segment[a]:
                assert position[a] == position[a - 1] + 1
            elif segment[a]:
                assert position[a] == 0


def test_unpacked_rows_are_as_many_groups_on_every_rank():
    for lengths in ([1] * 8, list(range(1, 9)), [5, 0, 0, 0, 0, 0, 0, 0]):
        rows = pack_rows(mask_of(lengths), packed=False)
        assert len(rows.groups) == SORTED_GROUPS
        assert all((group.segment <= 1).all() for group in rows.groups)
    padded = sum(r * w for r, w in pack_rows(mask_of(range(1, 65)), packed=False).shapes)
    assert padded < 0.7 * 64 * 64


def test_a_batch_without_any_text_still_goes_through(checkpoints):
    for name in WRITERS:
        encoder = load(checkpoints[name])
        features = encoder(torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.bool))
        assert features.shape == (3, 6, encoder.width) and (features == 0).all()


def test_a_files_digest_is_kept_and_a_changed_file_is_read_again(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = contents_digest(path)
    monkeypatch.setattr("xxhash.xxh3_128", None)  # a second reading would need it
    assert contents_digest(path) == first
    monkeypatch.undo()
    path.write_bytes(b"two!")
    assert contents_digest(path) != first


def test_missing_weights_are_downloaded_by_one_sentence_or_an_error(tmp_path, monkeypatch):
    asked = []

    def download(model, allow_patterns):
        asked.append(allow_patterns)
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(InputError, match="hf download nobody/none") as error:
        fetch_weights("nobody/none")
    assert asked and "\n" not in str(error.value)
    with pytest.raises(InputError, match="has not all weights"):
        fetch_weights(str(tmp_path))


def test_a_config_that_contradicts_itself_is_one_sentence(checkpoints, tmp_path):
    shutil.copytree(checkpoints["t5gemma2"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["decoder"]["hidden_size"] = 96
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="cannot be found") as error:
        find_source(str(tmp_path / "model"))
    assert "\n" not in str(error.value)
