"""MFU that this project's predecessor ("the seed") published, to be shown beside ours."""

SOURCE = "seed, GH200"
NOTE = (
    "what this project's predecessor published for 1, 4 and 16 nodes of four GH200, in its own layouts and by "
    "its own count: one figure a size, and a second one of 8B on 16 nodes"
)

_GPUS = (4, 16, 64)
_MFU = {
    "800M": ("DDP", dict.fromkeys(_GPUS, 0.356)),
    "3B": ("TP 2", dict.fromkeys(_GPUS, 0.300)),
    "8B": ("TP 4", dict.fromkeys(_GPUS, 0.375) | {64: 0.360}),
}


def published_mfu(size: str, gpus: int) -> tuple[str, float] | None:
    """(layout, MFU as a fraction); None where nothing was published."""
    layout, figures = _MFU.get(size, ("", {}))
    return (layout, figures[gpus]) if gpus in figures else None
