"""AdamW with moments in bfloat16, or in 8 bits by torchao, to save memory."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.adamw import adamw

from torchtitan.models.dit_tts.infra.parallelize import local_tensor

_CHUNK = 2**26
"""Maximum number of parameters with float32 moments at a time"""

_TILE = 2**16
"""Number of 16-bit values: each element of a tile is rounded with another one"""

_ALIGNMENT = 64
"""Elements to which each parameter's part of a buffer is aligned, for vectorised loads"""

_ODD = 40503
"""2^16 over the golden ratio: any number of its multiples fills the 16 bits evenly"""


def round_to_bfloat16_(numbers: torch.Tensor, step: torch.Tensor) -> None:
    """Rounds (n · _TILE,) float32 numbers, not negative, in place to bfloat16 values, up or down so that the mean over the
    steps is kept.

    Rounded to nearest, a second moment that changes by less than half of its last bit per step would never
    change. A multiple of the golden ratio, which depends on position and step () alone, is added to the 16 bits
    that bfloat16 lacks, so resumed runs and replicas round alike without a random generator's state.
    """
    positions = torch.arange(_TILE, device=numbers.device)
    added = ((positions + step.long()) * _ODD) & 0xFFFF
    numbers.view(torch.int32).view(-1, _TILE).add_(added.int()).bitwise_and_(-(1 << 16))


class BFloat16AdamW(AdamW):
    """torch's AdamW (fused, foreach or plain) with both moments stored in bfloat16. Weights are updated from the unrounded
    moments, of some parameters at a time; the first is rounded to nearest, the second by `round_to_bfloat16_`."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures here
        for group in self.param_groups:
            for parameters in _chunks([p for p in group["params"] if p.grad is not None]):
                self._update(parameters, group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self._state(parameter, group) for parameter in parameters]
        stored = [
            [local_tensor(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")
        ]
        first = [moment.float() for moment in stored[0]]
        buffer, second = _in_one_buffer(stored[1])
        adamw(
            [local_tensor(p) for p in parameters],
            [local_tensor(p.grad) for p in parameters if p.grad is not None],
            first,
            second,
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )
        round_to_bfloat16_(buffer, states[0]["step"])
        torch._foreach_copy_(stored[0], first)
        torch._foreach_copy_(stored[1], second)

    def _state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            # The fused kernel counts the steps on the device.
            device = parameter.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():  # torch casts them to the dtype of the weights
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(torch.bfloat16)


def _in_one_buffer(moments: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A float32 buffer (n · _TILE,), and each moment as a view of a part of it."""
    starts = list(
        accumulate((-(-m.numel() // _ALIGNMENT) * _ALIGNMENT for m in moments), initial=0)
    )
    buffer = moments[0].new_empty(-(-starts[-1] // _TILE) * _TILE, dtype=torch.float32)
    parts = [buffer[at : at + m.numel()].view(m.shape) for at, m in zip(starts, moments)]
    torch._foreach_copy_(parts, moments)
    return buffer, parts


def _chunks(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Groups of neighbours with at most `_CHUNK` elements on this rank; a larger parameter is alone."""
    chunk: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        count = local_tensor(parameter).numel()
        if chunk and size + count > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += count
    if chunk:
        yield chunk


def build_8bit_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """torchao's AdamW with moments in 8 bits, quantised in blocks of 256 elements (Dettmers et al.
    2022). Tensors of fewer than 4096 elements per rank keep float32. Its update is compiled once per
    parameter shape."""
    from torchao.optim import AdamW8bit

    class EagerOnCPU(AdamW8bit):
        """Without compilation, which takes seconds per shape and saves little on a CPU."""

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            with torch.compiler.set_stance("force_eager"):
                super().step(closure)

    on_cpu = all(p.device.type in ("cpu", "meta") for group in groups for p in group["params"])
    return (EagerOnCPU if on_cpu else AdamW8bit)(groups, **options)
