"""Stage: sampling of latents, eager and compiled, for one request and for several at once.

The first flavor with random weights, through `generate_latents`: Euler steps with guidance by text and
speaker, all requests of one length. The latents stand beside those of float32 eager: the largest
difference, relative to the deviation of these.

The bar, 1e-3, is for float32 compiled, where the same terms are added in another order. By two such orders
on a CPU (backward passes by hand and by autograd differ forward, too) the 800M's latents of 25 frames came
to 3e-6 after 40 steps, the debug flavor's compiled ones to 4e-6. A CUDA graph that overwrites what is still
read shows as 0.1 or more. bfloat16 has no bar.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch

from tools.gpu_check.items import Item, Values
from tools.gpu_check.measuring import timed
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

_SAMPLING = Sampling(text_scale=3.0, speaker_scale=5.0, min_t=0.5)
_FRAMES_PER_SECOND = 25
_BAR = 1e-3
_LEAST_SECONDS = 8.0

_WARM_UP_STEPS = 8
"""four with guidance and four without: a CUDA graph warms up, records and replays"""


def _sizes(settings: Settings) -> tuple[int, int, int, int]:
    """(frames, text tokens, reference frames, steps)."""
    return (24, 8, 16, 8) if settings.tiny else (250, 72, 192, 40)


def _counts(settings: Settings) -> tuple[int, int]:
    """Requests at once."""
    return (1, 3) if settings.tiny else (1, 16)


def _requests(count: int, channels: int, settings: Settings) -> list[SpeechRequest]:
    frames, text, reference, _ = _sizes(settings)
    generator = torch.Generator().manual_seed(0)
    return [
        SpeechRequest(
            chr(97 + number) * text, torch.randn(reference, channels, generator=generator), frames
        )
        for number in range(count)
    ]


@cache
def _weights(flavor: str) -> dict[str, torch.Tensor]:
    return random_weights(model_flavors()[flavor], seed=0)


@cache
def run(
    flavor: str, precision: str, mode: str, count: int, settings: Settings
) -> tuple[Values, torch.Tensor]:
    """Figures of sampling, and the latents (requests, T, C).

    Args:
        precision: dtype of the weights.
        mode: of torch.compile; empty: eager.
        count: requests at once.
    """
    frames, *_, steps = _sizes(settings)
    args = model_flavors()[flavor]
    device = torch.device(settings.device)
    requests = _requests(count, args.latent_channels, settings)
    features = torch.randn(128, args.text_dim, generator=torch.Generator().manual_seed(1))
    features = features.to(device)
    found: list[torch.Tensor] = []
    # Training's modes compile for static shapes, and bfloat16 is theirs by autocast.
    with built(args, Mode(), settings.device, _weights(flavor)) as model:
        model.to(getattr(torch, precision)).eval()
        if mode:
            compile_for_any_lengths(model, mode)

        def sample(steps: int) -> None:
            found[:] = generate_latents(
                cast(Any, model),
                UnitTokenizer(Vocabulary()),
                FlowMatching(),
                requests,
                replace(_SAMPLING, steps=steps),
                0,
                device,
                text_encoder=cast(Any, lambda ids, mask: features[ids]),
            )

        sample(_WARM_UP_STEPS)
        took = timed(
            lambda: sample(steps),
            settings.device,
            seconds=2.0 * (not settings.tiny),
            warm_up=0,
            least=1,
        )
    seconds = took["ms_median"] / 1e3
    rows = count * network_passes(plan_steps(replace(_SAMPLING, steps=steps)))
    figures = {
        "seconds": seconds,
        "rows_per_second": rows / seconds,
        "real_time_factor": seconds / (count * frames / _FRAMES_PER_SECOND),
        "repeats": took["repeats"],
    }
    return figures, torch.stack(found)


def measure(flavor: str, precision: str, mode: str, count: int, settings: Settings) -> Values:
    values, latents = run(flavor, precision, mode, count, settings)
    if (precision, mode) == ("float32", ""):
        return values
    _, expected = run(flavor, "float32", "", count, settings)
    # A NaN is over every bar.
    difference = float((latents - expected).abs().nan_to_num(float("inf")).max() / expected.std())
    values = {**values, "largest_difference": difference}
    if precision != "float32":
        return values
    why = f"the latents differ from float32 eager's by {difference:.2g} deviations, over {_BAR}"
    return {**values, "bar": _BAR, "passed": difference <= _BAR, "why": why}


def items(settings: Settings) -> list[Item]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    flavor = settings.flavors[0]
    modes = ["", "default"] + ["reduce-overhead"] * (settings.device == "cuda")
    return [
        Item(
            f"{flavor} sampling {precision}, {f'compiled {mode}' if mode else 'eager'}, requests: {count}",
            partial(measure, flavor, precision, mode, count, settings),
            0.0 if settings.tiny else _LEAST_SECONDS,
        )
        for count in _counts(settings)
        for mode in modes
        for precision in ("float32", "bfloat16")
    ]
