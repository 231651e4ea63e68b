"""The meaning of each token id: text units, then conditioning tokens. A pure function of the data.

The order of the ids, in which a text unit's id does not depend on the conditioning:

    0 padding, 1 begin, 2 end
    bytes: 3 .. 258, byte b is b + 3
    chars, phones: 3 an unknown character, then the characters of the data, or of its phones, by code point
    the added tokens, in the config's order
    for each conditioning field in the config's order: its unknown token, then its values

Subwords of a pretrained encoder have its tokenizer's ids, which include special tokens and padding.
The added and the conditioning tokens come after the rows of its embedding.

Conditioning tokens exist as ids only. The letters "<speaker:slt>" in a text stay letters.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.bounded import parse_json
from torchtitan.models.dit_tts.config.job_config import LEARNED_UNITS, PHONES, is_pretrained
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.text.conventions import NORMALIZERS

SUBWORDS = "subwords"
"""unit of every pretrained encoder; [encoder] model names the encoder instead"""

UNITS = (*LEARNED_UNITS, SUBWORDS)

BYTE_VOCAB_SIZE = 3 + 256
"""ids of the byte tokenizer: padding, begin, end, and the 256 bytes"""

PAD_ID, BEGIN_ID, END_ID = 0, 1, 2
FIRST_BYTE_ID = 3
UNKNOWN_CHARACTER_ID = 3
FIRST_CHARACTER_ID = 4

_NEW = "start a new [job] experiment that loads none of its weights"
_MAX_BINS = 1_000_000
_VERSION = 1
_OPTIONS = ("language", "added", "convention", "normalize")

# So that 0.3 s in bins of 0.1 s is bin 3 and not, by rounding of the division, bin 2.
_BIN_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Subwords:
    """The ids of text of a pretrained encoder.

    Attributes:
        base: rows of the encoder's embedding; the tokenizer may use fewer.
        text_fingerprint: of the tokenizer alone.
        pad_id: the model's own; a mask hides it.
        model: the [encoder] model that has these ids.
    """

    base: int
    text_fingerprint: str
    pad_id: int = field(default=0, compare=False)
    model: str = field(default="", compare=False)


@dataclass(frozen=True)
class Vocabulary:
    """The units of text and the conditioning fields with their values.

    Attributes:
        unit: one of UNITS.
        characters: for "chars" and "phones": the known ones, ascending by code point, each once.
        conditioning: fields in the order of their tokens, with their known values; for duration the numbers of the bins.
        duration_token_seconds: width of a duration bin; 0 without the duration field.
        subwords: for the unit "subwords".
        language: for "phones", espeak-ng's name of it.
        added, convention, normalize: [encoder] added_tokens, convention and normalize.
    """

    unit: str = "bytes"
    characters: str = ""
    conditioning: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    duration_token_seconds: float = 0.0
    subwords: Subwords | None = None
    language: str = ""
    added: tuple[str, ...] = ()
    convention: str = ""
    normalize: str = ""

    @property
    def model(self) -> str:
        """[encoder] model that has these units."""
        if self.subwords:
            return self.subwords.model
        return f"{self.unit}:{self.language}" if self.language else self.unit

    @property
    def is_learned(self) -> bool:
        """True if the rows of text are learned with the model, not beforehand."""
        return not is_pretrained(self.model)

    @property
    def first_added_id(self) -> int:
        """1 + the last id of text; of a pretrained encoder's, too."""
        if self.subwords:
            return self.subwords.base
        if self.unit == "bytes":
            return BYTE_VOCAB_SIZE
        return FIRST_CHARACTER_ID + len(self.characters)

    @property
    def size(self) -> int:
        """Number of ids."""
        conditions = sum(1 + len(values) for values in self.conditioning.values())
        return self.first_added_id + len(self.added) + conditions

    @property
    def fingerprint(self) -> str:
        """Equal for equal ids of equal meaning."""
        return hashlib.sha256(json.dumps(_contents(self)).encode()).hexdigest()[:16]

    def unknown_ids(self) -> dict[str, int]:
        """The id of each field's unknown token. The field's values follow it."""
        sizes = [1 + len(values) for values in self.conditioning.values()]
        firsts = accumulate(sizes, initial=self.first_added_id + len(self.added))
        return dict(zip(self.conditioning, firsts))

    def duration_bin(self, seconds: float) -> str:
        """The number of a duration's bin, as the field's value. The last bin is open."""
        last = len(self.conditioning["duration"]) - 1
        return str(int(min(seconds / self.duration_token_seconds + _BIN_TOLERANCE, last)))

    def describe(self) -> str:
        """One line for the log."""
        parts = [f"{self.first_added_id} of {self.model}"]
        parts += [f"{len(self.added)} added tokens"] if self.added else []
        parts += [f"{len(values)} values of {name}" for name, values in self.conditioning.items()]
        return f"{self.size} ids: " + ", ".join(parts)


def make_vocabulary(
    unit: str,
    characters: Iterable[str] = "",
    conditioning: Sequence[str] = (),
    values: Mapping[str, Iterable[str]] | None = None,
    *,
    duration_token_seconds: float = 0.5,
    max_seconds: float = 0.0,
    **options: Any,
) -> Vocabulary:
    """The vocabulary of some data, the same whatever the order of its samples.

    Args, others as in `Vocabulary`:
        characters: of the texts or their phones; "bytes" does not read them.
        values: the values of each field but duration.
        max_seconds: the longest duration with a bin of its own; longer ones have the last.
    """
    fields = {}
    for name in conditioning:
        if name == "duration":
            bins = math.ceil(max_seconds / duration_token_seconds - _BIN_TOLERANCE)
            fields[name] = tuple(map(str, range(max(1, bins))))
            continue
        fields[name] = tuple(sorted(set((values or {}).get(name, ()))))
        if not fields[name]:
            raise InputError(
                f"[data] conditioning has {name!r}, but no sample of [data] path has it in its JSON; take it out"
            )
    known = "" if unit in ("bytes", SUBWORDS) else "".join(sorted(set(characters)))
    if unit in ("chars", PHONES) and not known:
        raise InputError(f"[encoder] model = {unit!r}, but all texts of [data] path are empty")
    width = duration_token_seconds if "duration" in fields else 0.0
    return Vocabulary(unit, known, fields, width, **options)


def unit_of(model: str) -> str:
    """The unit of text that [encoder] model has."""
    return SUBWORDS if is_pretrained(model) else model.partition(":")[0]


def language_of(model: str) -> str:
    """The language of the phones that [encoder] model has; empty for other units."""
    return model.partition(":")[2] if unit_of(model) == PHONES else ""


def check_covers(run: Vocabulary, data: Vocabulary, where: str, may_grow: bool = False) -> None:
    """Raises InputError unless every token of the config and its data is one of `run`'s, the vocabulary that the weights
    of `where` were trained with. `may_grow`: tokens beyond those are allowed, and phones of another language."""
    kinds = [(each.unit, each.language, each.is_learned) for each in (data, run)]
    moves = may_grow and moved(run, data)
    for key, wanted, had in (
        # Another name of the same tokenizer will do.
        ("[encoder] model", run.model if moves or kinds[0] == kinds[1] else data.model, run.model),
        ("[encoder] convention", data.convention, run.convention),
        ("[encoder] normalize", run.normalize if moves else data.normalize, run.normalize),
        ("[data] conditioning", list(data.conditioning), list(run.conditioning)),
        ("[data] duration_token_seconds", data.duration_token_seconds, run.duration_token_seconds),
    ):
        if wanted != had:
            raise InputError(
                f"{key} = {wanted!r}, but {where} was trained with {had!r}; set it back, or {_NEW}"
            )
    if not may_grow and (missing := missing_tokens(run, data)):
        raise InputError(
            f"[data] path or [encoder] added_tokens has {missing} that {where} was not trained with; restore its data, "
            "or start a new [job] experiment from its weights ([checkpoint] initial_load_path)"
        )


def moved(run: Vocabulary, data: Vocabulary) -> bool:
    """True where both have phones, of different languages, which share their letters."""
    return run.unit == data.unit == PHONES and run.language != data.language


def missing_tokens(run: Vocabulary, data: Vocabulary) -> str:
    """The tokens of `data` that `run` lacks, in words; empty if there are none."""
    found = {
        "characters": set(data.characters) - set(run.characters),
        "added tokens": set(data.added) - set(run.added),
    }
    for name, had in run.conditioning.items():
        if name != "duration":  # its last bin is open, so a higher max_frames needs no new ones
            found[f"values of {name!r}"] = set(data.conditioning.get(name, ())) - set(had)
    return ", ".join(
        f"{len(missing)} {kind} ({named(sorted(missing))})"
        for kind, missing in found.items()
        if missing
    )


def grown(run: Vocabulary, data: Vocabulary) -> Vocabulary:
    """`run` with the tokens that only `data` has, and its language. Both have the same units and conditioning fields."""
    fields = {
        name: had if name == "duration" else tuple(sorted({*had, *data.conditioning[name]}))
        for name, had in run.conditioning.items()
    }
    characters = "".join(sorted({*run.characters, *data.characters}))
    added = tuple(dict.fromkeys((*run.added, *data.added)))
    run = replace(run, language=data.language, normalize=data.normalize)
    return replace(run, characters=characters, conditioning=fields, added=added)


def read_in(run: Vocabulary, model: str) -> Vocabulary:
    """`run`, whose texts are read as the phones of `model`, "phones:LANGUAGE": it may know the letters of more languages
    than its own. [encoder] normalize is of its own and goes."""
    other = replace(run, language=language_of(model))
    require(
        bool(run.language),
        f"--encoder = {model!r}, but this model reads {run.model}, not phones; leave it out",
    )
    return replace(other, normalize="") if moved(run, other) else run


def rows_in(run: Vocabulary, new: Vocabulary) -> np.ndarray:
    """(rows,) int64: for each row of the learned embedding of `new` the row of `run`'s with the same meaning. A new
    character or value begins as the unknown one, a new token without any is -1. A pretrained encoder's own ids are not
    in it."""
    known = {meaning: row for row, meaning in enumerate(_meanings(run))}
    found = (known.get(each, known.get((each[0], None), -1)) for each in _meanings(new))
    return np.fromiter(found, np.int64)


def _meanings(vocabulary: Vocabulary) -> list[tuple[str, str | None]]:
    """(kind, value) of each row of the learned embedding."""
    found: list[tuple[str, str | None]] = []
    if vocabulary.subwords and vocabulary.is_learned:
        found = [("subword", str(number)) for number in range(vocabulary.subwords.base)]
    elif vocabulary.subwords is None:
        found = [("special", str(number)) for number in range(FIRST_BYTE_ID)]
        if vocabulary.unit == "bytes":
            found += [("byte", str(number)) for number in range(256)]
        else:
            found += [("character", each) for each in (None, *vocabulary.characters)]
    found += [("added", token) for token in vocabulary.added]
    for name, values in vocabulary.conditioning.items():
        found += [(f"field {name}", each) for each in (None, *values)]
    return found


def named(values: Sequence[str], count: int = 5) -> str:
    """The first values in quotes, and how many more there are."""
    more = f" and {len(values) - count} more" if len(values) > count else ""
    return ", ".join(map(repr, values[:count])) + more


def to_json(vocabulary: Vocabulary) -> str:
    """The content of a run's tokenizer.json."""
    contents = _contents(vocabulary)
    contents |= {"vocab_size": vocabulary.size, "fingerprint": vocabulary.fingerprint}
    if vocabulary.subwords:
        contents["model"] = vocabulary.model
    text = json.dumps(contents, indent=2, ensure_ascii=False) + "\n"
    # A value may have half of a surrogate pair, which only an escape can store.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def from_json(text: str, where: str) -> Vocabulary:
    """The vocabulary that `to_json` wrote. `where`: the file, for messages."""
    try:
        contents = parse_json(text, half_pairs=True)
        fields: dict[str, tuple[str, ...]] = {}
        width = 0.0
        for entry in contents["conditioning"]:
            if entry["field"] == "duration":
                if not 0 <= entry["bins"] < _MAX_BINS:
                    raise ValueError(f"{entry['bins']} bins of duration")
                fields["duration"] = tuple(map(str, range(entry["bins"])))
                width = entry["bin_seconds"]
            else:
                fields[entry["field"]] = tuple(entry["values"])
        options = {name: contents[name] for name in _OPTIONS if name in contents}
        options["added"] = tuple(options.get("added", ()))
        if contents["unit"] == SUBWORDS:
            options["subwords"] = Subwords(**contents["subwords"], model=contents["model"])
        units = contents["unit"], contents["characters"]
        vocabulary = Vocabulary(*units, fields, width, **options)
        found = (contents["version"], contents["fingerprint"], contents["vocab_size"])
    except (ValueError, KeyError, TypeError, ArithmeticError, AttributeError) as error:
        raise InputError(
            f"{where} cannot be read as a tokenizer ({type(error).__name__}: {error}); restore the run's file"
        ) from error
    known = vocabulary.unit in UNITS and vocabulary.convention in NORMALIZERS
    if found != (_VERSION, vocabulary.fingerprint, vocabulary.size) or not known:
        raise InputError(
            f"{where} was changed after the run wrote it, or another version of this program wrote it; restore it"
        )
    return vocabulary


def _contents(vocabulary: Vocabulary) -> dict[str, Any]:
    """Everything that the ids depend on."""
    fields: list[dict[str, Any]] = []
    for name, values in vocabulary.conditioning.items():
        if name == "duration":
            seconds = vocabulary.duration_token_seconds
            fields.append({"field": name, "bin_seconds": seconds, "bins": len(values)})
        else:
            fields.append({"field": name, "values": list(values)})
    units = {"unit": vocabulary.unit, "characters": vocabulary.characters}
    contents = {"version": _VERSION, **units, "conditioning": fields}
    # Only where they are set: the fingerprints of earlier runs lack them.
    contents |= {name: value for name in _OPTIONS if (value := getattr(vocabulary, name))}
    if vocabulary.subwords:
        subwords = asdict(vocabulary.subwords)
        contents["subwords"] = {name: subwords[name] for name in subwords if name != "model"}
    return contents
