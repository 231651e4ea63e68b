"""Sentences of a small English grammar over the words of words.txt: each a pure function of (seed, set, number)."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

WORDS = Path(__file__).with_name("words.txt")
Lexicon = Mapping[str, Sequence[str]]

_OPEN = ("names", "people", "things", "animals", "scenes", "adjectives", "verbs", "substances")
"""classes of which some words are kept out of training"""

_KEPT_OUT = 19
"""of so many words of these classes one is never heard in training"""

_SETS = ("train", "heldout", "new_word", "new_voice", "other")


@cache
def lexicon() -> dict[str, tuple[str, ...]]:
    """Class of words -> its entries, with forms joined by "/" (nouns) or "," (verbs)."""
    found: dict[str, list[str]] = {}
    for line in WORDS.read_text(encoding="utf-8").splitlines():
        kind, _, entries = line.partition(": ")
        if not kind.startswith("#"):
            found.setdefault(kind, []).extend(entries.split())
    return {kind: tuple(entries) for kind, entries in found.items()}


@cache
def kept_out() -> frozenset[str]:
    """The words, in all forms and lower case, that no training sentence has."""
    entries = [entry for kind in _OPEN for entry in lexicon()[kind][_KEPT_OUT // 2 :: _KEPT_OUT]]
    return frozenset(form.lower() for entry in entries for form in forms(entry))


def forms(entry: str) -> list[str]:
    return entry.replace("/", ",").split(",")


def words_of(text: str) -> list[str]:
    """A text's words in lower case, without punctuation."""
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def sentences(seed: int, kind: str, avoid: frozenset[str] = frozenset()) -> Iterator[str]:
    """Endless sentences of a set, none twice and none of `avoid`.

    Sentences of "new_word" have exactly one word that is kept out of training, those of "other" any words, all
    others none.
    """
    seen = set(avoid)
    number = 0
    while True:
        generator = np.random.default_rng([seed, _SETS.index(kind), number])
        text = _Sentence(generator, lexicon()).text()
        number += 1
        new = sum(word in kept_out() for word in words_of(text))
        if text not in seen and (kind == "other" or new == (kind == "new_word")):
            seen.add(text)
            yield text


class _Sentence:
    """Draws of one sentence."""

    def __init__(self, generator: np.random.Generator, words: Lexicon):
        self.random = generator.random
        self.generator = generator
        self.words = words

    def text(self) -> str:
        kinds = (
            (0.20, self.plain),
            (0.10, self.with_time),
            (0.10, self.joined),
            (0.08, self.while_),
            (0.10, self.past_question),
            (0.08, self.open_question),
            (0.06, self.address),
            (0.06, self.price),
            (0.04, self.departure),
            (0.06, self.state),
            (0.06, self.list_),
            (0.06, self.motion),
        )
        weights = np.array([weight for weight, _ in kinds])
        drawn = self.generator.choice(len(kinds), p=weights / weights.sum())
        made = kinds[drawn][1]()
        return made[0].upper() + made[1:]

    # Words and phrases

    def one(self, kind: str) -> str:
        entries = self.words[kind]
        return entries[int(self.random() * len(entries))]

    def of(self, *choices: str) -> str:
        return choices[int(self.random() * len(choices))]

    def adjective(self, share: float = 0.35) -> str:
        return f"{self.one('adjectives')} " if self.random() < share else ""

    def singular(self, kind: str) -> str:
        noun = self.one(kind).split("/")[0]
        which = self.of("the", "the", "the", "my", "your", "this", "every", "another")
        return f"{which} {self.adjective()}{noun}"

    def plural(self, kind: str) -> str:
        noun = self.one(kind).split("/")[-1]
        which = self.of("the", "some", "many", "those", self.small_number())
        return f"{which} {self.adjective()}{noun}"

    def noun(self, kind: str) -> str:
        return self.singular(kind) if self.random() < 0.7 else self.plural(kind)

    def subject(self) -> str:
        drawn = self.random()
        if drawn < 0.3:
            return self.one("names")
        if drawn < 0.4:
            return self.of("she", "we", "they", "nobody", "everybody", "somebody")
        return self.noun("animals" if drawn < 0.55 else "people")

    def object(self) -> str:
        drawn = self.random()
        if drawn < 0.12:
            return f"the {self.adjective()}{self.one('substances')}"
        if drawn < 0.2:
            return self.one("names")
        kind = "things" if drawn < 0.75 else "animals" if drawn < 0.88 else "people"
        return self.noun(kind)

    def place(self) -> str:
        if self.random() < 0.3:
            return f"in {self.one('places')}"
        return f"{self.one('near')} the {self.adjective(0.25)}{self.one('scenes')}"

    def verb(self, form: int, kind: str = "verbs") -> str:
        """Form 0 is the base, 1 the past, 2 the one in -ing."""
        return self.one(kind).split(",")[form]

    def small_number(self) -> str:
        return self.words["numbers"][1 + int(self.random() * 19)]

    def number(self) -> str:
        """1 to 999, half of them spelled out."""
        digits = 1 + int(self.random() * self.of_number())
        return str(digits) if self.random() < 0.5 else spelled(digits)

    def of_number(self) -> int:
        return 99 if self.random() < 0.7 else 999

    def when(self) -> str:
        drawn = self.random()
        if drawn < 0.4:
            return f"on {self.one('days')}"
        if drawn < 0.6:
            return f"in {self.one('months')}"
        return f"{self.of('in', 'before', 'after')} the {self.one('times')}"

    def rest(self) -> str:
        drawn = self.random()
        if drawn < 0.35:
            return f" {self.place()}"
        if drawn < 0.5:
            return f" {self.one('adverbs')}"
        return f" {self.when()}" if drawn < 0.6 else ""

    def clause(self) -> str:
        return f"{self.subject()} {self.verb(1)} {self.object()}"

    # Sentences

    def plain(self) -> str:
        return f"{self.clause()}{self.rest()}."

    def with_time(self) -> str:
        opening = self.when() if self.random() < 0.5 else self.place()
        return f"{opening}, {self.clause()}."

    def joined(self) -> str:
        return f"{self.clause()}, {self.of('but', 'and', 'because')} {self.clause()}."

    def while_(self) -> str:
        was = f"{self.one('names')} was {self.verb(2)} {self.object()}"
        return f"{was} {self.of('when', 'while', 'until')} {self.clause()}."

    def past_question(self) -> str:
        return f"{self.of('did', 'will', 'could')} {self.subject()} {self.verb(0)} {self.object()}{self.rest()}?"

    def open_question(self) -> str:
        asked = self.of("where", "when", "why", "how")
        return f"{asked} {self.of('did', 'will', 'should')} {self.subject()} {self.verb(0)} {self.object()}?"

    def address(self) -> str:
        name = self.one("names")
        if self.random() < 0.5:
            return f"{name}, please {self.verb(0)} {self.object()}{self.rest()}."
        return f"thank you, {name}, {self.singular('people')} has {self.verb(2)} to do."

    def price(self) -> str:
        return f"{self.singular('things')} costs {self.number()} {self.of('dollars', 'pounds')}."

    def departure(self) -> str:
        leaves = f"the {self.of('train', 'bus', 'ferry')} to {self.one('places')} leaves"
        return f"{leaves} in {self.number()} minutes, on {self.one('days')}."

    def state(self) -> str:
        is_ = self.of("is", "was", "looks", "seems", "became")
        return f"{self.singular(self.of('things', 'people', 'animals', 'scenes'))} {is_} {self.one('adjectives')}{self.rest()}."

    def list_(self) -> str:
        bought = f"{self.subject()} {self.verb(1)} {self.plural('things')}"
        return f"{bought}, {self.plural('things')} and {self.object()}."

    def motion(self) -> str:
        return f"{self.subject()} {self.verb(1, 'motions')} {self.place()}{self.of('', ' ' + self.one('adverbs'))}."


def spelled(number: int) -> str:
    """1 to 999 in words, as they are said in American English."""
    names = lexicon()["numbers"]
    if number <= 20:
        return names[number - 1]
    if number < 100:
        tens, ones = names[number // 10 + 17], number % 10
        return f"{tens} {names[ones - 1]}" if ones else tens
    rest = f" {spelled(number % 100)}" if number % 100 else ""
    return f"{names[number // 100 - 1]} hundred{rest}"
