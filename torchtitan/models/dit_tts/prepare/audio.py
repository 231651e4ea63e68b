"""Decode a recording of any format to float32 samples, make it one channel, change its rate."""

import io
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare import mp3

if TYPE_CHECKING:
    import soundfile

# What libsndfile decodes beside MP3, by the first bytes: FLAC, WAV, Ogg (Opus, Vorbis), AIFF.
_LIBSNDFILE_STARTS = (b"fLaC", b"RIFF", b"RF64", b"OggS", b"FORM")
# Sizes in a WAV that was written to a pipe: by some programs 0, by sox 2 GiB, by ffmpeg 4 GiB.
_UNKNOWN_SIZES = (range(1), range(0x7FFFF000, 0x80000000), range(0xFFFFFF00, 0x100000000))
_UNKNOWN_FRAMES = 1 << 62  # libsndfile's count of a FLAC that tells none is above it
_BLOCK_FRAMES = 1 << 18
FFMPEG_TIMEOUT_SECONDS = 600


def decode(
    data: bytes | str, offset_seconds: float = 0.0, seconds: float | None = None
) -> tuple[np.ndarray, int]:
    """Samples (n, channels) float32 in [-1, 1] and their rate in Hz.

    flac, wav, ogg (Opus or Vorbis), mp3 and aiff through libsndfile; m4a, aac, webm and the rest
    through the program ffmpeg where it is installed.

    Args:
        data: a file's bytes, or its path.
        offset_seconds, seconds: the part to decode; all of it by default.

    Raises:
        InputError: not audio, damaged, cut short, or without a sample.
    """
    import soundfile

    start = data[:12] if isinstance(data, bytes) else _first_bytes(data)
    if not start:
        raise InputError("the audio is empty (0 bytes)")
    try:
        readable: bytes | str | None = None
        if start.startswith(b"ID3") or _is_mpeg_frame(start):
            readable = mp3.with_length(data if isinstance(data, bytes) else Path(data).read_bytes())
        elif start.startswith(_LIBSNDFILE_STARTS):
            readable = data
        if readable is None:
            return _decode_by_ffmpeg(data, offset_seconds, seconds)
        with _open(readable) as file:
            samples, rate = _read_part(file, offset_seconds, seconds), file.samplerate
        if start.startswith(b"RIFF"):
            _check_wav_length(data)
    except soundfile.LibsndfileError as error:
        raise InputError(f"the audio cannot be decoded ({error.error_string})") from error
    except MemoryError:
        raise InputError("the audio is too large to be decoded in memory") from None
    if not np.isfinite(samples).all():
        raise InputError("the audio holds NaN or infinite samples")
    return samples, rate


def _is_mpeg_frame(start: bytes) -> bool:
    """Eleven set bits and a layer: MP3. AAC has the same bits and no layer."""
    return len(start) > 1 and start[0] == 0xFF and start[1] & 0xE0 == 0xE0 and start[1] & 6 != 0


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(12)
    except OSError as error:
        raise InputError(f"the audio file {path} cannot be opened ({error.strerror})") from None


def _open(data: bytes | str) -> "soundfile.SoundFile":
    """The file, to be read forwards to its end, wherever its header says that this is."""
    import soundfile

    class Forwards(soundfile.SoundFile):
        # A file that can seek is asked for no more than its header tells, and sought in after each
        # read, which fails at the end of a FLAC whose header tells another length.
        def seekable(self) -> bool:
            return False

    return Forwards(io.BytesIO(data) if isinstance(data, bytes) else data)


def _read_part(
    file: "soundfile.SoundFile", offset_seconds: float, seconds: float | None
) -> np.ndarray:
    first = round(offset_seconds * file.samplerate)
    told = file.frames if file.frames < _UNKNOWN_FRAMES else None
    wanted = None if told is None else told - first
    if seconds is not None:
        wanted = round(seconds * file.samplerate)
        if told is not None:
            # Ends written with few digits may lie a little behind the file's.
            if first + wanted > told + file.samplerate // 20:
                raise InputError(
                    f"the part from {offset_seconds} s of {seconds} s ends behind the audio's "
                    f"{told / file.samplerate:.3f} s"
                )
            wanted = min(wanted, told - first)
    if wanted is not None and wanted <= 0:
        raise InputError(f"the audio has {told} samples, none of them behind {offset_seconds} s")
    if first:
        file.seek(first)
    samples = _read_blocks(file, wanted)
    if len(samples) == 0 or len(samples) != (wanted or len(samples)):
        raise InputError(
            f"the audio is cut short: {len(samples)} of {wanted or 'its'} samples can be decoded"
        )
    return samples


def _read_blocks(file: "soundfile.SoundFile", wanted: int | None) -> np.ndarray:
    """(n, channels): as many samples as wanted, all by default, or what there is of them.

    Memory is taken for what is there, not for what a damaged header tells.
    """
    blocks: list[np.ndarray] = []
    count = 0
    while wanted is None or count < wanted:
        size = _BLOCK_FRAMES if wanted is None else min(_BLOCK_FRAMES, wanted - count)
        block = file.read(size, dtype="float32", always_2d=True)
        if len(block) == 0:
            break
        blocks.append(block)
        count += len(block)
    if not blocks:
        return np.zeros((0, file.channels), np.float32)
    return np.concatenate(blocks) if len(blocks) > 1 else blocks[0]


def _check_wav_length(data: bytes | str) -> None:
    """libsndfile reads what is left of a WAV that was cut; its header tells that more was there."""
    if isinstance(data, bytes):
        size, head = len(data), data[:8]
    else:
        size, head = Path(data).stat().st_size, _first_bytes(data)
    told = int.from_bytes(head[4:8], "little")
    if not any(told in sizes for sizes in _UNKNOWN_SIZES) and told + 8 > size + 1:
        raise InputError(f"the audio is cut short: {size} of {told + 8} bytes are there")


def _decode_by_ffmpeg(
    data: bytes | str, offset_seconds: float, seconds: float | None
) -> tuple[np.ndarray, int]:
    program = shutil.which("ffmpeg")
    if program is None:
        raise InputError(
            "the audio is not flac, wav, ogg, opus or mp3, and ffmpeg, which reads the rest, is not "
            "on PATH; install ffmpeg or convert the audio"
        )
    with tempfile.TemporaryDirectory() as folder:
        # From a file and into one: m4a is read by seeking, and a WAV's header by pipe has no length.
        source, target = Path(folder, "in"), Path(folder, "out.wav")
        if isinstance(data, bytes):
            source.write_bytes(data)
        else:
            source = Path(data).absolute()
        command = [program, "-nostdin", "-v", "error", "-xerror", "-i", str(source)]
        command += ["-map", "0:a:0", "-c:a", "pcm_f32le", str(target)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=FFMPEG_TIMEOUT_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InputError(f"ffmpeg could not decode the audio ({error})") from None
        if done.returncode != 0 or not target.exists():
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise InputError(
                f"ffmpeg cannot decode the audio ({said[-1] if said else done.returncode})"
            )
        with _open(str(target)) as file:
            return _read_part(file, offset_seconds, seconds), file.samplerate


def to_mono(samples: np.ndarray) -> np.ndarray:
    """Mean of the channels: (n, channels) -> (n,)."""
    if samples.shape[1] == 1:
        return np.ascontiguousarray(samples[:, 0])
    return samples.mean(axis=1, dtype=np.float32)


def resample(samples: np.ndarray, rate: int, target_rate: int) -> np.ndarray:
    """(n,) float32 at `rate` Hz -> at `target_rate` Hz, by soxr's high quality setting.

    Band-limited: what lies above half the lower rate is removed, what lies below is kept, and
    nothing is shifted in time.
    """
    if rate == target_rate:
        return samples
    import soxr

    return soxr.resample(samples, rate, target_rate, quality="HQ")
