"""The model's output and gradients in each mode, against float64 on the CPU.

The reference is the plain model in float64 on the CPU, whose error is near 1e-7. An error is
‖x - reference‖ / ‖reference‖: of the output over valid frames, and of each parameter's gradient, of which the worst
counts (one with almost no gradient is measured against 1 % of the largest parameter's). A NaN is an infinite error.
Batches have padding, a dropped text, a dropped speaker, both, and a sample without reference. A mode that replays CUDA
graphs sees three batches of a bucket in a row, warms up, records and replays; the last is compared.

Bars, and why they are where they are:
- float32: 1e-4 for the output, 3e-4 for a gradient. Sums of some thousand terms of rounding 6e-8 come to 1e-6 to 1e-5;
  where a device's exp is an ulp beside, a time's angle, at frequencies up to 1,000, is 1e-4 radians beside, and the worst
  gradient came to 6e-5. A wrong key, mask or rotation shows as 1e-2 or more.
- bfloat16: 0.03 and 0.1, and at most twice the error of eager sdpa in bfloat16 on the same device: what another order of
  summation may cost. A rounding is 2^-9, and a block has a dozen in a row.
- fp8: 0.15 and 0.5. A rounding to e4m3 is 0.03 on average of each operand. The bar finds a wrong scale or layout, not a
  loss of quality: that takes training.
"""

import math
from dataclasses import dataclass
from functools import cache, partial

import torch

from tools.gpu_check.items import Item, NotMeasured, Turn, Values
from tools.gpu_check.models import (
    ATTENTION_BACKENDS,
    CHECKPOINTING,
    COMPILE_MODES,
    ENGINE_FP8,
    FP8_RECIPES,
    Mode,
    autocast,
    built,
    random_weights,
)
from tools.gpu_check.settings import Settings
from torchtitan.models.dit_tts.config.job_config import CUDA_GRAPH_MODES
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel

_SIZES = DiTTTSModelArgs(
    dim=256,
    n_layers=3,
    n_heads=2,
    mlp_dim=704,
    speaker_dim=128,
    speaker_n_layers=2,
    speaker_n_heads=2,
    speaker_mlp_dim=352,
    text_dim=128,
    adaln_rank=32,
    timestep_dim=128,
)
_BUCKETS = ((5, 40, 16, 32), (5, 104, 40, 96), (6, 256, 96, 192))
"""(samples, frames, text tokens, speaker frames)"""

_BARS = {"float32": (1e-4, 3e-4), "bfloat16": (0.03, 0.1), "fp8": (0.15, 0.5)}
"""of the output, of the worst gradient"""

_MIDDLE = 1
"""the bucket that most compiled modes are checked on alone: a shape more is a compilation more"""

_TIMES_SDPA = 2.0
_LEAST_GRADIENT = 0.01


@dataclass(frozen=True)
class Batch:
    """Arguments of the model's forward pass, and what its output is multiplied with for the loss."""

    arguments: dict[str, torch.Tensor]
    weight: torch.Tensor

    def to(self, device: str, dtype: torch.dtype) -> "Batch":
        def moved(x: torch.Tensor) -> torch.Tensor:
            return x.to(device, dtype if x.is_floating_point() else x.dtype)

        return Batch({k: moved(v) for k, v in self.arguments.items()}, moved(self.weight))


@dataclass(frozen=True)
class Found:
    """Float64 on the CPU."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]


def make_batch(bucket: tuple[int, int, int, int], args: DiTTTSModelArgs, draw: int = 0) -> Batch:
    """Args:
    bucket: (samples, frames, text tokens, speaker frames).
    draw: another number, another batch.
    """
    samples, frames, text, speaker = bucket
    generator = torch.Generator().manual_seed(frames + 1000 * draw)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def mask(longest: int, least: int) -> torch.Tensor:
        lengths = torch.randint(least, longest + 1, (samples, 1), generator=generator)
        lengths[0] = longest
        return torch.arange(longest) < lengths

    frame_mask, text_mask, speaker_mask = mask(frames, frames // 3), mask(text, 1), mask(speaker, 1)
    speaker_mask[-1] = False  # no reference
    index = torch.arange(samples)
    arguments = {
        "latents": normal(samples, frames, args.latent_channels),
        "t": torch.rand(samples, generator=generator),
        "frame_mask": frame_mask,
        "text_ids": torch.zeros(samples, text, dtype=torch.long),
        "text_mask": text_mask,
        "speaker": normal(samples, speaker, args.latent_channels),
        "speaker_mask": speaker_mask,
        "keep_text": (index != 1) & (index != 3),
        "keep_speaker": (index != 2) & (index != 3),
        "text_features": normal(samples, text, args.text_dim),
    }
    weight = normal(samples, frames, args.latent_channels) * frame_mask[..., None]
    return Batch(arguments, weight / frame_mask.sum())


def outcome(model: torch.nn.Module, batch: Batch, mode: Mode, device: str) -> Found:
    """One forward and backward pass."""
    model.zero_grad(set_to_none=True)
    with autocast(mode, device):
        output = model(**batch.arguments)
        loss = (torch.where(batch.weight != 0, output, 0.0) * batch.weight).sum()
    loss.backward()
    # Checkpointing puts a module of its own around a block's.
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.double().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    valid = batch.arguments["frame_mask"]
    return Found(output.detach()[valid].double().cpu(), gradients)


@cache
def _weights() -> dict[str, torch.Tensor]:
    return random_weights(_SIZES, seed=0)


@cache
def reference(bucket: tuple[int, int, int, int]) -> Found:
    model = DiTTTSModel(_SIZES).double()
    model.load_state_dict(_weights())
    batch = make_batch(bucket, _SIZES).to("cpu", torch.float64)
    return outcome(model, batch, Mode(), "cpu")


def _worst_if_nan(error: float) -> float:
    """Infinity for a NaN, which every comparison, and max(), would pass over."""
    return float("inf") if math.isnan(error) else error


def errors(found: Found, expected: Found) -> tuple[float, float, str]:
    """Error of the output, of the worst gradient, and whose that is."""
    if found.gradients.keys() != expected.gradients.keys():
        odd = sorted(found.gradients.keys() ^ expected.gradients.keys())
        return float("inf"), float("inf"), f"gradients of other parameters: {odd[:3]}"
    output = (found.output - expected.output).norm() / expected.output.norm()
    least = _LEAST_GRADIENT * max(g.norm() for g in expected.gradients.values())
    worst = {
        name: _worst_if_nan(
            float((found.gradients[name] - g).norm() / torch.maximum(g.norm(), least))
        )
        for name, g in expected.gradients.items()
    }
    name = max(worst, key=worst.__getitem__)
    return _worst_if_nan(float(output)), worst[name], name


@cache
def measured_errors(
    mode: Mode, device: str, buckets: tuple[tuple[int, int, int, int], ...], batches: int = 1
) -> tuple[float, float, str]:
    """The largest errors over the buckets, by one model that sees them in turn.

    Args:
        batches: of each bucket, one after another; the last is compared.
    """
    each = []
    with built(_SIZES, mode, device, _weights()) as model:
        for bucket in buckets:
            for draw in reversed(range(batches)):
                batch = make_batch(bucket, _SIZES, draw).to(device, torch.float32)
                found = outcome(model, batch, mode, device)
            each.append(errors(found, reference(bucket)))
    return max(e[0] for e in each), *max((e[1:] for e in each), key=lambda e: e[0])


def _buckets(mode: Mode, settings: Settings) -> tuple[tuple[int, int, int, int], ...]:
    if settings.tiny:
        return _BUCKETS[:2]
    # Every backend is compiled for every bucket; what else there is, once.
    if not mode.compile or mode == Mode(mode.attention, mode.precision, "default"):
        return _BUCKETS
    return _BUCKETS[_MIDDLE : _MIDDLE + 1]


def check(mode: Mode, settings: Settings, turn: Turn = lambda: None) -> Values:
    """The errors of a mode beside their bars. Nothing is timed, so it waits for no turn."""
    if mode.attention == "varlen" and mode.precision == "float32" and settings.device != "cpu":
        raise NotMeasured("the packed kernel takes half precision only")
    buckets = _buckets(mode, settings)
    batches = 3 if mode.compile in CUDA_GRAPH_MODES else 1
    output, gradient, worst = measured_errors(mode, settings.device, buckets, batches)
    bars = _BARS["fp8" if mode.fp8 else mode.precision]
    values: Values = {
        "output_error": output,
        "output_bar": bars[0],
        "gradient_error": gradient,
        "gradient_bar": bars[1],
        "worst_gradient": worst,
    }
    passed = output <= bars[0] and gradient <= bars[1]
    plain = Mode(precision="bfloat16")
    if mode.precision == "bfloat16" and not mode.fp8 and mode != plain:
        base = measured_errors(plain, settings.device, buckets)
        values["times_eager_sdpa"] = max(
            _worst_if_nan(output / base[0]), _worst_if_nan(gradient / base[1])
        )
        passed = passed and values["times_eager_sdpa"] <= _TIMES_SDPA
    why = "" if passed else f"an error is over its bar, or over {_TIMES_SDPA} times eager sdpa's"
    return {**values, "passed": passed, "why": why}


def modes(settings: Settings) -> list[Mode]:
    """Plain ones first."""
    chosen = [
        Mode(attention=attention, precision=precision)
        for precision in ("float32", "bfloat16")
        for attention in ATTENTION_BACKENDS
    ]
    chosen += [Mode(checkpointing=kind) for kind in CHECKPOINTING[1:4]]
    chosen += [Mode(precision="bfloat16", fp8=recipe) for recipe in FP8_RECIPES]
    if settings.tiny:
        return [chosen[0], Mode("varlen", "bfloat16"), chosen[-1]]
    chosen += [Mode(precision="bfloat16", fp8=recipe, engine=True) for recipe in ("", ENGINE_FP8)]
    chosen += [Mode("varlen", "bfloat16", engine=True)]
    compiled = partial(Mode, precision="bfloat16", compile="default")
    chosen += [compiled(attention) for attention in ATTENTION_BACKENDS]
    chosen += [compiled(fp8=recipe) for recipe in FP8_RECIPES]
    chosen += [compiled(checkpointing=kind) for kind in CHECKPOINTING[1:]]
    chosen += [Mode(precision="bfloat16", compile=mode) for mode in COMPILE_MODES[1:]]
    return chosen


def items(settings: Settings) -> list[Item]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return [
        Item("numerics", mode.name, partial(check, mode, settings), 2.0) for mode in modes(settings)
    ]
