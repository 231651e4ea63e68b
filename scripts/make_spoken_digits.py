"""Make the embedded corpus of spoken digits, `assets/spoken_digits/spoken_digits.tar`.

    python scripts/make_spoken_digits.py

needs the program `flite` with the voices slt, rms, awb and kal16 (Debian package `flite`) and
`pip install soundfile`. Users never run this: the tar is shipped. It is here so that the corpus
can be checked, rebuilt and changed. The output is the same byte for byte with the same flite and
libsndfile.
"""

import argparse
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOICES = ("slt", "rms", "awb", "kal16")
LICENSE = "LicenseRef-CMU-Flite"
SAMPLE_RATE = 16_000
# How many utterances of each length (in digits) a voice has; 600 for training, 24 held out.
TRAIN_COUNTS = {1: 10, 2: 70, 3: 150, 4: 185, 5: 185}
HELDOUT_COUNTS = {2: 4, 3: 6, 4: 7, 5: 7}
RMS_LEVEL_DBFS = -20.0
PEAK_LIMIT = 0.9
EDGE_SILENCE_SECONDS = 0.05


def draw_text(rng: random.Random, length: int, pair_uses: dict[tuple[int, int], int]) -> list[int]:
    """Draw `length` digits, preferring neighbours this voice has said least often so far."""
    digits = [rng.randrange(10)]
    while len(digits) < length:
        last = digits[-1]
        weights = [0.2 ** pair_uses.get((last, digit), 0) for digit in range(10)]
        digits.append(rng.choices(range(10), weights)[0])
    return digits


def choose_texts(seed: int) -> list[tuple[str, str, list[int]]]:
    """All utterances as (voice, split, digits); no held-out text occurs in any training set."""
    rng = random.Random(seed)
    chosen, heldout_texts = [], set()
    for voice in VOICES:
        for length, count in HELDOUT_COUNTS.items():
            texts: list[list[int]] = []
            while len(texts) < count:
                text = draw_text(rng, length, {})
                if tuple(text) not in heldout_texts:
                    heldout_texts.add(tuple(text))
                    texts.append(text)
            chosen += [(voice, "heldout", text) for text in texts]
    for voice in VOICES:
        used: set[tuple[int, ...]] = set()
        pair_uses: dict[tuple[int, int], int] = {}
        for length, count in TRAIN_COUNTS.items():
            made = 0
            while made < count:
                # Single digits in order, so that every voice says each of the ten alone.
                text = [made] if length == 1 else draw_text(rng, length, pair_uses)
                if tuple(text) in used or tuple(text) in heldout_texts:
                    continue
                used.add(tuple(text))
                for pair in zip(text, text[1:]):
                    pair_uses[pair] = pair_uses.get(pair, 0) + 1
                chosen.append((voice, "train", text))
                made += 1
    return chosen


def speak(voice: str, text: str, folder: Path) -> np.ndarray:
    """Let flite say `text`; returns (samples,) float64 in [-1, 1] at 16 kHz."""
    import soundfile

    path = folder / "speech.wav"
    subprocess.run(["flite", "-voice", voice, "-t", text, str(path)], check=True)
    waveform, sample_rate = soundfile.read(path)
    if sample_rate != SAMPLE_RATE:
        raise ValueError(
            f"flite voice {voice} speaks at {sample_rate} Hz; {SAMPLE_RATE} is needed: take another voice"
        )
    return waveform


def trim_and_level(waveform: np.ndarray) -> np.ndarray:
    """Cut the silence at both ends to 50 ms, fade the edges, bring the level to -20 dBFS RMS."""
    hop = SAMPLE_RATE // 100
    # The difference of neighbouring samples: weak "th" and "f" are high, the voices' hum is low.
    sharp = np.diff(waveform, prepend=waveform[0])
    frames = sharp[: len(sharp) // hop * hop].reshape(-1, hop)
    rms = np.sqrt((frames**2).mean(axis=1))
    # Above the voice's own noise floor: a fixed threshold would cut "th" or keep awb's hiss.
    threshold = max(2.5 * np.percentile(rms, 5), 0.012 * rms.max())
    above = rms > threshold
    above[1:-1] &= above[:-2] | above[2:]  # a lone frame is a click, not speech
    above[[0, -1]] = False
    loud = np.flatnonzero(above)
    edge = int(EDGE_SILENCE_SECONDS * SAMPLE_RATE)
    start = max(0, loud[0] * hop - edge)
    stop = min(len(waveform), (loud[-1] + 1) * hop + edge)
    speech = waveform[start:stop] - waveform.mean()
    fade = np.sin(np.linspace(0, np.pi / 2, SAMPLE_RATE // 200)) ** 2
    speech[: len(fade)] *= fade
    speech[-len(fade) :] *= fade[::-1]
    gain = 10 ** (RMS_LEVEL_DBFS / 20) / np.sqrt((speech**2).mean())
    return speech * min(gain, PEAK_LIMIT / np.abs(speech).max())


def ogg_checksum_table() -> list[int]:
    """CRC table of Ogg pages: polynomial 0x04c11db7, not reflected, start 0 (RFC 3533)."""
    table = []
    for byte in range(256):
        crc = byte << 24
        for _ in range(8):
            crc = (crc << 1) ^ (0x104C11DB7 if crc & 0x80000000 else 0)
        table.append(crc)
    return table


def set_ogg_serial(data: bytes, serial: int, table: list[int]) -> bytes:
    """Give every page this stream number: libsndfile draws a random one, bytes would never repeat."""
    out, position = bytearray(data), 0
    while position < len(out):
        segments = out[position + 26]
        size = 27 + segments + sum(out[position + 27 : position + 27 + segments])
        out[position + 14 : position + 18] = serial.to_bytes(4, "little")
        out[position + 22 : position + 26] = bytes(4)
        crc = 0
        for byte in out[position : position + size]:
            crc = ((crc << 8) & 0xFFFFFFFF) ^ table[(crc >> 24) ^ byte]
        out[position + 22 : position + 26] = crc.to_bytes(4, "little")
        position += size
    return bytes(out)


def encode_opus(waveform: np.ndarray, compression_level: float) -> bytes:
    """Ogg Opus of a mono 16 kHz waveform (samples,)."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(
        buffer,
        waveform,
        SAMPLE_RATE,
        format="OGG",
        subtype="OPUS",
        compression_level=compression_level,
    )
    return buffer.getvalue()


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Append a file with a header that depends on its name and size only."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o644, 0
    tar.addfile(info, io.BytesIO(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).resolve().parent.parent / "assets/spoken_digits/spoken_digits.tar"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compression-level", type=float, default=0.95, help="of Opus, 0 to 1")
    arguments = parser.parse_args()
    if shutil.which("flite") is None:
        sys.exit(
            "flite was not found: install the Debian package flite (only needed to make the corpus)"
        )
    seconds, utterances, table = 0.0, choose_texts(arguments.seed), ogg_checksum_table()
    partial = arguments.output.with_suffix(".tar.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        counts: dict[tuple[str, str], int] = {}
        for serial, (voice, split, digits) in enumerate(utterances):
            number = counts.get((voice, split), 0)
            counts[voice, split] = number + 1
            key = f"{voice}-{split}-{number:03d}"
            text = " ".join(DIGITS[digit] for digit in digits)
            waveform = trim_and_level(speak(voice, text, Path(folder)))
            seconds += len(waveform) / SAMPLE_RATE
            metadata = {
                "text": text,
                "speaker": voice,
                "language": "en",
                "split": split,
                "license": LICENSE,
            }
            audio = encode_opus(waveform, arguments.compression_level)
            add_member(tar, f"{key}.opus", set_ogg_serial(audio, serial, table))
            add_member(tar, f"{key}.json", json.dumps(metadata).encode())
    partial.replace(arguments.output)
    size = arguments.output.stat().st_size
    print(
        f"{len(utterances)} utterances, {seconds / 60:.1f} minutes, {size / 1e6:.2f} MB: {arguments.output}"
    )


if __name__ == "__main__":
    main()
