"""The model's output and gradients in each mode, against the plain model in float64 on the CPU.

An error is ‖x - reference‖ / ‖reference‖: of the output over valid frames, and of each parameter's gradient, of which the
worst counts (one with almost no gradient is measured against 1 % of the largest parameter's).

- float32: 1e-4 for the output, 3e-4 for a gradient. Sums of some thousand roundings of 6e-8 come to 1e-5; an exp that is
  off by an ulp turns a time's angle by 1e-4. A wrong key, mask or rotation shows as 1e-2 or more.
- bfloat16: 0.03 and 0.1. A rounding is 2^-9, and a block has a dozen in a row.
- fp8: 0.15 and 0.5. It finds a wrong scale or layout, not a loss of quality: that takes training.
"""

import math
from functools import partial

import torch

from tools.gpu_check import models
from tools.gpu_check.supervisor import Item, NotMeasured, Settings, Turn, Values
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.job_config import CUDA_GRAPH_MODES
from torchtitan.models.dit_tts.model.model import DiTTTSModel

SIZES = model_flavors()["debug"]
SHAPE = (5, 104, 40, 96)  # samples, frames, text tokens, speaker frames
# Of the output, of the worst gradient
_BARS = {"float32": (1e-4, 3e-4), "bfloat16": (0.03, 0.1), "fp8": (0.15, 0.5)}

Arguments = dict[str, torch.Tensor]
Found = tuple[torch.Tensor, Arguments]  # output and gradients by parameter, float64 on the CPU


def make_batch(draw: int = 0) -> Arguments:
    """Arguments of the model's forward pass; another `draw` is another batch."""
    (samples, frames, text, speaker), args = SHAPE, SIZES
    generator = torch.Generator().manual_seed(draw)
    share, index = torch.tensor([1.0, 0.4, 0.7, 0.9, 0.5]).roll(draw), torch.arange(samples)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def mask(longest: int) -> torch.Tensor:
        return torch.arange(longest) < longest * share[:, None]

    return {
        "latents": normal(samples, frames, args.latent_channels),
        "t": torch.rand(samples, generator=generator),
        "frame_mask": mask(frames),
        "text_ids": torch.zeros(samples, text, dtype=torch.long),
        "text_features": normal(samples, text, args.text_dim),
        "text_mask": mask(text),
        "speaker": normal(samples, speaker, args.latent_channels),
        "speaker_mask": mask(speaker) & (index < samples - 1)[:, None],  # the last has no reference
        "keep_text": (index != 1) & (index != 3),
        "keep_speaker": (index != 2) & (index != 3),
    }


def outcome(model: torch.nn.Module, batch: Arguments, precision: str, device: str) -> Found:
    """One forward and backward pass, of a loss that weighs every valid number differently."""
    model.zero_grad(set_to_none=True)
    dtype = next(model.parameters()).dtype
    moved = {k: x.to(device, dtype if x.is_floating_point() else x.dtype) for k, x in batch.items()}
    weight = torch.randn(batch["latents"].shape, generator=torch.Generator().manual_seed(1))
    valid = moved["frame_mask"]
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
        output = model(**moved)
        loss = (output[valid] * weight.to(device, dtype)[valid]).sum() / valid.sum()
    loss.backward()
    named = model.named_parameters()
    gradients = {name: p.grad.double().cpu() for name, p in named if p.grad is not None}
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


def check(mode: str, precision: str, settings: Settings, turn: Turn = lambda: None) -> Values:
    """Return the errors of a mode and their limits. Nothing is timed, so it waits for no turn."""
    if (mode, precision, settings.device) == ("varlen", "float32", "cuda"):
        raise NotMeasured("the packed kernel takes half precision only")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    weights, plain, batch = models.random_weights(SIZES), DiTTTSModel(SIZES), make_batch()
    plain.load_state_dict(weights)
    expected = outcome(plain.double(), batch, "float64", "cpu")
    with models.built(SIZES, mode, settings.device, weights) as model:
        for draw in range(2 if mode.endswith(CUDA_GRAPH_MODES) else 0):
            outcome(model, make_batch(1 + draw), precision, settings.device)
        found = outcome(model, batch, precision, settings.device)
    output, gradient, worst = errors(found, expected)
    bars = _BARS["fp8" if "fp8" in mode else precision]
    passed = output <= bars[0] and gradient <= bars[1]
    return {
        **{"output_error": output, "output_bar": bars[0]},
        **{"gradient_error": gradient, "gradient_bar": bars[1], "worst_gradient": worst},
        "passed": passed,
        "why": "" if passed else f"errors {output:.2g} and {gradient:.2g} ({worst}), bars {bars}",
    }


def items(settings: Settings) -> list[Item]:
    """Plain modes first."""
    eager, own = models.EAGER, "eager, own norm"
    modes = [(mode, "float32") for mode in (*eager[:3], own)]
    modes += [(mode, "bfloat16") for mode in (*eager, own, *models.ENGINE, *models.COMPILED)]
    if settings.tiny:
        modes = [("eager", "float32"), *((eager[n], "bfloat16") for n in (1, -1))]
    return [
        Item(f"{precision}, {mode}", partial(check, mode, precision, settings), 2.0)
        for mode, precision in modes
    ]
