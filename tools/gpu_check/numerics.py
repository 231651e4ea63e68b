"""The model's output and gradients in each mode, against the plain model in float64 on the CPU.

An error is ‖x - reference‖ / ‖reference‖: of the output over valid frames, and of each parameter's gradient, of which the
worst counts (one with almost no gradient is measured against 1 % of the largest parameter's). A NaN is an infinite error.

- float32: 1e-4 for the output, 3e-4 for a gradient. Sums of some thousand terms of rounding 6e-8 come to 1e-6 to 1e-5;
  where a device's exp is off by an ulp, a time's angle, at frequencies up to 1,000, is off by 1e-4 radians, and the worst
  gradient came to 6e-5. A wrong key, mask or rotation shows as 1e-2 or more.
- bfloat16: 0.03 and 0.1. A rounding is 2^-9, and a block has a dozen in a row.
- fp8: 0.15 and 0.5. A rounding to e4m3 is 0.03 on average of each operand. The bar finds a wrong scale or layout, not a
  loss of quality: that takes training.
"""

import math
from dataclasses import replace
from functools import partial

import torch

from tools.gpu_check.items import Item, NotMeasured, Settings, Turn, Values
from tools.gpu_check.models import (
    CHECKPOINTING,
    COMPILED,
    EAGER,
    ENGINE,
    OWN_NORM,
    Mode,
    autocast,
    built,
    random_weights,
)
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.job_config import CUDA_GRAPH_MODES
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel

SIZES = model_flavors()["debug"]
SHAPE = (5, 104, 40, 96)
"""(samples, frames, text tokens, speaker frames)"""

_BARS = {"float32": (1e-4, 3e-4), "bfloat16": (0.03, 0.1), "fp8": (0.15, 0.5)}
"""of the output, of the worst gradient"""

Arguments = dict[str, torch.Tensor]
Found = tuple[torch.Tensor, Arguments]
"""output and gradients by parameter, float64 on the CPU"""


def make_batch(shape: tuple[int, ...], args: DiTTTSModelArgs, draw: int = 0) -> Arguments:
    """Arguments of the model's forward pass; another `draw` is another batch."""
    samples, frames, text, speaker = shape
    generator = torch.Generator().manual_seed(frames + 1000 * draw)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def mask(longest: int, least: int) -> torch.Tensor:
        lengths = torch.randint(least, longest + 1, (samples, 1), generator=generator)
        lengths[0] = longest
        return torch.arange(longest) < lengths

    index, speaker_mask = torch.arange(samples), mask(speaker, 1)
    speaker_mask[-1] = False  # no reference
    return {
        "latents": normal(samples, frames, args.latent_channels),
        "t": torch.rand(samples, generator=generator),
        "frame_mask": mask(frames, frames // 3),
        "text_ids": torch.zeros(samples, text, dtype=torch.long),
        "text_mask": mask(text, 1),
        "speaker": normal(samples, speaker, args.latent_channels),
        "speaker_mask": speaker_mask,
        "keep_text": (index != 1) & (index != 3),
        "keep_speaker": (index != 2) & (index != 3),
        "text_features": normal(samples, text, args.text_dim),
    }


def outcome(model: torch.nn.Module, batch: Arguments, mode: Mode, device: str) -> Found:
    """One forward and backward pass, of a loss that weighs every valid number differently."""
    model.zero_grad(set_to_none=True)
    dtype = next(model.parameters()).dtype
    moved = {k: x.to(device, dtype if x.is_floating_point() else x.dtype) for k, x in batch.items()}
    weight = torch.randn(batch["latents"].shape, generator=torch.Generator().manual_seed(1))
    valid = moved["frame_mask"]
    with autocast(mode, device):
        output = model(**moved)
        loss = (output[valid] * weight.to(device, dtype)[valid]).sum() / valid.sum()
    loss.backward()
    # Checkpointing puts a module of its own around a block's.
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.double().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return output.detach()[valid].double().cpu(), gradients


def errors(found: Found, expected: Found) -> tuple[float, float, str]:
    """Error of the output, of the worst gradient, and whose that is."""
    (output, gradients), (wanted, wanted_gradients) = found, expected
    if odd := sorted(gradients.keys() ^ wanted_gradients.keys()):
        return math.inf, math.inf, f"gradients of other parameters: {odd[:3]}"
    least = 0.01 * max(float(g.norm()) for g in wanted_gradients.values())

    def error(x: torch.Tensor, y: torch.Tensor, least: float = 0.0) -> float:
        # Every comparison, and max(), would pass over a NaN.
        return ((x - y).norm() / y.norm().clamp(min=least)).nan_to_num(math.inf).item()

    worst = {name: error(gradients[name], g, least) for name, g in wanted_gradients.items()}
    name = max(worst, key=worst.__getitem__)
    return error(output, wanted), worst[name], name


def check(mode: Mode, settings: Settings, turn: Turn = lambda: None) -> Values:
    """The errors of a mode and their limits. Nothing is timed, so it waits for no turn."""
    if (mode.name, mode.precision, settings.device) == ("varlen", "float32", "cuda"):
        raise NotMeasured("the packed kernel takes half precision only")
    weights, plain = random_weights(SIZES), DiTTTSModel(SIZES)
    plain.load_state_dict(weights)
    batch, in_float64 = make_batch(SHAPE, SIZES), replace(EAGER[0], precision="float64")
    expected = outcome(plain.double(), batch, in_float64, "cpu")
    replays = mode.name.rpartition(" ")[2] in CUDA_GRAPH_MODES
    with built(SIZES, mode, settings.device, weights) as model:
        for draw in range(2 if replays else 0):
            outcome(model, make_batch(SHAPE, SIZES, 1 + draw), mode, settings.device)
        found = outcome(model, batch, mode, settings.device)
    output, gradient, worst = errors(found, expected)
    bars = _BARS["fp8" if "fp8" in mode.name else mode.precision]
    return {
        "output_error": output,
        "output_bar": bars[0],
        "gradient_error": gradient,
        "gradient_bar": bars[1],
        "worst_gradient": worst,
        "passed": (passed := output <= bars[0] and gradient <= bars[1]),
        "why": "" if passed else f"errors {output:.2g} and {gradient:.2g} ({worst}), bars {bars}",
    }


def items(settings: Settings) -> list[Item]:
    """Plain modes first."""
    plain = [
        replace(mode, precision="float32") for mode in (*EAGER[:3], *CHECKPOINTING, OWN_NORM[0])
    ]
    modes = [*plain, *EAGER, *OWN_NORM, *ENGINE, *COMPILED]
    if settings.tiny:
        modes = [plain[0], EAGER[1], EAGER[-1]]
    return [Item("numerics", str(mode), partial(check, mode, settings), 2.0) for mode in modes]
