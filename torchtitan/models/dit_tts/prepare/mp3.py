"""Tell the decoder how long an MP3 is.

An MP3 has no length but what a tag (Xing, Info or VBRI) in its first frame tells. Where there is
none, libsndfile estimates one from the first frame's bit rate and stops there, which cuts audio of
variable bit rate short. So the frames are counted here, and such a file gets a tag with the count.
"""

import struct
from typing import NamedTuple

from torchtitan.models.dit_tts.errors import InputError

# Layer III, ISO 11172-3 and 13818-3: bit rates in kbit/s by their index, 0 being free format.
_KILOBITS_MPEG1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_KILOBITS_MPEG2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_MPEG1 = 3
_MONO = 3
_VBRI_OFFSET = 36
_TAG_BIT_RATE = 5  # index, of the tag's own frame; 120 bytes at least


class Frame(NamedTuple):
    """What a frame's header tells."""

    size: int  # bytes, header included
    kind: tuple[int, int]  # version and rate, equal in all frames of a file
    side_info: int  # bytes between the header and the data, or the tag


def with_length(data: bytes) -> bytes | None:
    """`data` where its tag tells all its frames, else with a tag before them that does.

    None where no frame of layer III is in it, or frames of free format. A FLAC behind an ID3 tag
    stays as it is.

    Raises:
        InputError: the last frame is cut, in a file that has no tag.
    """
    start = _skip_id3(data, 0)
    if data[start : start + 4] == b"fLaC":
        return data
    starts, cut = _frame_starts(data, start)
    if not starts:
        return None
    first = read_frame(data, starts[0])
    told, has_tag = _told_frames(data, starts[0], first)
    if told and len(starts) - 1 <= told + 1:  # some count the tag's own frame
        return data
    if cut:
        raise InputError("the audio is cut short: its last MPEG frame is not whole")
    body = starts[1:] if has_tag else starts
    if not body:
        raise InputError("the audio has no MPEG frame but a tag")
    return _tag_frame(data[body[0] : body[0] + 4], first, len(body)) + data[body[0] :]


def read_frame(data: bytes, at: int) -> Frame | None:
    """The header at a byte, or None where there is none of layer III."""
    if at + 4 > len(data) or data[at] != 0xFF or data[at + 1] & 0xE6 != 0xE2:
        return None
    version, bit_rate = data[at + 1] >> 3 & 3, data[at + 2] >> 4
    rate = data[at + 2] >> 2 & 3
    if version == 1 or bit_rate in (0, 15) or rate == 3:
        return None
    mpeg1, mono = version == _MPEG1, data[at + 3] >> 6 == _MONO
    kilobits = (_KILOBITS_MPEG1 if mpeg1 else _KILOBITS_MPEG2)[bit_rate]
    size = (144 if mpeg1 else 72) * 1000 * kilobits // _RATES[version][rate]
    side_info = (17 if mono else 32) if mpeg1 else (9 if mono else 17)
    return Frame(size + (data[at + 2] >> 1 & 1), (version, rate), side_info)


def _skip_id3(data: bytes, at: int) -> int:
    while data[at : at + 3] == b"ID3" and at + 10 <= len(data):
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)
    return at


def _frame_starts(data: bytes, at: int) -> tuple[list[int], bool]:
    """(first bytes of all whole frames, whether one more is cut)."""
    starts: list[int] = []
    kind = None
    linked = False  # the last frame ended here
    while True:
        frame = read_frame(data, at)
        if frame is not None and kind in (None, frame.kind):
            end = at + frame.size
            if end > len(data) and linked:
                return starts, True
            # After anything else, bytes that look like a header are one where the next follows.
            if end <= len(data) and (linked or _is_frame_end(data, end, frame)):
                starts.append(at)
                kind, at, linked = frame.kind, end, True
                continue
        at = data.find(b"\xff", _skip_id3(data, at) if linked else at + 1)
        linked = False
        if at < 0:
            return starts, False


def _is_frame_end(data: bytes, end: int, frame: Frame) -> bool:
    following = read_frame(data, end)
    if following is not None:
        return following.kind == frame.kind
    return end == len(data) or data[end : end + 3] == b"TAG"


def _told_frames(data: bytes, at: int, frame: Frame) -> tuple[int, bool]:
    """(frames that a tag tells, 0 where it does not; whether the frame is a tag)."""
    tag = at + 4 + frame.side_info
    if data[tag : tag + 4] in (b"Xing", b"Info"):
        counted = int.from_bytes(data[tag + 4 : tag + 8], "big") & 1
        return (int.from_bytes(data[tag + 8 : tag + 12], "big") if counted else 0), True
    tag = at + _VBRI_OFFSET
    if data[tag : tag + 4] == b"VBRI":
        return int.from_bytes(data[tag + 14 : tag + 18], "big"), True
    return 0, False


def _tag_frame(header: bytes, frame: Frame, frames: int) -> bytes:
    """A frame of silence, of the given header's kind, with a tag that tells the count."""
    # Without a checksum and padding, so that the tag lies where decoders look for it.
    own = bytes((header[0], header[1] | 1, _TAG_BIT_RATE << 4 | header[2] & 0x0C, header[3]))
    size = read_frame(own, 0).size
    return (own + bytes(frame.side_info) + b"Xing" + struct.pack(">II", 1, frames)).ljust(
        size, b"\0"
    )
