"""Decoding every format in full, or an error; channels and rates."""

import inspect
import io

import av
import numpy as np
import pytest
import soundfile

from tests.helpers.speech_corpora import RATE, audio_bytes, speech, tone
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.audio import TooLong, decode, resample, to_mono


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    return speech(each=1, voices=("slt",))[0].samples


@pytest.mark.long
@pytest.mark.parametrize(
    "format, subtype, error",
    [
        ("WAV", "PCM_16", 1e-4),
        ("FLAC", "PCM_24", 1e-6),
        ("OGG", "VORBIS", 0.1),
        ("OGG", "OPUS", 0.1),
        ("MP3", None, 0.1),
    ],
)
def test_decode(samples, format, subtype, error, tmp_path):
    data = audio_bytes(np.stack([samples, -samples], 1), RATE, format, subtype)
    decoded, rate = decode(data)
    # Opus is always coded at 48 kHz; libsndfile gives back what its header says.
    assert rate == RATE and decoded.dtype == np.float32 and decoded.shape == (len(samples), 2)
    assert np.abs(decoded[:, 0] - samples).max() <= error
    assert np.corrcoef(decoded[:, 0], decoded[:, 1])[0, 1] < -0.99
    path = tmp_path / "audio.bin"  # the content decides, not the name
    path.write_bytes(data)
    np.testing.assert_array_equal(decode(str(path))[0], decoded)


def test_long_recordings_and_parts_are_read_in_order():
    """More than one block of reading; 16-bit samples come back exactly."""
    values = np.random.default_rng(0).integers(-32768, 32768, (600_001, 2)) / 32768
    for format in ("WAV", "FLAC"):
        data = audio_bytes(values, RATE, format, "PCM_16")
        whole = decode(data)[0]
        assert np.array_equal(whole, values.astype(np.float32))
        assert np.array_equal(decode(data, 1.5, 20.0)[0], whole[24_000:344_000])
        assert np.array_equal(decode(data, 1.5)[0], whole[24_000:])
        # Ends written with few digits lie a little behind the file's, at most a twentieth of a second.
        assert len(decode(data, 0.5, 37.05)[0]) == len(whole) - 8000
        for offset, length, message in ((0.5, 37.06, "ends after"), (99.0, None, "none of them")):
            with pytest.raises(InputError, match=message):
                decode(data, offset, length)


def test_decode_refuses_corrupt_audio(samples):
    flac = audio_bytes(samples, RATE, "FLAC", "PCM_16")
    wav = audio_bytes(samples, RATE, "WAV", "PCM_16")
    opus = audio_bytes(np.tile(samples, 5), RATE, "OGG", "OPUS")
    bad = samples.copy()
    bad[100] = np.nan
    for data, message in (
        (b"", "the file is empty$"),
        (wav[:-2], f"cut short: {len(wav) - 2} of {len(wav)} bytes"),
        (flac[: len(flac) // 2], "cut short|cannot be decoded"),
        (opus[:-1], "cut short: .* bytes of its end"),
        (opus[: opus.rfind(b"OggS") + 20], "cut short: 20 of 28 bytes of its end"),
        (flac[:4] + bytes(500), "cannot be decoded"),
        (audio_bytes(bad, RATE, "WAV", "FLOAT"), "NaN"),
        (audio_bytes(np.zeros(0), RATE, "WAV"), "0 samples$"),
        (audio_bytes(samples, 999, "WAV"), "has 999 Hz; 1000 to 1000000 are supported"),
        (b"<!DOCTYPE html>", "the file is text, not audio: it begins with '<!DOCTYPE ht'$"),
        (b"\0\1hello", "cannot be decoded"),
        (b"\xff\xfb\x00\x00" * 300, "cannot be decoded"),
        ("/nowhere/at/all.flac", "No such file"),
    ):
        with pytest.raises(InputError, match=message):
            decode(data)


def test_what_is_longer_than_is_read_is_refused():
    """Counted in values, so that many channels at a high rate take no more memory."""
    assert inspect.signature(decode).parameters["longest"].default == 600
    for count, longest in ((2, 6.2), (4, 12.4)):
        quiet = np.zeros((297_600, count))  # 6.2 s
        data = audio_bytes(quiet, 48_000, "FLAC", "PCM_16")
        assert decode(data, longest=longest)[0].shape == quiet.shape
        assert len(decode(data, 2, 1, longest=longest / 6)[0]) == 48_000
        with pytest.raises(TooLong) as refusal:
            decode(data, longest=longest - 0.2)
        assert refusal.match(f"more than the 6 s of {count} channels at 48000 Hz that are read")
        assert refusal.value.seconds == pytest.approx(6.2 - 0.4 / count)


ID3 = b"ID3\4\0\0\0\0\1\0" + bytes(128)


@pytest.mark.parametrize(
    "mode, rate, channels",
    [("CONSTANT", 8000, 1), ("CONSTANT", 48_000, 2), ("VARIABLE", 44_100, 1)],
)
def test_mp3_is_decoded_in_full_whatever_its_header_says(mode, rate, channels):
    """Loud, then silent, then quiet: the first frame's bit rate gives a wrong length."""
    noise = np.random.default_rng(0).normal(0, 0.2, (rate, channels))
    values = np.concatenate([noise, np.zeros_like(noise), 0.1 * noise])
    buffer = io.BytesIO()
    soundfile.write(buffer, values, rate, format="MP3", bitrate_mode=mode, compression_level=0.5)
    tagged = buffer.getvalue()
    whole = decode(tagged)[0]
    assert len(whole) == len(values)
    with av.open(io.BytesIO(tagged)) as container:
        bare = tagged[next(container.demux(audio=0)).pos :]  # without the frame that has the length
    decoded = decode(bare)[0]
    # The tag also has the encoder's delay, and how much the last frame is padded.
    delay = 576 + 529
    assert delay <= len(decoded) - len(whole) + 1 < delay + 2 * 1152
    end = len(whole) - 3000
    np.testing.assert_allclose(decoded[delay + 3000 :][:end], whole[3000:], atol=1e-4)
    np.testing.assert_array_equal(decode(ID3 + bare)[0], decoded)
    part = decode(bare, 0.5, 0.25)[0]
    np.testing.assert_array_equal(part, decoded[rate // 2 :][: rate // 4])
    # Files joined end to end: the first one's tag does not count the second.
    assert len(decode(tagged + tagged)[0]) >= 2 * len(values)
    with pytest.raises(InputError, match="cut short"):
        decode(tagged[: len(tagged) // 2])


def test_lengths_that_headers_lack(samples):
    flac = bytearray(audio_bytes(samples, RATE, "FLAC", "PCM_16"))
    whole = decode(bytes(flac))[0]
    np.testing.assert_array_equal(decode(ID3 + bytes(flac))[0], whole)
    flipped = flac.copy()
    flipped[8 + 13] |= 4  # the count of samples, 2**34 more
    with pytest.raises(InputError, match=f"cut short: {len(whole)} of 1717"):
        decode(bytes(flipped))
    unknown = flac.copy()
    unknown[8 + 13] &= 0xF0
    unknown[8 + 14 : 8 + 18] = bytes(4)
    np.testing.assert_array_equal(decode(bytes(unknown))[0], whole)
    np.testing.assert_array_equal(decode(bytes(unknown), 0.5, 0.25)[0], whole[8000:12_000])
    with pytest.raises(InputError, match="cut short|cannot be decoded"):
        decode(bytes(unknown[: len(unknown) // 2]))
    wav = audio_bytes(samples, RATE, "WAV", "PCM_16")
    for size in (0x7FFFF000, 0xFFFFFFDB):  # as sox and ffmpeg write to a pipe
        header = (size + 36).to_bytes(4, "little") + wav[8:40] + size.to_bytes(4, "little")
        np.testing.assert_array_equal(decode(wav[:4] + header + wav[44:])[0], decode(wav)[0])


@pytest.mark.parametrize(
    "container, codec", [("ipod", "aac"), ("adts", "aac"), ("webm", "libopus")]
)
def test_what_libsndfile_cannot_read(container, codec, tmp_path):
    """m4a, bare AAC and webm."""
    left = tone(3, rate=48_000)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=48_000, layout="stereo")
        values = np.stack([left, left / 2])
        frame = av.AudioFrame.from_ndarray(values, format="fltp", layout="stereo")
        frame.rate = 48_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            file.mux(packet)
    data = buffer.getvalue()
    decoded, rate = decode(data)
    assert rate == 48_000 and 0 <= len(decoded) - len(left) <= 2 * 1024
    steady = np.sqrt(np.square(decoded[48_000:96_000]).mean(0))
    np.testing.assert_allclose(steady, [0.1 / 2**0.5, 0.05 / 2**0.5], rtol=0.02)
    path = tmp_path / "a.wav"
    path.write_bytes(data)
    part = decode(str(path), 0.5, 0.25)[0]
    np.testing.assert_array_equal(part, decoded[24_000:36_000])
    assert part.base is None  # nothing of the rest is kept
    assert len(decode(data, longest=3.1)[0]) == len(decoded)
    assert len(decode(data, 1.5, 1, longest=2)[0]) == 48_000
    with pytest.raises(TooLong, match="more than the 2 s of 2 channels at 48000 Hz"):
        decode(data, longest=2)
    # Ends beside the edge of a frame, whose sums and quotients are rounded apart.
    for length in (1.81, 1.88, 1.92):
        assert len(decode(data, 0.05, length)[0]) == round(length * 48_000)
    with pytest.raises(InputError, match="cut short|cannot be decoded"):
        decode(data[: len(data) // 2])


def test_parts_of_a_joined_mp3_get_one_rate_and_as_many_channels():
    """Both have the tone's pitch."""
    low = audio_bytes(tone(1, rate=44_100), 44_100, "MP3", None)
    high = audio_bytes(np.stack([tone(1, rate=48_000)] * 2, 1), 48_000, "MP3", None)
    decoded, rate = decode(low + high)
    assert decoded.shape[1] == 2 and len(decoded) / rate == pytest.approx(2, abs=0.1)
    low_peak, high_peak = (
        np.abs(np.fft.rfft(decoded[begin * rate // 4 :, 0][: rate // 2])).argmax()
        for begin in (1, 5)
    )
    assert abs(low_peak - high_peak) <= 1


@pytest.mark.parametrize("rate", [8000, 22_050, 48_000])
def test_resampling_keeps_what_is_below_half_the_rate(rate):
    low = tone(1, rate=rate, hertz=1000)
    stereo = np.stack([2 * low, np.zeros_like(low)], 1)
    out = resample(to_mono(stereo), rate, RATE)  # the mean of the channels
    assert out.dtype == np.float32 and abs(len(out) - RATE) <= 1
    middle = slice(1600, -1600)
    assert np.abs(out[middle] - tone(1, hertz=1000)[: len(out)][middle]).max() < 1e-3
    if rate > 2 * 9000:
        above = resample(tone(1, rate=rate, hertz=9000), rate, RATE)[middle]
        assert np.abs(above).max() < 1e-5  # 80 dB down
    assert resample(low, RATE, RATE) is low


def test_channels_that_cancel_out_give_the_loudest_of_them():
    left, right = tone(1, hertz=300), tone(1, hertz=700)
    for channels, wanted in (
        ([left, -left], left),
        ([0.9 * left, -left], -left),
        ([left, right], (left + right) / 2),
        ([0 * left, right], right / 2),
        ([left, -0.5 * left], left / 4),
        ([0 * left, 0 * left], 0 * left),
    ):
        np.testing.assert_allclose(to_mono(np.stack(channels, 1)), wanted, atol=1e-6)
