"""Sampling of latents, eager and compiled, for one request and for several at once, beside float32 eager.

The first flavor with random weights, through `generate_latents`: Euler steps with guidance by text and speaker, all
requests of one length. The bar of the largest difference, relative to the latents' deviation, is 1e-3 and for float32
compiled, where the same terms are added in another order (measured: 6e-6 on an H200). A CUDA graph that overwrites what is
still read shows as 0.1 or more. bfloat16 has no bar.
"""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from tools.gpu_check.items import Item, Turn, Values
from tools.gpu_check.measuring import profiled, timed
from tools.gpu_check.models import Mode, built, random_weights
from tools.gpu_check.settings import Settings
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.flow.solvers import network_passes, plan_steps
from torchtitan.models.dit_tts.infra.compile import compile_for_any_lengths
from torchtitan.models.dit_tts.speech.sampling.sampler import SpeechRequest, generate_latents
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary

SAMPLING = Sampling(text_scale=3.0, speaker_scale=5.0, min_t=0.5)
_FRAMES_PER_SECOND = 25
_BAR = 1e-3
_WARM_UP_STEPS = 8  # four with guidance, four without: a CUDA graph warms up, records and replays


def sizes(settings: Settings) -> tuple[int, int, int, int]:
    """(frames, text tokens, reference frames, steps)."""
    return (24, 8, 16, 8) if settings.tiny else (250, 72, 192, 40)


class Sampled:
    """A model with its requests: latents (requests, T, C) of one call."""

    def __init__(self, model: torch.nn.Module, args: Any, count: int, settings: Settings):
        self.model, self.settings, self.count = model, settings, count
        frames, text, reference, self.steps = sizes(settings)
        generator = torch.Generator().manual_seed(0)
        self.requests = [
            SpeechRequest(
                chr(97 + number) * text,
                torch.randn(reference, args.latent_channels, generator=generator),
                frames,
            )
            for number in range(count)
        ]
        features = torch.randn(128, args.text_dim, generator=torch.Generator().manual_seed(1))
        self.features = features.to(settings.device)

    def latents(self, steps: int = 0) -> torch.Tensor:
        found = generate_latents(
            cast(Any, self.model),
            UnitTokenizer(Vocabulary()),
            FlowMatching(),
            self.requests,
            replace(SAMPLING, steps=steps or self.steps),
            0,
            torch.device(self.settings.device),
            text_encoder=cast(Any, lambda ids, mask: self.features[ids]),
        )
        return torch.stack(found)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, relative to the deviation of the expected latents; infinite for a NaN."""
    return float((found - expected).abs().nan_to_num(float("inf")).max() / expected.std())


def measure(
    flavor: str, precision: str, mode: str, count: int, settings: Settings, turn: Turn
) -> Values:
    args = model_flavors()[flavor]
    weights = random_weights(args, seed=0)
    device = settings.device
    with built(args, Mode(), device, weights) as model:
        expected = Sampled(model.eval(), args, count, settings).latents()
    # Training's modes compile for static shapes, and bfloat16 is theirs by autocast.
    with built(args, Mode(), device, weights) as model:
        model.to(getattr(torch, precision)).eval()
        if mode:
            compile_for_any_lengths(model, mode)
        sampled = Sampled(model, args, count, settings)
        sampled.latents(_WARM_UP_STEPS)
        turn()
        took = timed(sampled.latents, device, 2.0 * (not settings.tiny), least=1)
        kernels = profiled(sampled.latents, device, 1)
        error = difference(sampled.latents(), expected)
    frames, *_, steps = sizes(settings)
    seconds = took["ms_median"] / 1e3
    rows = count * network_passes(plan_steps(replace(SAMPLING, steps=steps)))
    values = {
        "seconds": seconds,
        "rows_per_second": rows / seconds,
        "real_time_factor": seconds / (count * frames / _FRAMES_PER_SECOND),
        "largest_difference": error,
        **{key: kernels[key] for key in ("ms_of_kernels", "ms_idle", "ms_by_group")},
    }
    if (precision, bool(mode)) != ("float32", True):
        return values
    why = f"the latents differ from float32 eager's by {error:.2g} deviations, over {_BAR}"
    return {**values, "bar": _BAR, "passed": error <= _BAR, "why": why}


def items(settings: Settings) -> list[Item]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    flavor = settings.flavors[0]
    modes = ("", "default", "reduce-overhead")
    cases = [(p, m, count) for count in (1, 16) for m in modes for p in ("float32", "bfloat16")]
    if settings.tiny:
        cases = [("float32", "default", 3), ("bfloat16", "", 1)]
    return [
        Item(
            "sampling",
            f"{flavor} sampling {precision}, {f'compiled {mode}' if mode else 'eager'}, requests: {count}",
            partial(measure, flavor, precision, mode, count, settings),
            12.0,
        )
        for precision, mode, count in cases
    ]
