"""Rewrites the English that wetext's grammar reads wrongly, such as "the 1990s", "Dr. Smith" and "£2.99"."""

import re
from collections.abc import Callable

VERSION = 2
"""of the rules; stored counts of tokens depend on it"""

CUT = "\v"
"""where a text is cut, so that the grammar reads its parts one by one; it is not said"""

_Match = re.Match[str]

# An underscore is a blank of the words.
_BEFORE_NAMES = "Dr=Doctor Mr=Mister Mrs=Missus Ms=Miz Prof=Professor Mt=Mount"
_DOTTED_BEFORE_NAMES = (
    "Gen=General Col=Colonel Capt=Captain Lt=Lieutenant Sgt=Sergeant Rev=Reverend Gov=Governor Sen=Senator "
    "Ft=Fort"
)
_NEVER_LAST = "vs=versus approx=approximately e.g=for_example i.e=that_is Vol=Volume Fig=Figure"
_LAST_TOO = (
    "etc=et_cetera Ave=Avenue Rd=Road St=Street Jr=Junior Sr=Senior Inc=Incorporated Ltd=Limited Co=Company "
    "Corp=Corporation hrs=hours min=minutes Jan=January Feb=February Aug=August Sept=September Oct=October "
    "Nov=November Dec=December"
)
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_KINGS = (
    "Benedict|Catherine|Charles|Edward|Elizabeth|Frederick|George|Henry|James|Louis|Nicholas|Philip|Pius|Richard|"
    "William"
)
_PARTS = "Act|Article|Book|Chapter|Class|Part|Phase|Scene|Section|Type|Volume|War"
_CENTS = {"$": ("cent", "cents"), "€": ("cent", "cents"), "£": ("penny", "pence")}
_ROMAN = {"I": 1, "V": 5, "X": 10}

_tables = " ".join((_BEFORE_NAMES, _DOTTED_BEFORE_NAMES, _NEVER_LAST, _LAST_TOO)).split()
_SPOKEN = {short: words.replace("_", " ") for short, words in (each.split("=") for each in _tables)}


def _any_of(table: str) -> str:
    return "(" + "|".join(re.escape(each.partition("=")[0]) for each in table.split()) + ")"


def _short(found: _Match) -> str:
    return _SPOKEN[found[1]]


def _ordinal(number: str) -> str:
    """21 -> 21st"""
    suffix = {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")
    return number + ("th" if number[-2:-1] == "1" else suffix)


def _day(found: _Match) -> str:
    return f"{found[1]} {CUT}{_ordinal(found[2])}"


def _money(found: _Match) -> str:
    sign, whole, cents = found[1], found[2], int(found[3])
    small = f"{cents} {_CENTS[sign][cents != 1]}"
    if not cents:
        return sign + whole
    return small if whole == "0" else f"{sign}{whole} and {small}"


def _telephone(found: _Match) -> str:
    """Digit by digit, with a pause between groups."""
    groups = re.findall(r"\d+", found[0])
    return "plus " * ("+" in found[0]) + ", ".join(map(" ".join, groups))


def _number(roman: str) -> str:
    values = [_ROMAN[letter] for letter in roman]
    pairs = zip(values, [*values[1:], 0], strict=True)
    return str(sum(-each if each < after else each for each, after in pairs))


def _numbered(found: _Match) -> str:
    return f"{found[1]} {_number(found[2])}"


def _king(found: _Match) -> str:
    return f"{found[1]} the {_ordinal(_number(found[2]))}"


_END = r"(?=\s*$|\s+[A-Z])"
_NUMERAL = r"(X{0,3}(?:IX|IV|VI{0,3}|I{1,3})|X{1,3})\b"
_GROUPS = (
    r"\+\d{1,3}(?:[ -]\d{2,4}){2,5}|0\d{2,4}(?:[ -]\d{3,4}){1,3}|(?:1-)?(?:\d{3}-)?\d{3}-\d{4}"
)

# Each sees what those before it wrote.
_RULES: list[tuple[str, str | Callable[[_Match], str]]] = [
    (rf"\b{_any_of(_BEFORE_NAMES)}\.?(?=\s(?:and\s)?[A-Z])", _short),
    (rf"\b{_any_of(_DOTTED_BEFORE_NAMES)}\.(?=\s[A-Z])", _short),
    (rf"\b{_any_of(_NEVER_LAST)}\.(?=[\s,])", _short),
    # "on Elm St. She", but "in St. Louis" and "Visit St. Paul".
    (rf"(?<=\w )([A-Z][a-z]+|\d+(?:st|nd|rd|th)) St(?=\.{_END})", r"\1 Street"),
    (r"\bSt\.?(?=\s[A-Z])", "Saint"),
    (rf"\b{_any_of(_LAST_TOO)}(?=\.{_END})", _short),
    (rf"\b{_any_of(_LAST_TOO)}\.(?!\w)(?!{_END})", _short),
    (rf"(\d ?[ap])\.m\.{_END}", r"\1m."),
    (r"\bNo\. ?(?=\d)|#(?=\d)", "number "),
    (rf"\b({_KINGS}) (?!I\b){_NUMERAL}", _king),
    (rf"\b({_PARTS}|[A-Z][a-z]+(?! [IVX]\b)) {_NUMERAL}", _numbered),
    (rf"\b({_MONTHS}) (\d\d?)(?:st|nd|rd|th)?\b(?![:.,]\d)", _day),
    (rf"(?<![\w+-])(?:{_GROUPS})(?![\w-])", _telephone),
    (r"(?<![\w.,])(\d[\d.,]*) ?([€£])(?!\d)", r"\2\1"),
    (r"([$£€])(\d[\d,]*)\.(\d\d)\b(?! ?(?:[mb]n?|k|[mbtr]+illion)\b)", _money),
    (r"(?<![\d-])(1\d{3}|20\d\d) ?[-–] ?(\d\d|\d{4})(?![\w–-])", r"\1 to \2"),
    (r"(?<=\d) ?– ?(?=[$£€]?\d)", " to "),
    (r"\b(1\d|20)([1-9]0)['’]?s\b", r"\1 '\2s"),
    (r"\b(1[1-9])00['’]?s\b", r"\1 hundreds"),
    (r"(?<=\d) ?(?=[½¼¾])", " and "),
    (r"(?<![\w.,-])1(00\d)(?!\w|[.,:-]\d)", r"1,\1"),
    (r"(?<![\w.,$£€-])(1[1-9])0([1-9])(?!\w|[.,:-]\d)", r"\1 oh \2"),
    (r"(?<=\d)['’′] ?(\d\d?)(?:\"|″|”)?(?!\w)", r" foot \1"),
    (r"(?<![$£€\d.,])(\d[\d.,]*) ?m\b(?!['’.]\w)", r"\1 metres"),
    (r"(?<=\d) ?[x×] ?(?=\d)", " by "),
    (r"\b(24|9)/(7|11)\b(?!/)", r"\1 \2"),
    (r"(?<=\d)(st|nd|rd|th)-(?=[a-z])", r"\1 "),
    (r"(?<!\w)\+(?=\d)", "plus "),
    (r"~ ?(?=\d)", "about "),
]
_COMPILED = [(re.compile(pattern), by) for pattern, by in _RULES]

_BEFORE_THOUSAND = r"ten|eleven|twelve|\w+teen|\w+ty|one|two|three|four|five|six|seven|eight|nine"
_THOUSAND = re.compile(rf"\b(?:({_BEFORE_THOUSAND}|hundred) )?thousand\b")


def prepared(text: str) -> str:
    """Returns the text as the grammar reads it rightly."""
    for pattern, by in _COMPILED:
        text = pattern.sub(by, text)
    return text


def mended(said: str) -> str:
    """Mends what the grammar wrote: of 1,000 it says "thousand"."""
    return _THOUSAND.sub(lambda found: found[0] if found[1] else "one thousand", said)
