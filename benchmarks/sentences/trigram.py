"""A trigram language model of sentences, as an ARPA file: what PocketSphinx reads."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import log10
from pathlib import Path

_DISCOUNT = 0.7
"""counts that each seen n-gram gives to the unseen ones (absolute discounting, interpolated: Ney et al. 1994)"""

_Grams = Counter[tuple[str, ...]]


def write_trigram(sentences: Iterable[Sequence[str]], path: Path) -> None:
    """Trigram with back-off of sentences, each a list of words."""
    counts: list[_Grams] = [Counter(), Counter(), Counter()]
    for sentence in sentences:
        padded = ["<s>", *sentence, "</s>"]
        for order, grams in enumerate(counts, 1):
            grams.update(zip(*(padded[start:] for start in range(order)), strict=False))
    spoken = counts[0].total() - counts[0][("<s>",)]
    logarithms = {gram: log10(count / spoken) for gram, count in counts[0].items()}
    logarithms[("<s>",)] = -99.0
    tables = [logarithms]
    backoffs: list[dict[tuple[str, ...], float]] = []
    for grams in counts[1:]:
        higher, weights = _discounted(grams, tables[-1])
        tables.append(higher)
        backoffs.append(weights)
    with path.open("w", encoding="utf-8") as file:
        file.write("\\data\\\n")
        file.writelines(f"ngram {order}={len(table)}\n" for order, table in enumerate(tables, 1))
        for order, table in enumerate(tables, 1):
            file.write(f"\n\\{order}-grams:\n")
            for gram in sorted(table):
                weight = backoffs[order - 1].get(gram, 0.0) if order < 3 else None
                end = "" if weight is None else f" {weight:.4f}"
                file.write(f"{table[gram]:.4f} {' '.join(gram)}{end}\n")
        file.write("\n\\end\\\n")


def _discounted(
    grams: _Grams, lower: dict[tuple[str, ...], float]
) -> tuple[dict[tuple[str, ...], float], dict[tuple[str, ...], float]]:
    """log10 of the n-grams' probabilities, interpolated with the shorter ones, and of their histories' back-off
    weights: the mass that was discounted."""
    totals: Counter[tuple[str, ...]] = Counter()
    kinds: Counter[tuple[str, ...]] = Counter()
    for gram, count in grams.items():
        totals[gram[:-1]] += count
        kinds[gram[:-1]] += 1
    kept = {history: _DISCOUNT * kinds[history] / total for history, total in totals.items()}
    logarithms = {}
    for gram, count in grams.items():
        own = (count - _DISCOUNT) / totals[gram[:-1]]
        logarithms[gram] = log10(own + kept[gram[:-1]] * 10 ** lower[gram[1:]])
    return logarithms, {history: log10(mass) for history, mass in kept.items()}
