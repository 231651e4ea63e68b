"""The embedded recordings in the layouts that corpora come in: real speech, written small."""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

from titan_tts.prepare.audio_reader import Loader, Recording
from titan_tts.prepare.formats import open_corpus
from titan_tts.prepare.listing import Plan, usable_items
from titan_tts.prepare.pipeline import prepare_corpus
from titan_tts.prepare.settings import AudioSettings, Options
from titan_tts.records.utterance import Utterance
from torchtitan.models.dit_tts.speech.audio import to_mono

CORPUS = Path(__file__).parents[2] / "assets/spoken_digits/spoken_digits.tar"
RATE = 16_000
CHANNELS = 128
AS_IS = AudioSettings(loudness=None, max_silence=None)


def prepare(source: Path | str, output: Path | str, **options) -> dict:
    """The record of a preparation in this process."""
    options = {"workers": 1, "device": "cpu"} | options
    return prepare_corpus(Options(str(source), str(output), **options))


def tone(seconds: float, level: float = 0.1, rate: int = RATE, hertz: float = 997) -> np.ndarray:
    """(n,) float32."""
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


@dataclass(frozen=True)
class Speech:
    """One utterance of a corpus."""

    key: str
    text: str
    speaker: str
    split: str
    samples: np.ndarray  # (n,) float32 at 16 kHz, as all corpora of the tests


def read_corpus(
    path: Path = CORPUS, wanted: Callable[[Utterance], bool] = lambda item: True
) -> Iterator[Speech]:
    """The wanted recordings of a tar in their order."""
    reader = open_corpus(Options(str(path), "", format="webdataset"))
    loader = Loader(reader.root, reader.files())
    for item in filter(wanted, usable_items(reader, str(path), "raise", Plan())):
        found = loader.load(item.audio, 0)
        assert isinstance(found, Recording) and found.rate == RATE
        yield Speech(item.id, item.text, item.speaker, item.split, to_mono(found.samples))


def speech(each: int = 3, voices: tuple[str, ...] = ("slt", "rms", "awb", "kal16")) -> list[Speech]:
    """For each voice, the last `each` training utterances (five words long) and a held-out one."""

    def wanted(item: Utterance) -> bool:
        number = int(item.id.rsplit("-", 1)[1])
        is_of_them = number == 0 if item.split == "heldout" else number >= 600 - each
        return item.speaker in voices and is_of_them

    return list(read_corpus(CORPUS, wanted))


def heldout() -> Iterator[Speech]:
    """The held-out recordings of the embedded corpus."""
    return read_corpus(CORPUS, lambda item: item.split == "heldout")


def audio_bytes(samples: np.ndarray, rate: int, format: str, subtype: str | None = None) -> bytes:
    """An audio file's content, of samples (n,) or (n, channels)."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()


def write_tones(folder: Path, keys: Iterable[str], seconds: float = 0.2, **columns: str) -> Path:
    """list.jsonl with a tone for each key, no two of one pitch; `columns` are the same in all rows."""
    folder.mkdir(exist_ok=True)
    rows = []
    for number, key in enumerate(keys):
        soundfile.write(folder / f"{key}.wav", tone(seconds, hertz=100 + 50 * number), RATE)
        rows.append({"audio": f"{key}.wav", "text": f"text {number}"} | columns)
    (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "list.jsonl"


def write_ljspeech(folder: Path, utterances: list[Speech]) -> Path:
    """metadata.csv and wavs/, 16-bit."""
    (folder / "wavs").mkdir(parents=True)
    lines = []
    for one in utterances:
        soundfile.write(folder / "wavs" / f"{one.key}.wav", one.samples, RATE, subtype="PCM_16")
        lines.append(f'{one.key}|"{one.text}", said in figures|{one.text}\n')
    (folder / "metadata.csv").write_text("".join(lines))
    return folder


def write_libritts_r(folder: Path, utterances: list[Speech]) -> Path:
    """SUBSET/SPEAKER/CHAPTER/UTT.wav at 24 kHz with its texts; held-out ones in dev-clean."""
    for number, one in enumerate(utterances):
        subset = "train-clean-100" if one.split == "train" else "dev-clean"
        chapter = folder / subset / one.speaker / "7"
        chapter.mkdir(parents=True, exist_ok=True)
        stem = f"{one.speaker}_7_{number:06d}_000000"
        samples = soxr.resample(one.samples, RATE, 24_000)
        soundfile.write(chapter / f"{stem}.wav", samples, 24_000, subtype="PCM_16")
        (chapter / f"{stem}.normalized.txt").write_text(one.text)
        (chapter / f"{stem}.original.txt").write_text(one.text.upper())
    return folder


def write_manifest(folder: Path, utterances: list[Speech]) -> Path:
    """manifest.tsv beside 44.1 kHz stereo flac, the right channel at half the level."""
    (folder / "audio").mkdir(parents=True)
    lines = ["path\tsentence\tclient_id\tsplit\tlocale\tgender\n"]
    for one in utterances:
        left = soxr.resample(one.samples, RATE, 44_100)
        name = f"audio/{one.key}.flac"
        soundfile.write(folder / name, np.stack([left, left / 2], axis=1), 44_100, subtype="PCM_24")
        split = "train" if one.split == "train" else "test"
        lines.append(f"{name}\t{one.text}\t{one.speaker}\t{split}\ten\tunknown\n")
    path = folder / "validated.tsv"
    path.write_text("".join(lines))
    return path


def write_webdataset(folder: Path, utterances: list[Speech]) -> Path:
    """Two tars by webdataset's own writer: mp3 with a JSON, opus with JSON and text apart."""
    import webdataset

    folder.mkdir(parents=True)
    half = len(utterances) // 2
    for name, part, suffix in (("a", utterances[:half], "mp3"), ("b", utterances[half:], "opus")):
        with webdataset.TarWriter(str(folder / f"{name}.tar")) as writer:
            for one in part:
                row = {"speaker": one.speaker, "split": one.split, "mood": "calm"}
                sample: dict[str, object] = {"__key__": one.key}
                if suffix == "mp3":
                    row["text"] = one.text
                    sample["mp3"] = audio_bytes(one.samples, RATE, "MP3")
                else:
                    sample["txt"] = one.text
                    sample["opus"] = audio_bytes(one.samples, RATE, "OGG", "OPUS")
                writer.write(sample | {"json": json.dumps(row).encode()})
    return folder


def write_parquet(folder: Path, utterances: list[Speech]) -> Path:
    """A table with Hugging Face's audio structs (flac bytes), in row groups of five."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True)
    rows = []
    for number, one in enumerate(utterances):
        content = audio_bytes(one.samples, RATE, "FLAC", "PCM_16")
        row = {"audio": {"bytes": content, "path": f"{one.key}.flac"}, "text": one.text}
        speaker = number % 2 if one.split == "train" else 0
        rows.append(row | {"speaker_id": speaker, "split": one.split})
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "all-00000-of-00001.parquet", row_group_size=5)
    return folder


def write_latents_table(folder: Path, utterances: list[Speech], flat: bool) -> Path:
    """An Arrow file of latents that were encoded before: lists of frames, or flat lists."""
    import pyarrow
    import torch

    from torchtitan.models.dit_tts.speech.codec import build_codec

    folder.mkdir(parents=True)
    codec = build_codec("mel_dct")
    rows = []
    for one in utterances:
        latents = codec.encode(torch.from_numpy(one.samples)).half().float()
        row = {"id": one.key, "text": one.text, "speaker": one.speaker, "split": one.split}
        for name, frames in (("latents", latents), ("reference", latents[:10])):
            row[name] = (frames.flatten() if flat else frames).tolist()
        rows.append(row | {"target_duration": len(one.samples) / RATE})
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(folder / "latents.arrow"), "wb") as file:
        kind = pyarrow.ipc.new_stream if flat else pyarrow.ipc.new_file
        with kind(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    return folder
