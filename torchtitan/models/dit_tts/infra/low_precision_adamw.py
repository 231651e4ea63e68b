"""AdamW whose moments take less memory: in bfloat16, or in 8 bits by torchao."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

_CHUNK = 2**26
"""Parameters whose moments are in float32 at a time"""

_TILE = 2**16
"""As many places as there are numbers of 16 bits: each has one of its own to round with"""

_ALIGNED = 64
"""Numbers, of whose multiples the parameters' parts of a buffer start, for the kernels' wide loads"""

_ODD = 40503
"""2^16 over the golden ratio: multiples of it fill the 16 bits evenly, however many are taken"""


def round_to_bfloat16_(numbers: torch.Tensor, step: torch.Tensor) -> None:
    """Rounds in place to what bfloat16 holds, up or down so that over the steps the mean is kept.

    To the nearest, a second moment that moves by less than half of its last bit a step stands still.
    What decides is added to the 16 bits that bfloat16 lacks: a multiple of the golden ratio, by place
    and step alone, so a resumed run and another replica round alike, without a generator's state.

    Args:
        numbers: (n · _TILE,) float32, not negative.
        step: () the step's number, on the device of `numbers` or on the CPU.
    """
    places = torch.arange(_TILE, device=numbers.device)
    added = ((places + step.long()) * _ODD) & 0xFFFF
    numbers.view(torch.int32).view(-1, _TILE).add_(added.int()).bitwise_and_(-(1 << 16))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class BFloat16AdamW(AdamW):
    """torch's AdamW (fused, foreach or plain) with both moments kept in bfloat16.

    A step reads them into float32, a part of the parameters at a time, calls torch's own update, and
    rounds them: the first to the nearest, the second by `round_to_bfloat16_`. The weights are updated
    from the unrounded moments. Everything is elementwise, so shards are updated as plain tensors.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _chunks([p for p in group["params"] if p.grad is not None]):
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self._state(parameter, group) for parameter in parameters]
        kept = [[_local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")]
        first = [moment.float() for moment in kept[0]]
        buffer, second = _in_one_buffer(kept[1])
        adamw(
            [_local(parameter) for parameter in parameters],
            [_local(parameter.grad) for parameter in parameters],
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
        )
        round_to_bfloat16_(buffer, states[0]["step"])
        torch._foreach_copy_(kept[0], first)
        torch._foreach_copy_(kept[1], second)

    def _state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            # The fused kernel counts on the device.
            device = parameter.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():  # torch gives them the weights' dtype
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(torch.bfloat16)


def _in_one_buffer(moments: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the buffer, (n · _TILE,) float32; each moment as a part of it)."""
    starts = list(accumulate((-(-m.numel() // _ALIGNED) * _ALIGNED for m in moments), initial=0))
    buffer = moments[0].new_empty(-(-starts[-1] // _TILE) * _TILE, dtype=torch.float32)
    parts = [buffer[at : at + m.numel()].view(m.shape) for at, m in zip(starts, moments)]
    torch._foreach_copy_(parts, moments)
    return buffer, parts


def _chunks(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours with together at most `_CHUNK` numbers on this rank, or a single one with more."""
    chunk: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        count = _local(parameter).numel()
        if chunk and size + count > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += count
    if chunk:
        yield chunk


def build_8bit_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """torchao's AdamW with moments in 8 bits, quantised in blocks of 256 numbers (Dettmers et al.
    2022); tensors of fewer than 4096 numbers a rank keep float32. It compiles its update once for each
    shape of a parameter."""
    from torchao.optim import AdamW8bit

    class EagerOnCPU(AdamW8bit):
        """Without an accelerator: compiling takes seconds a shape, and the update does not last."""

        def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    on_cpu = all(p.device.type in ("cpu", "meta") for group in groups for p in group["params"])
    return (EagerOnCPU if on_cpu else AdamW8bit)(groups, **options)
