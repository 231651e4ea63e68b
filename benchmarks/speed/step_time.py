"""The gate that takes time: a training step of our build against two others, interleaved.

A step is forward, loss, backward, gradient clipping and fused AdamW, the same for all. Before anything
is timed, the unfused build must give our outputs, and the Echo-style one must have as many parameters.
A ratio is taken within a round; given are its median, least and most.
"""

import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from benchmarks.speed.cases import (
    Outcome,
    debug_model,
    fifty_million,
    random_batch,
    randomize,
)
from benchmarks.speed.echo_style import EchoStyleDiT
from benchmarks.speed.unfused import unfused
from torchtitan.models.dit_tts.flow.objective import squared_error_sums
from torchtitan.models.dit_tts.infra.compile import apply_compile
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.flops import Lengths
from torchtitan.models.dit_tts.model.model import DiTTTSModel

CASES = {  # name -> (samples, lengths, rounds)
    "debug": (4, Lengths(64, 40, 64), 21),
    "50M": (2, Lengths(64, 40, 64), 15),
}
LEAST_RATIO = 1.0
"""compiled, in the median of the rounds, against each of the two"""


def _trainer(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    target = torch.randn(batch["latents"].shape, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.zero_grad()
        loss = squared_error_sums(model(**batch), target, batch["frame_mask"]).sum()
        (loss / batch["frame_mask"].sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step


def _builds(args: DiTTTSModelArgs, batch: dict[str, torch.Tensor]) -> dict[str, nn.Module]:
    """Our model eager and compiled, and the other two, each of which was checked."""
    ours = DiTTTSModel(args)
    randomize(ours.parameters())
    separate = unfused(ours)
    echo = EchoStyleDiT(args)
    randomize(echo.parameters())
    with torch.no_grad():
        valid = batch["frame_mask"]
        torch.testing.assert_close(
            separate(**batch)[valid], ours(**batch)[valid], rtol=1e-4, atol=1e-4
        )
    sizes = {sum(p.numel() for p in model.parameters()) for model in (ours, separate, echo)}
    if len(sizes) != 1:
        raise AssertionError(
            f"the builds have {sorted(sizes)} parameters, which must be one number"
        )
    compiled = deepcopy(ours)
    apply_compile(compiled, "inductor", 1)
    return {"compiled": compiled, "eager": ours, "unfused": separate, "Echo-style": echo}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _time(name: str, args: DiTTTSModelArgs) -> dict[str, Any]:
    samples, lengths, rounds = CASES[name]
    batch = random_batch(args, samples, lengths)
    torch._dynamo.reset()
    builds = _builds(args, batch)
    steps = {build: _trainer(model, batch) for build, model in builds.items()}
    for step in steps.values():  # compiles, and makes the optimizer's states
        step()
    seconds: dict[str, list[float]] = {build: [] for build in steps}
    names = list(steps)
    for number in range(rounds):
        for build in names[number % 4 :] + names[: number % 4]:
            began = time.perf_counter()
            steps[build]()
            seconds[build].append(time.perf_counter() - began)
    torch._dynamo.reset()
    ratios = {
        f"{other} / {own}": _spread(
            [a / b for a, b in zip(seconds[other], seconds[own], strict=True)]
        )
        for own in ("compiled", "eager")
        for other in ("unfused", "Echo-style")
    }
    return {
        "parameters": sum(p.numel() for p in builds["eager"].parameters()),
        "samples": samples,
        "lengths": [lengths.frames, lengths.text_tokens, lengths.speaker_frames],
        "rounds": rounds,
        "seconds": {build: _spread(values) for build, values in seconds.items()},
        "ratios": ratios,
    }


def step_time() -> Outcome:
    """Seconds of the others' step over ours."""
    found = {"debug": _time("debug", debug_model()), "50M": _time("50M", fifty_million())}
    said, passed = [], True
    for name, case in found.items():
        for ratio, values in case["ratios"].items():
            said.append(
                f"{name} {ratio} {values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"
            )
            if ratio.endswith("/ compiled"):
                passed = passed and values["median"] >= LEAST_RATIO
    return Outcome(
        passed,
        "our compiled step no slower than the unfused and the Echo-style one",
        "; ".join(said),
        found,
    )
