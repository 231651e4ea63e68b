"""Numbers and counts as people read them, and columns of text for a terminal."""

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Rows in columns; those at the places `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [c.ljust(w) if n in left else c.rjust(w) for n, (c, w) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return lines


def number(value: float | None) -> str:
    """Integers in full, others with four significant digits; None is a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def size_text(count: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of 1 or more."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def counted(count: int, word: str) -> str:
    """1 run; 1,200 runs."""
    return f"{count:,} {word if count == 1 else f'{word}s'}"
