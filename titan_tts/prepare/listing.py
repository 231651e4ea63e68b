"""The list of a corpus's recordings, checked and cut into chunks.

The list is written once into the work folder and never read in full again: a worker reads its chunk's
lines. Chunks are a function of the list alone, so what depends on them does not depend on workers,
kills or machines.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import xxhash
from tqdm import tqdm

from titan_tts.prepare.formats import Reader, SourceError, unreadable
from titan_tts.prepare.settings import Options
from titan_tts.records.utterance import TRAIN, Unusable, Utterance
from torchtitan.models.dit_tts.data.storage import open_source
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import atomic_file, nfc, path_on_disk
from torchtitan.models.dit_tts.text.phones import Phonemizer, lost_letters_error
from torchtitan.models.dit_tts.text.vocabulary import language_of

ITEMS_NAME, STARTS_NAME, PLAN_NAME = "items.jsonl", "chunk_starts.npy", "plan.json"
SHOWN_PROBLEMS = 20
_KEPT_NAMES = 50  # of the recordings that are left out for a reason


@dataclass
class Plan:
    """Counts of a list. `dropped` counts recordings that are left out before any audio is read."""

    items: int = 0
    chunks: int = 0
    train_items: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    problems: list[list[str]] = field(default_factory=list)  # the first [id, sentence]
    dropped_names: dict[str, list[str]] = field(default_factory=dict)  # the first ids

    def drop(self, reason: str, *names: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        add_names(self.dropped_names, {reason: list(names)} if names else {})


def add_names(to: dict[str, list[str]], more: dict[str, list[str]]) -> None:
    """Reason -> names of recordings; the first of each are kept."""
    for reason, names in more.items():
        to[reason] = [*to.get(reason, []), *names][:_KEPT_NAMES]


def list_items(reader: Reader) -> Iterator[tuple[Utterance | Unusable, int, int]]:
    """Utterances with size and time (ns) of their own file and references, 0 without one.

    An utterance with a missing file or an earlier one's id is unusable.
    """
    seen: set[int] = set()
    for item in reader.items():
        if isinstance(item, Unusable):
            yield item, 0, 0
            continue
        number = xxhash.xxh3_64_intdigest(item.id.encode())
        if number in seen:
            sentence = "is the key of more than one recording; make keys unique"
            yield Unusable(item.id, sentence), 0, 0
        elif "file" in item.audio:
            yield _with_file(reader.root, item)
        else:
            yield item, 0, 0
        seen.add(number)


def _with_file(root: str, item: Utterance) -> tuple[Utterance | Unusable, int, int]:
    size, time = 0, 0
    given = item.reference.files if item.reference else ()
    names = [path_on_disk(root, name) for name in (item.audio["file"], *given)]
    for name in names:
        path = os.path.join(root, name)
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):  # a FIFO or a device may have no end
                raise ValueError("is not a regular file")
        except (OSError, ValueError) as error:  # ValueError: a NUL, or half a surrogate pair
            problem = unreadable(path, error)
            if isinstance(problem, SourceError):
                raise problem from None
            return Unusable(item.id, str(problem)), 0, 0
        size, time = size + status.st_size, max(time, status.st_mtime_ns)
    reference = item.reference and item.reference._replace(files=tuple(names[1:]))
    audio = item.audio | {"file": names[0]}
    return replace(item, audio=audio, reference=reference), size, time


def source_digest(reader: Reader) -> str:
    """A digest of names, sizes and modification times: equal means that nothing was touched.

    For a corpus of single files it covers the texts as well. It covers no absolute path and no
    content of audio, so that it costs a listing, also of many terabytes.
    """
    digest = hashlib.sha256()
    for name, path in reader.files().items():
        with closing(open_source(path)) as file:
            line = f"{name}\0{file.size}\0{file.version}\n"
        digest.update(line.encode("utf-8", "backslashreplace"))
    if not reader.self_contained:
        for item, size, time in list_items(reader):
            line = json.dumps(item) if isinstance(item, Unusable) else item.to_json()
            digest.update(f"{line}\0{size}\0{time}\n".encode())
    return digest.hexdigest()


def is_wanted(item: Utterance, where: str) -> bool:
    """True if the columns have the values of --where; true and false are those of JSON."""
    for column, _, values in (each.partition("=") for each in nfc(where).split(";") if where):
        found = item.labels.get(column.strip())
        text = str(found).lower() if isinstance(found, bool) else str(found)
        if found is None or text not in map(str.strip, values.split(",")):
            return False
    return True


def usable_items(
    reader: Reader, source: str, on_error: str, plan: Plan, where: str = ""
) -> Iterator[Utterance]:
    """Utterances to encode; the others are counted in `plan`, and with `on_error` "raise" refused at the end."""
    gone, missing = os.strerror(errno.ENOENT), 0
    for item, _, _ in list_items(reader):
        if isinstance(item, Unusable):
            plan.drop("undecodable", item.id)
            missing += gone in item.sentence
            if len(plan.problems) < SHOWN_PROBLEMS:
                plan.problems.append([item.id, item.sentence])
        elif not is_wanted(item, where):
            plan.drop("not_wanted")
        elif not item.text.strip():
            plan.drop("empty_text", item.id)
        else:
            plan.items += 1
            plan.train_items += item.split == TRAIN
            yield item
    if on_error == "raise" and plan.problems:
        (key, sentence), *others = plan.problems
        more = plan.dropped["undecodable"] - 1
        same = all(other == sentence or gone in sentence and gone in other for _, other in others)
        shown = "" if same else "".join(f"\n  {key}: {each}" for key, each in others)
        also = f"\n{more} more cannot be used{' for the same reason' if same else ':'}{shown}"
        said = f"{sentence}{also if more else ''}"
        if missing:
            said += f"; paths that are not absolute count from {reader.root}"
        if 2 * missing > plan.items + plan.dropped["undecodable"]:
            raise InputError(f"{source}: {key}: {said}; correct them, or move the list")
        raise unusable(source, key, said)


def unusable(source: str, key: str, problem: object) -> InputError:
    """The error of a recording that cannot be used where none may be left out."""
    return InputError(
        f"{source}: {key}: {problem}; correct it, or leave such recordings out with --on-error skip"
    )


def write_plan(reader: Reader, options: Options, folder: Path) -> Plan:
    """List the corpus into `folder`; plan.json comes last: with it the list is complete."""
    plan = Plan()
    starts: list[int] = []
    items = usable_items(reader, options.source, options.on_error, plan, options.where)
    progress = tqdm(items, "listing", unit="recording", mininterval=1.0)
    language, lost = language_of(options.encoder), {}
    phones = Phonemizer(language) if language else None
    with atomic_file(folder / ITEMS_NAME) as file:
        for number, item in enumerate(progress):
            if number % options.chunk_items == 0:
                starts.append(file.tell())
            file.write(item.to_json().encode() + b"\n")
            if phones and (letters := phones.lost(item.text)):
                lost[item.id] = letters
        if phones and lost:
            raise lost_letters_error("--encoder", phones, lost, plan.items)
        _check_splits(options, plan)
        end = file.tell()
    plan.chunks = len(starts)
    with atomic_file(folder / STARTS_NAME) as file:
        np.save(file, np.array([*starts, end], dtype=np.int64))
    with atomic_file(folder / PLAN_NAME) as file:
        file.write(json.dumps(asdict(plan)).encode())
    return plan


def _check_splits(options: Options, plan: Plan) -> None:
    """Before hours of encoding: a run cannot train without recordings, nor measure without held-out ones."""
    if not plan.train_items and (not plan.items or options.heldout_fraction < 1):
        dropped = ", ".join(f"{n} {reason}" for reason, n in plan.dropped.items()) or "none"
        first = "; {}: {}".format(*plan.problems[0]) if plan.problems else ""
        raise InputError(
            f"{options.source}: holds {plan.items} usable recordings, but none for training (left out: {dropped}{first}); "
            "check the path, the format, the splits and --heldout-fraction, which is 1 for a corpus for tests only"
        )
    by_speaker = options.heldout_by == "speaker"
    if (options.heldout_fraction or by_speaker) and plan.train_items == plan.items:
        raise InputError(
            f"{options.source}: --heldout-by {options.heldout_by} with --heldout-fraction = "
            f"{options.heldout_fraction:g} holds nothing out; give a larger fraction or another --seed, or leave both out"
        )


def read_plan(folder: Path) -> Plan | None:
    """The plan of a work folder, or None where listing was not finished."""
    try:
        return Plan(**json.loads((folder / PLAN_NAME).read_text()))
    except FileNotFoundError:
        return None


def items_of_chunk(folder: Path, number: int) -> list[Utterance]:
    starts = np.load(folder / STARTS_NAME, mmap_mode="r")
    with open(folder / ITEMS_NAME, "rb") as file:
        file.seek(int(starts[number]))
        lines = file.read(int(starts[number + 1] - starts[number]))
    return [Utterance.from_json(line) for line in lines.splitlines()]
