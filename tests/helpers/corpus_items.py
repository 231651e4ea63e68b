"""What the readers of prepare list of a corpus, and small files for them."""

from pathlib import Path

import pyarrow
import soundfile
from pyarrow import parquet

from tests.helpers import speech_corpora as corpora
from titan_tts.prepare.formats import open_corpus
from titan_tts.prepare.listing import Plan, list_items, usable_items
from titan_tts.prepare.settings import Options
from titan_tts.records.utterance import Unusable, Utterance


def listed(source: Path | str, **options) -> list[Utterance | Unusable]:
    return [item for item, *_ in list_items(open_corpus(Options(str(source), "", **options)))]


def items_of(source: Path | str, **options) -> list[Utterance]:
    reader = open_corpus(Options(str(source), "", **options))
    return list(usable_items(reader, str(source), "raise", Plan()))


def problems_of(source: Path | str) -> list[Unusable]:
    return [one for one in listed(source) if isinstance(one, Unusable)]


def write_tone(path: Path, seconds: float = 0.1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, corpora.tone(seconds), 16_000)


def table_of(tmp_path: Path, **columns: object) -> Path:
    rows = {"text": ["x"], "speaker": ["s"]} | columns
    parquet.write_table(pyarrow.table(rows), tmp_path / "t.parquet")
    return tmp_path / "t.parquet"
