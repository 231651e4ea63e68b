"""The network: exact sizes and FLOPs, and what its output may and may not depend on."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.protocols.train_spec import get_train_spec

from tests.helpers.small_models import (
    assert_equal,
    full_inputs,
    initialized_model,
    padded_inputs,
    random_model,
    small_args,
    until,
)
from torchtitan.models.dit_tts.config.job_config import Lora
from torchtitan.models.dit_tts.infra.adapters import add_adapter
from torchtitan.models.dit_tts.model.attention import rotated_groups
from torchtitan.models.dit_tts.model.attention_backends import guided_keys
from torchtitan.models.dit_tts.model.conditions import ConditionedModel, Conditions
from torchtitan.models.dit_tts.model.duration import DurationModel
from torchtitan.models.dit_tts.model.flops import (
    Lengths,
    MicroBatch,
    executed_flops,
    forward_flops,
    teacher_flops,
    training_flops,
)
from torchtitan.models.dit_tts.model.initialization import plain_name
from torchtitan.models.dit_tts.model.layers import rope_table
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model.operations import apply_rope

VOCABULARY = 40

SMALL = small_args(
    speaker_n_layers=2,
    latent_channels=8,
    text_vocab_size=VOCABULARY,
    text_n_layers=2,
    text_positions="aligned",
)

COUNTS = {
    "8M": 7_976_960,
    "18M": 16_083_712,
    "60M": 57_858_176,
    "300M": 307_511_424,
    "800M": 780_973_696,
    "3B": 3_507_659_904,
    "8B": 8_238_706_816,
}


def inputs() -> dict[str, torch.Tensor]:
    """Two rows with padding in each of frames, text and speaker; no speaker fills its last patch."""
    return padded_inputs(SMALL, [11, 6], [4, 7], [10, 5]) | {"t": torch.tensor([0.3037, 0.8063])}


@torch.no_grad()
def output(model: DiTTTSModel, batch: dict, **changes) -> torch.Tensor:
    return model(**{**batch, **changes})


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """But for float32's rounding, about 1e-6 of the largest: kernels sum in an order of their own."""
    largest = expected.abs().max().item()
    assert largest > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * largest)


def encoded(model: ConditionedModel, batch: dict) -> Conditions:
    names = ("text_ids", "text_mask", "speaker", "speaker_mask", "text_positions")
    return model.encode_conditions(**{name: batch[name] for name in names})


def test_flavors_have_exact_sizes():
    spec = get_train_spec("dit_tts")
    assert set(spec.model_args) == {"debug", "duration", *COUNTS}
    with torch.device("meta"):
        models = {flavor: spec.model_cls(args) for flavor, args in spec.model_args.items()}
    assert type(models["duration"]) is DurationModel and type(models["debug"]) is DiTTTSModel
    for flavor, count in COUNTS.items():
        model, args = models[flavor], spec.model_args[flavor]
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count
        assert args.get_nparams_and_flops(model, 768)[0] == count


@pytest.mark.parametrize(
    "sizes",
    [
        {"text_vocab_size": 0},
        {"text_vocab_size": 0, "condition_tokens": 3},
        {"text_vocab_size": 259},
        {"text_vocab_size": 259, "text_mlp_dim": 52, "text_projection": False, "text_dim": 24},
        {"text_vocab_size": 259, "speaker_bidirectional": True, "speaker_partial_patches": False},
        {"task": "duration", "dim": 48, "n_layers": 3},
        {"text_vocab_size": 259, "lora_rank": 3},
        {"text_vocab_size": 259, "max_caption_tokens": 9},
        {"text_vocab_size": 259, "max_caption_tokens": 9, "speaker_reference": False},
        {"text_vocab_size": 259, "max_caption_tokens": 9, "lora_rank": 3, "caption_n_layers": 1},
        {"task": "duration", "dim": 48, "n_layers": 3, "max_caption_tokens": 9},
    ],
)
@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (13, 7, 5, 9)])
def test_flops_equal_the_counter(lengths, sizes):
    args = replace(SMALL, **sizes)
    with torch.device("meta"):
        model = (DurationModel if args.task == "duration" else DiTTTSModel)(args)
        batch = full_inputs(args, 3, *lengths[:3])
        if args.max_caption_tokens:
            ids = torch.zeros(3, lengths[3], dtype=torch.long)
            batch |= {"caption_ids": ids, "caption_mask": torch.ones_like(ids, dtype=torch.bool)}
        else:
            lengths = lengths[:3]
        if not args.text_vocab_size:
            batch["text_features"] = torch.zeros(3, lengths[1], args.text_dim)
    add_adapter(model, Lora(rank=args.lora_rank))
    with FlopCounterMode(display=False) as counter:
        out = model(**batch)
        forward = counter.get_total_flops()
        out.sum().backward()
    # The plain forward pass has no low-rank products.
    assert args.lora_rank or forward == 3 * forward_flops(args, Lengths(*lengths))
    assert counter.get_total_flops() == 3 * training_flops(args, Lengths(*lengths))


def test_flops_of_a_teacher_equal_the_counter():
    args = replace(SMALL, text_vocab_size=259, teacher_passes=5)
    with torch.device("meta"), torch.no_grad():
        model, batch = DiTTTSModel(args), full_inputs(args, 3, 13, 7, 5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        conditions = encoded(model, {"text_positions": None, **batch})
        for _ in range(5):
            model.denoise(batch["latents"], batch["t"], batch["frame_mask"], conditions)
    found = teacher_flops(args, lengths := Lengths(13, 7, 5))
    assert counter.get_total_flops() == 3 * found
    micro_batch = MicroBatch((3, 13, 7, 5), [(13, 7, 5)] * 3)
    assert executed_flops(args, micro_batch) == 3 * (found + training_flops(args, lengths))
    assert teacher_flops(SMALL, lengths) == 0


@torch.no_grad()
@pytest.mark.parametrize("padded, cached", [(True, True), (False, False)])
def test_copies_for_guidance_are_the_rows_with_conditions_dropped(padded, cached):
    model, batch = random_model(SMALL), inputs()
    if not padded:
        names = ("frame_mask", "text_mask", "speaker_mask")
        batch |= {name: torch.ones_like(batch[name]) for name in names}
    conditions = encoded(model, batch)
    frames = batch["frame_mask"].sum(1)
    copies = ((True, True), (False, True), (True, False))
    masks = (batch["frame_mask"], conditions.text_mask, conditions.speaker_mask)
    keys = guided_keys(masks, copies, torch.float32)
    assert [mask is None for mask in keys.masks] == [not padded] * 3
    latents, times = batch["latents"].repeat(3, 1, 1), torch.tensor([0.9, 0.3])
    caches = model.block_caches(conditions, times, frames) if cached else [None, None]
    forms = (keys, keys._replace(lengths=None))  # packed where there is padding, and padded
    assert (keys.lengths is not None) == padded
    for (t, cache), form in itertools.product(zip(times, caches, strict=True), forms):
        found = model.denoise_guided(latents, t[None], form, conditions, frames, cache)
        for (text, speaker), rows in zip(copies, found.chunk(3), strict=True):
            keep = {
                "keep_text": torch.tensor([text] * 2),
                "keep_speaker": torch.tensor([speaker] * 2),
            }
            alone = output(model, batch, t=t.expand(2), **keep)
            assert_close(rows[batch["frame_mask"]], alone[batch["frame_mask"]])


def test_a_row_without_keys_sees_all_its_frames():
    """No softmax is empty, on any device."""
    model, batch = random_model(SMALL), inputs()
    for name in ("text_mask", "speaker_mask", "frame_mask"):
        batch[name] = batch[name].clone()
        batch[name][0] = name == "frame_mask"
    every_frame = output(model, batch)
    batch["frame_mask"][0] = False
    out = model(**batch)
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert_close(out.detach(), every_frame)


def test_rows_without_a_reference_are_as_if_the_speaker_was_dropped():
    model, batch = random_model(SMALL), inputs()
    batch["speaker"] = torch.randn(2, 0, SMALL.latent_channels)
    batch["speaker_mask"] = torch.zeros(2, 0, dtype=torch.bool)
    found = model(**batch)
    dropped = model(**inputs(), keep_speaker=torch.zeros(2, dtype=torch.bool))
    torch.testing.assert_close(found[0], dropped[0])


def test_aligned_positions_need_the_batchs():
    with pytest.raises(ValueError, match="needs text_positions"):
        random_model(SMALL)(**{**inputs(), "text_positions": None})


def test_a_duration_predictor_reads_neither_the_utterance_nor_a_hidden_voice():
    model, batch = random_model(replace(SMALL, task="duration")), inputs()
    found = model(**batch)
    other = batch | {name: torch.rand(2, 5) for name in ("latents", "t", "frame_mask")}
    assert torch.equal(model(**other), found)
    alone = {name: each[:1] for name, each in batch.items()}
    alone |= {name: each[:, :4] for name, each in alone.items() if name.startswith("text")}
    torch.testing.assert_close(model(**alone), found[:1])  # padding has no say
    hidden = model(**batch, keep_speaker=torch.tensor([True, False]))
    none = model(**batch | {"speaker_mask": torch.zeros_like(batch["speaker_mask"])})
    torch.testing.assert_close(hidden, torch.stack([found[0], none[1]]))
    assert abs(none[1] - found[1]) > 1e-3
    model(**batch | {"text_mask": until([0, 3], 9)}).sum().backward()  # an empty text has a length
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_weights_depend_on_seed_and_name_only():
    reference = dict(initialized_model(SMALL, 3).named_parameters())
    torch.manual_seed(3)
    torch.rand(100)  # a moved generator changes nothing, the seed alone counts
    model = DiTTTSModel(SMALL)
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    model.init_weights()
    found = {plain_name(name): value for name, value in model.named_parameters()}
    assert_equal(found, reference)
    # Other parameters before and between them: no byte encoder, and a third layer.
    fewer = dict(initialized_model(replace(SMALL, text_vocab_size=0), 3).named_parameters())
    more = dict(initialized_model(replace(SMALL, n_layers=3), 3).named_parameters())
    other = dict(initialized_model(SMALL, 4).named_parameters())
    assert fewer.keys() < reference.keys() < more.keys()
    assert_equal(fewer, {name: reference[name] for name in fewer})
    for name, parameter in reference.items():
        residual = name.startswith("layers.") and name.endswith((".out.weight", ".down.weight"))
        scale = math.sqrt(2 / 3) if residual and "adaln" not in name else 1.0
        torch.testing.assert_close(more[name], scale * parameter, rtol=1e-5, atol=0)
        if parameter.unique().numel() > 1:  # neither ones nor zeros
            assert (other[name] != parameter).float().mean() > 0.99, name
            if name.startswith("layers.0."):
                assert not torch.equal(parameter, reference[name.replace(".0.", ".1.", 1)]), name


def test_initial_scale():
    sizes = {"dim": 160, "mlp_dim": 300, "speaker_dim": 128, "n_layers": 3}
    model = initialized_model(replace(SMALL, **sizes, text_vocab_size=1000), 3)
    layer = model.layers[0]
    for weight, fan_in, scale in (
        (layer.attention.qkv_gate.weight, 160, 1.0),
        (layer.attention.text_kv.weight, 128, 1.0),
        (layer.attention.out.weight, 160, 1 / math.sqrt(6)),
        (layer.mlp.down.weight, 300, 1 / math.sqrt(6)),
        (model.speaker_encoder.layers[0].attention.out.weight, 128, 1.0),
    ):
        assert weight.std().item() == pytest.approx(scale / math.sqrt(fan_in), rel=0.02)
    assert model.text_encoder.embedding.weight.std().item() == pytest.approx(1, rel=0.02)
    assert all((p == 1).all() for n, p in model.named_parameters() if n.endswith("norm.weight"))
    assert not any(p.any() for n, p in model.named_parameters() if n.endswith(".bias"))
    assert not any(each.adaln.up.weight.any() for each in model.layers)
    assert output(model, inputs()).abs().max() == 0


def test_the_first_half_of_the_heads_is_rotated():
    assert rotated_groups(4) == (True, False)
    assert rotated_groups(5) == (True, True, False, False, False)
    assert rotated_groups(1) == (False,)


def test_rotation_is_computed_in_float32():
    x = 30 * torch.randn(2, 7, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rope = rope_table(torch.arange(7.0), 64, 10000.0)
    assert torch.equal(apply_rope(x, rope), apply_rope(x.float(), rope).bfloat16())


def test_weights_in_bfloat16_leave_time_and_output_in_float32():
    """t in bfloat16 would turn the fastest angle, 1000·t, by up to 2 radians."""
    model, batch = random_model(SMALL), inputs()
    low = output(model.bfloat16(), batch)
    assert low.dtype == torch.float32
    valid = batch["frame_mask"]
    exact = output(model.float(), batch)[valid]
    assert (low[valid] - exact).square().mean().sqrt() < 0.03 * exact.square().mean().sqrt()
