"""The sentences of the base voice: plain English of wide vocabulary, under free licences.

From the Debian packages `fortunes` (BSD licence) and `wordnet-base` (WordNet's examples of use, WordNet 3.0 licence),
and sentences with numbers, dates, names and spelled letters that are made here.
"""

import random
import re
from calendar import month_name
from collections.abc import Iterator
from pathlib import Path
from string import ascii_uppercase

from torchtitan.models.dit_tts.errors import require

FORTUNES = Path("/usr/share/games/fortunes")
WORDNET = Path("/usr/share/wordnet")
HELDOUT = 200
MADE = 1500

# Words, and commas, apostrophes and hyphens between them: whatever else stands in a fortune (tables, dialogues, sums)
# is read differently by each synthesizer.
_PLAIN = re.compile(r"[A-Z][a-z]*(?:,? [A-Za-z]+(?:['-][a-z]+)*){2,}[.!?]")
_CUT = re.compile(r"\b(?:Capt|Dr|Jr|Mrs?|Sr|St)\.$")
_EXAMPLE = re.compile(r'"([^"]+)"')
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")

_NAMES = (
    "Anna Ben Clara David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nathan Olivia Peter Quentin Rachel Samuel "
    "Teresa Ursula Victor Wendy Xavier Yvonne Zachary Johnson Taylor Miller Thompson Garcia Martin London Paris Berlin "
    "Chicago Boston Sydney Toronto Dublin Madrid Tokyo"
).split()
_THINGS = (
    "books apples tickets letters miles dollars pounds people houses pages minutes days".split()
)
_FRAMES = (
    "{name} has {number} {things}.",
    "Is it true that {name} paid {number} dollars for {small} {things}?",
    "The train to {name} leaves at {hour} {minute}.",
    "On {month} {day}, {name} met {other}.",
    "It was {month} {day}, {year}.",
    "Call {digit} {digit} {digit}, {digit} {digit} {digit} {digit}.",
    "About {percent} percent of the {things} are new.",
    "My name is {name}, and I am {age} years old.",
    "{name}, where did you put the {number} {things}?",
    "{number}, {small}, {age}, {percent}.",
    "Hello, {name}!",
    "Good morning, {name}. How are you today?",
    "Why would {name} ask {other} for {small} {things}?",
    "The letters are {letter}, {letter}, {letter} and {letter}.",
)
_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
).split()


def spelled(number: int) -> str:
    """A number below a million in words."""
    if number < 20:
        return _NUMBERS[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return _NUMBERS[18 + tens] + (f"-{_NUMBERS[rest]}" if rest else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    high, rest = divmod(number, size)
    return f"{spelled(high)} {name}" + (f" {spelled(rest)}" if rest else "")


def made_sentences(n: int, seed: int) -> Iterator[str]:
    """Sentences with what is rare in prose: numbers, times, dates, names and single letters, all in words."""
    draw = random.Random(seed)
    for index in range(n):
        frame = _FRAMES[index % len(_FRAMES)]
        frame = re.sub("{letter}", lambda _: draw.choice(ascii_uppercase), frame)
        frame = re.sub("{digit}", lambda _: spelled(draw.randrange(10)), frame)
        minute = draw.randrange(60)
        words = {
            "name": draw.choice(_NAMES),
            "other": draw.choice(_NAMES),
            "number": spelled(round(10 ** draw.uniform(0, 5))),
            "small": spelled(draw.randrange(2, 20)),
            "things": draw.choice(_THINGS),
            "hour": spelled(draw.randrange(1, 13)),
            "minute": spelled(minute) if minute > 9 else f"oh {spelled(minute)}",
            "month": draw.choice(month_name[1:]),
            "day": spelled(draw.randrange(1, 32)),
            "year": f"{draw.choice(['nineteen', 'eighteen', 'twenty'])} {spelled(draw.randrange(10, 100))}",
            "percent": spelled(draw.randrange(1, 100)),
            "age": spelled(draw.randrange(18, 90)),
        }
        sentence = frame.format(**words)
        yield sentence[0].upper() + sentence[1:]


def fortunes(folder: Path) -> Iterator[str]:
    """Sentences of the files in a folder of the package `fortunes`, or of its other languages."""
    for path in sorted(folder.glob("*.u8")):
        for fortune in path.read_text("utf-8", errors="replace").split("\n%\n"):
            body = re.split(r"\n\s*--", fortune)[0]
            yield from re.split(r"(?<=[.!?])\s+", " ".join(body.split()))


def _wordnet_examples() -> Iterator[str]:
    for path in sorted(WORDNET.glob("data.*")):
        for line in path.read_text("utf-8").splitlines():
            _, _, gloss = line.partition(" | ")
            for example in _EXAMPLE.findall(gloss):
                sentence = example[0].upper() + example[1:].rstrip(" .,;")
                yield sentence + ("" if sentence[-1] in "!?" else ".")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return [word.lower() for word in _WORD.findall(text)]


def corpus_texts(seed: int, longest_words: int = 18) -> tuple[list[str], list[str]]:
    """(training, held-out) sentences of at most so many words, without repetition, in an order drawn by the seed."""
    for folder, package in ((FORTUNES, "fortunes"), (WORDNET, "wordnet-base")):
        require(folder.is_dir(), f"{folder} is missing; install it (apt-get install {package})")
    found: dict[str, str] = {}
    plain = filter(_PLAIN.fullmatch, (*fortunes(FORTUNES), *_wordnet_examples()))
    for sentence in (*plain, *made_sentences(MADE, seed)):
        words = words_of(sentence)
        if len(words) <= longest_words and max(map(len, words)) <= 16:
            found.setdefault(" ".join(words), sentence)
    sentences = sorted(found.values())
    random.Random(seed).shuffle(sentences)
    # A sentence that the split above cut behind "Mr." goes here, so that those held out stay the shipped voice's.
    training = [sentence for sentence in sentences[HELDOUT:] if not _CUT.search(sentence)]
    return training, sentences[:HELDOUT]
