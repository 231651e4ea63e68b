"""Decode a recording of any format to float32 samples, make it one channel, change its rate."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchtitan.models.dit_tts.errors import InputError

if TYPE_CHECKING:
    import soundfile

# First bytes of the formats that libsndfile decodes, except MP3: FLAC, WAV, Ogg (Opus, Vorbis), AIFF.
_LIBSNDFILE_STARTS = (b"fLaC", b"RIFF", b"RF64", b"OggS", b"FORM")
# Sizes in a WAV that was written to a pipe: by some programs 0, by sox 2 GiB, by ffmpeg 4 GiB.
_UNKNOWN_SIZES = (range(1), range(0x7FFFF000, 0x80000000), range(0xFFFFFF00, 0x100000000))
_HEADERLESS = ("g722", "gsm")
MIN_RATE, MAX_RATE = 1000, 1_000_000  # Hz
_UNKNOWN_FRAMES = 1 << 62  # libsndfile's count for a FLAC without one is above it
_BLOCK_FRAMES = 1 << 18
_CANCELLED = 0.01  # energy of the channels' mean over theirs: two that differ have 0.5
_VALUES_PER_SECOND = 2 * 48_000
MAX_SECONDS = 600.0
"""longest recording that is read unless the caller wants more: speech to train on or to copy is shorter"""
_MP3_TAGS = (b"Xing", b"Info", b"VBRI")  # in an MP3's first frame, with the number of frames


class TooLong(InputError):
    """A recording has more than is read; `seconds` of it were."""

    def __init__(self, seconds: float, rate: int, channels: int):
        self.seconds = seconds
        kind = f"{channels} channel{'s' * (channels > 1)} at {rate} Hz"
        super().__init__(
            f"the audio has more than the {seconds:.0f} s of {kind} that are read; cut it"
        )


def decode(
    data: bytes | str,
    offset_seconds: float = 0.0,
    seconds: float | None = None,
    name: str = "",
    longest: float = MAX_SECONDS,
) -> tuple[np.ndarray, int]:
    """Samples (n, channels) float32 in [-1, 1] and their rate in Hz.

    flac, wav, ogg (Opus or Vorbis), mp3 and aiff through libsndfile; m4a, aac, webm and the rest
    through FFmpeg's libraries (PyAV).

    Args:
        data: a file's bytes, or its path.
        offset_seconds, seconds: the part to decode; all of it by default.
        name: of the file that the bytes are of; telephones' formats are known by it alone.
        longest: seconds, of two channels at 48 kHz, beyond which what is decoded is refused as
            `TooLong`; of other channels and rates as many values.
    """
    import av
    import soundfile

    try:
        if isinstance(data, str):
            with open(data, "rb") as opened:
                start = opened.read(12)
        else:
            start = data[:12]
        if not start:
            raise InputError("the file is empty")
        by_libsndfile = start.startswith(_LIBSNDFILE_STARTS)
        # MP3: a tag, or a frame's eleven set bits and a layer. AAC has the same bits and no layer.
        is_frame = start[:1] == b"\xff" and start[1:2] > b"\xdf" and start[1] & 6 != 0
        if is_frame or start.startswith(b"ID3"):
            by_libsndfile = _libsndfile_reads_all(data)
        if by_libsndfile:
            with _open(data) as file:
                samples, rate = _read_part(file, offset_seconds, seconds, longest), file.samplerate
            if start.startswith(b"RIFF"):
                _check_wav_length(data)
            elif start.startswith(b"OggS"):
                _check_last_page(data)
        else:
            end = None if seconds is None else offset_seconds + seconds
            headerless = Path(name).suffix.lower()[1:]
            known = headerless if headerless in _HEADERLESS else None
            samples, rate = _decode_by_ffmpeg(data, end, known, longest)
            first, wanted = _part(len(samples), rate, offset_seconds, seconds)
            # A copy, as a part would keep all that was decoded.
            samples = samples[first:][:wanted].copy() if seconds is not None else samples[first:]
    except soundfile.LibsndfileError as error:
        raise InputError(f"the audio cannot be decoded ({error.error_string})") from error
    except (av.FFmpegError, OSError) as error:
        if isinstance(error, av.FFmpegError) and start.isascii() and b"\0" not in start:
            begins = f"it begins with {start.decode()!r}"
            raise InputError(f"the file is text, not audio: {begins}") from None
        raise InputError(f"the audio cannot be decoded ({error.strerror})") from None
    if not MIN_RATE <= rate <= MAX_RATE:
        # A corrupt header: at 1 Hz a small file would be resampled to hours.
        raise InputError(f"the audio has {rate} Hz; {MIN_RATE} to {MAX_RATE} are supported")
    if not np.isfinite(samples).all():
        raise InputError("the audio holds NaN or infinite samples")
    return samples, rate


def _open(data: bytes | str) -> "soundfile.SoundFile":
    """The file, to be read forwards to its end, wherever its header has that."""
    import soundfile

    class Forwards(soundfile.SoundFile):
        # soundfile limits reads of a seekable file to the header's length, and seeks after each
        # read, which fails at the end of a FLAC whose header has another length.
        def seekable(self) -> bool:
            return False

    return Forwards(io.BytesIO(data) if isinstance(data, bytes) else data)


def _part(
    length: int | None, rate: int, offset_seconds: float, seconds: float | None
) -> tuple[int, int | None]:
    """(first sample, number of samples) of a part; None where the length is not known."""
    first = round(offset_seconds * rate)
    wanted = None if length is None else length - first
    if seconds is not None:
        wanted = round(seconds * rate)
        if length is not None:
            # Ends written with few digits may lie a little behind the file's.
            if first + wanted > length + rate // 20:
                raise InputError(
                    f"the part from {offset_seconds} s of {seconds} s ends after the audio's "
                    f"{length / rate:.3f} s"
                )
            wanted = min(wanted, length - first)
    if wanted is not None and wanted <= 0:
        after = f", none of them after {offset_seconds} s" if offset_seconds else ""
        raise InputError(f"the audio has {length} samples{after}")
    return first, wanted


def _read_part(
    file: "soundfile.SoundFile", offset_seconds: float, seconds: float | None, longest: float
) -> np.ndarray:
    """(n, channels). Memory is taken for the samples read, not for a corrupt header's count."""
    length = file.frames if file.frames < _UNKNOWN_FRAMES else None
    first, wanted = _part(length, file.samplerate, offset_seconds, seconds)
    if first:
        file.seek(first)
    blocks: list[np.ndarray] = []
    count, most = 0, int(longest * _VALUES_PER_SECOND) // file.channels
    while wanted is None or count < wanted:
        if count == most:
            raise TooLong(count / file.samplerate, file.samplerate, file.channels)
        size = min(_BLOCK_FRAMES, most - count, _BLOCK_FRAMES if wanted is None else wanted - count)
        block = file.read(size, dtype="float32", always_2d=True)
        if len(block) == 0:
            break
        blocks.append(block)
        count += len(block)
    if count == 0 or count != (wanted or count):
        raise InputError(
            f"the audio is cut short: {count} of {wanted or 'its'} samples can be decoded"
        )
    return np.concatenate(blocks) if len(blocks) > 1 else blocks[0]


def _check_wav_length(data: bytes | str) -> None:
    """libsndfile silently reads what is left of a WAV that was cut; its header has the real size."""
    if isinstance(data, bytes):
        size, head = len(data), data[:8]
    else:
        with open(data, "rb") as file:
            size, head = Path(data).stat().st_size, file.read(8)
    stated = int.from_bytes(head[4:8], "little")
    if not any(stated in sizes for sizes in _UNKNOWN_SIZES) and stated + 8 > size + 1:
        raise InputError(f"the audio is cut short: {size} of {stated + 8} bytes are there")


_MAX_PAGE = 27 + 255 + 255 * 255
"""bytes of a page of Ogg (RFC 3533)"""


def _check_last_page(data: bytes | str) -> None:
    """libsndfile silently leaves out the last page of an Ogg that was cut in it."""
    if isinstance(data, str):
        with open(data, "rb") as file:
            file.seek(max(0, Path(data).stat().st_size - _MAX_PAGE))
            data = file.read(_MAX_PAGE)
    page = data[data.rfind(b"OggS\0") :]  # its header, the sizes of its segments, these
    size = 27 + sum(page[26 : 27 + page[26]]) if len(page) > 27 else 28
    if len(page) < size:
        raise InputError(
            f"the audio is cut short: {len(page)} of {size} bytes of its end are there"
        )


def _libsndfile_reads_all(data: bytes | str) -> bool:
    """True if libsndfile finds the end of an MP3, or of what else stands behind an ID3 tag.

    It takes the length from a tag in the first frame. Without one it estimates the length from the
    first frame's bit rate, and of joined files it reads the first alone.
    """
    import av

    if isinstance(data, str):
        data = Path(data).read_bytes()
    with av.open(io.BytesIO(data), "r") as container:
        if container.format.name != "mp3":
            return container.format.name == "flac"
        packets = [packet for packet in container.demux(audio=0) if packet.size]
        seconds = sum(float((packet.duration or 0) * packet.time_base) for packet in packets)
    first = packets[0].pos or 0 if packets else 0
    if not any(tag in data[max(0, first - 1500) : first] for tag in _MP3_TAGS):
        return False
    with _open(data) as file:  # its length is without the encoder's padding of up to 3 frames
        return seconds * file.samplerate <= file.frames + 4 * 1152


def _decode_by_ffmpeg(
    data: bytes | str, end: float | None, known: str | None, longest: float
) -> tuple[np.ndarray, int]:
    """((n, channels), rate) as the stream has them: joined parts of it may have others. Of a part of the audio
    nothing behind its end (s) is decoded."""
    import av

    blocks: list[np.ndarray] = []
    to_float: av.AudioResampler | None = None
    kind, decoded, is_part = None, 0.0, False
    opened = io.BytesIO(data) if isinstance(data, bytes) else data
    with av.open(opened, "r", format=known) as container:
        if not container.streams.audio:
            raise InputError("the file has no audio in it")
        stream = container.streams.audio[0]
        # Read here, as both follow the frames once these are decoded.
        layout, rate, channels = stream.layout.name, stream.rate, stream.layout.nb_channels
        most = longest * _VALUES_PER_SECOND / channels / rate
        for frame in container.decode(stream):
            decoded += frame.samples / frame.sample_rate
            if decoded > max(most, (end or 0) + 1):  # a part lies as deep as its list says
                raise TooLong(most, rate, channels)
            before, kind = kind, (frame.format.name, frame.layout.name, frame.sample_rate)
            if to_float is None or kind != before:
                # One that was made for another kind of frame would hand this one through.
                if to_float is not None:
                    blocks += [part.to_ndarray() for part in to_float.resample(None)]
                to_float = av.AudioResampler("fltp", layout, rate)
            blocks += [part.to_ndarray() for part in to_float.resample(frame)]
            is_part = end is not None and decoded >= end + 0.1  # sums are rounded
            if is_part:
                break
        if to_float is None:
            raise InputError("the audio has no sample that can be decoded")
        blocks += [part.to_ndarray() for part in to_float.resample(None)]
        samples = np.concatenate(blocks, axis=1).T
        # Of MP3 and bare AAC the duration is an estimate.
        if container.duration and container.format.name not in ("mp3", "aac") and not is_part:
            stated = container.duration / av.time_base
            if len(samples) / rate < stated - 0.5:
                raise InputError(
                    f"the audio is cut short: {len(samples) / rate:.1f} of {stated:.1f} s"
                )
        return samples, rate


def to_mono(samples: np.ndarray) -> np.ndarray:
    """Mean of the channels: (n, channels) -> (n,); the loudest one where they cancel out, as of a cable that turns one
    of two round."""
    if samples.shape[1] == 1:
        return np.ascontiguousarray(samples[:, 0])
    mean = samples.mean(axis=1, dtype=np.float32)
    energies = np.einsum("nc,nc->c", samples, samples)
    if mean @ mean < _CANCELLED * energies.mean():
        return np.ascontiguousarray(samples[:, energies.argmax()])
    return mean


def resample(samples: np.ndarray, rate: int, target_rate: int) -> np.ndarray:
    """(n,) float32 at `rate` Hz -> at `target_rate` Hz, by soxr's high quality setting.

    Band-limited: what lies above half the lower rate is removed, what lies below is kept, and
    nothing is shifted in time.
    """
    if rate == target_rate:
        return samples
    import soxr

    return soxr.resample(samples, rate, target_rate, quality="HQ")
