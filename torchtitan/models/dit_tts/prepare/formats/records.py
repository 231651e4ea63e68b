"""Records of CSV and TSV files, where a stray quote costs one record and never the ones behind it."""

import csv
import os
import sys
from collections import deque
from collections.abc import Iterator
from typing import TextIO

AUDIO_NAMES = ("audio", "audio_filepath", "audio_path", "path", "file", "file_name", "filename")
# No text of an utterance has as many lines; a quote that is still open then was never closed.
MAX_RECORD_LINES = 64


class _Lines:
    """Lines for a csv.reader, which takes as many as a record has; all but the first can go back."""

    def __init__(self, file: TextIO):
        self._file = file
        self._waiting: deque[str] = deque()
        self.taken: list[str] = []
        self.number = 0  # of the last line taken, from 1

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        if len(self.taken) == MAX_RECORD_LINES:
            raise StopIteration  # the reader's error: the quote is open at the end
        line = self._waiting.popleft() if self._waiting else next(self._file)
        self.taken.append(line)
        self.number += 1
        return line

    def give_back(self) -> None:
        self._waiting.extendleft(reversed(self.taken[1:]))
        self.number -= len(self.taken) - 1


def read_records(
    file: TextIO, tabs: bool
) -> tuple[list[str], Iterator[tuple[int, list[str] | str]]]:
    """(header, records as (number of the first line, fields, or what is wrong)).

    Commas with quotes as RFC 4180 has them; tabs without any, as Common Voice has them: a quote in
    a TSV is a character of the text. After a record that is wrong, reading goes on in its second
    line. The file is opened with newline="".
    """
    csv.field_size_limit(sys.maxsize)
    lines = _Lines(file)
    if tabs:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    else:
        reader = csv.reader(lines, strict=True)
    try:
        header = next(reader, [])
    except csv.Error:
        header = [line.rstrip("\r\n") for line in lines.taken[:1]]
    return header, _records(reader, lines, header)


def _records(reader, lines: _Lines, header: list[str]) -> Iterator[tuple[int, list[str] | str]]:
    while True:
        lines.taken = []
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lines.give_back()
            yield lines.number, f"is not CSV ({error}); mind its quotes"
            continue
        first = lines.number - len(lines.taken) + 1
        if len(lines.taken) > 1 and _swallows_a_record(record, lines.taken, header):
            lines.give_back()
            yield first, "has a quote that goes on over the next record; mind its quotes"
        elif record:
            yield first, record


def _swallows_a_record(record: list[str], taken: list[str], header: list[str]) -> bool:
    """Whether a line within quotes names an audio file of the record's own kind."""
    column = next((n for n, name in enumerate(header) if name in AUDIO_NAMES), None)
    if column is None or column >= len(record):
        return False
    kind = os.path.splitext(record[column])[1]
    for line in taken[1:]:
        fields = line.rstrip("\r\n").split(",")
        if kind and len(fields) >= len(header) and fields[column].endswith(kind):
            return True
    return False
