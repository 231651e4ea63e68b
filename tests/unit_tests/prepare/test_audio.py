"""Decoding, resampling, loudness, silence and filters, on the embedded recordings."""

import io
import math
import stat
import sys

import numpy as np
import pytest
import soundfile

from tests.helpers.speech_corpora import RATE, audio_bytes, speech
from torchtitan.models.dit_tts.codec import build_codec
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare import audio, mp3
from torchtitan.models.dit_tts.prepare.audio import decode, resample, to_mono
from torchtitan.models.dit_tts.prepare.processing import (
    REASONS,
    Processed,
    loudness,
    process,
    speech_span,
)
from torchtitan.models.dit_tts.prepare.settings import AudioSettings

OFF = AudioSettings(loudness=None, max_silence=None)


@pytest.fixture(scope="module")
def recordings():
    return speech(each=4)


def tone(seconds: float, rate: int = RATE, hertz: float = 440, level: float = 0.1) -> np.ndarray:
    return level * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate).astype("f4")


def bs1770(samples: np.ndarray) -> float:
    """Integrated loudness of mono samples at 48 kHz, by the coefficients in ITU-R BS.1770-4."""
    from scipy.signal import lfilter

    shelf = [1.53512485958697, -2.69169618940638, 1.19839281085285]
    shelf_poles = [1.0, -1.69065929318241, 0.73248077421585]
    high_pass_poles = [1.0, -1.99004745483398, 0.99007225036621]
    weighted = lfilter([1.0, -2.0, 1.0], high_pass_poles, lfilter(shelf, shelf_poles, samples))
    block, step = 19_200, 4_800
    power = np.array(
        [np.mean(weighted[n : n + block] ** 2) for n in range(0, len(weighted) - block + 1, step)]
    )
    level = -0.691 + 10 * np.log10(power)
    relative = -0.691 + 10 * np.log10(power[level > -70].mean()) - 10
    return float(-0.691 + 10 * np.log10(power[(level > -70) & (level > relative)].mean()))


@pytest.mark.long
@pytest.mark.parametrize(
    "format, subtype, error",
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "FLOAT", 0),
        ("FLAC", "PCM_24", 1e-6),
        ("AIFF", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 0.1),
        ("OGG", "OPUS", 0.1),
        ("MP3", None, 0.1),
    ],
)
def test_decode(recordings, format, subtype, error, tmp_path):
    samples = recordings[0].samples
    data = audio_bytes(np.stack([samples, -samples], 1), RATE, format, subtype)
    decoded, rate = decode(data)
    # Opus is always coded at 48 kHz; libsndfile gives back what its header says.
    assert rate == RATE and decoded.dtype == np.float32 and decoded.shape == (len(samples), 2)
    assert np.abs(decoded[:, 0] - samples).max() <= error
    assert np.corrcoef(decoded[:, 0], decoded[:, 1])[0, 1] < -0.99
    path = tmp_path / "audio.bin"  # the content tells, not the name
    path.write_bytes(data)
    np.testing.assert_array_equal(decode(str(path))[0], decoded)


@pytest.mark.parametrize("format, subtype", [("WAV", "PCM_16"), ("FLAC", "PCM_16")])
def test_decode_a_part(recordings, format, subtype):
    data = audio_bytes(recordings[0].samples, RATE, format, subtype)
    whole = decode(data)[0]
    np.testing.assert_array_equal(decode(data, 0.5, 0.25)[0], whole[8000:12_000])
    np.testing.assert_array_equal(decode(data, 0.5)[0], whole[8000:])
    seconds = len(whole) / RATE
    assert len(decode(data, 0.5, round(seconds - 0.5 + 0.004, 2))[0]) == len(whole) - 8000
    for offset, length, said in ((0.5, 99.0, "ends behind"), (99.0, None, "none of them")):
        with pytest.raises(InputError, match=said):
            decode(data, offset, length)


def test_decode_refuses_damage(recordings):
    samples = recordings[0].samples
    flac = audio_bytes(samples, RATE, "FLAC", "PCM_16")
    wav = audio_bytes(samples, RATE, "WAV", "PCM_16")
    bad = samples.copy()
    bad[100] = np.nan
    for data, said in (
        (b"", "0 bytes"),
        (wav[: len(wav) // 2], "cut short"),
        (flac[: len(flac) // 2], "cut short|cannot be decoded"),
        (flac[:4] + bytes(500), "cannot be decoded"),
        (audio_bytes(bad, RATE, "WAV", "FLOAT"), "NaN"),
        (audio_bytes(np.zeros(0), RATE, "WAV"), "0 samples"),
    ):
        with pytest.raises(InputError, match=said):
            decode(data)
    with pytest.raises(InputError, match="cannot be opened"):
        decode("/nowhere/at/all.flac")


def mp3_bytes(samples: np.ndarray, rate: int, mode: str) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="MP3", bitrate_mode=mode, compression_level=0.5)
    return buffer.getvalue()


ID3 = b"ID3\4\0\0\0\0\1\0" + bytes(128)


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
@pytest.mark.parametrize("rate, channels", [(8000, 1), (16_000, 2), (44_100, 1), (48_000, 2)])
def test_mp3_without_a_length_is_decoded_whole(mode, rate, channels, tmp_path):
    """Loud, then silent, then quiet: what the first frame's bit rate says of the length is wrong."""
    noise = np.random.default_rng(0).normal(0, 0.2, (rate, channels))
    samples = np.concatenate([noise, np.zeros_like(noise), 0.1 * noise])
    tagged = mp3_bytes(samples, rate, mode)
    whole = decode(tagged)[0]
    assert len(whole) == len(samples)
    bare = tagged[mp3.read_frame(tagged, 0).size :]
    decoded = decode(bare)[0]
    # The tag also told the encoder's delay of 1105 samples; 529 are the decoder's own.
    assert 576 <= len(decoded) - len(whole) < 576 + 2 * 1152
    np.testing.assert_allclose(decoded[576 + 3000 :][: len(whole) - 3000], whole[3000:], atol=1e-4)
    path = tmp_path / "a.mp3"
    path.write_bytes(bare)
    part = decode(str(path), 0.5, 0.25)[0]
    np.testing.assert_allclose(part, decoded[rate // 2 :][: rate // 4], atol=1e-4)
    id3v1 = b"TAG" + bytes(125)
    for same in (ID3 + bare, bare + id3v1, ID3 + ID3 + bare + id3v1):
        np.testing.assert_array_equal(decode(same)[0], decoded)
    # Files joined end to end: the first one's tag does not tell of the second.
    assert len(decode(tagged + tagged)[0]) >= 2 * len(samples)
    assert len(decode(bare + ID3 + bare)[0]) >= 2 * len(samples)
    for cut in (tagged[: len(tagged) // 2], bare[:-7]):
        with pytest.raises(InputError, match="cut short"):
            decode(cut)


def test_mpeg_that_is_no_mp3_goes_to_ffmpeg(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for data in (b"\xff\xfd\x90\x04" * 300, ID3 + bytes(500), b"\xff\xfb\x00\x00" * 300):
        with pytest.raises(InputError, match="ffmpeg"):
            decode(data)


def test_lengths_that_headers_do_not_tell(recordings):
    samples = recordings[0].samples
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


def test_ffmpeg_reads_the_rest(recordings, monkeypatch, tmp_path):
    """A stand-in for the program: it gets the bytes in a file and writes float samples to another."""
    monkeypatch.setenv("PATH", str(tmp_path))
    m4a = bytes(4) + b"ftypM4A " + b"not really"
    with pytest.raises(InputError, match="ffmpeg, which reads the rest, is not on PATH"):
        decode(m4a)
    program = tmp_path / "ffmpeg"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "data = open(sys.argv[sys.argv.index('-i') + 1], 'rb').read()\n"
        "if data.endswith(b'broken'): sys.exit('moov atom not found')\n"
        "import numpy, soundfile\n"
        "assert 'pcm_f32le' in sys.argv and data[4:8] == b'ftyp'\n"
        "soundfile.write(sys.argv[-1], numpy.full((4410, 2), 0.25), 44100, subtype='FLOAT')\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    samples, rate = decode(m4a)
    assert rate == 44_100 and samples.shape == (4410, 2) and (samples == 0.25).all()
    path = tmp_path / "a.m4a"
    path.write_bytes(m4a)
    assert len(decode(str(path), 0.05)[0]) == 2205
    with pytest.raises(InputError, match="moov atom not found"):
        decode(m4a + b"broken")


def test_channels_are_averaged():
    stereo = np.stack([tone(0.1), -0.5 * tone(0.1)], 1)
    np.testing.assert_allclose(to_mono(stereo), 0.25 * tone(0.1), atol=1e-7)
    assert to_mono(stereo[:, :1]).shape == (len(stereo),)


@pytest.mark.parametrize("rate", [8000, 22_050, 24_000, 44_100, 48_000])
def test_resampling_keeps_what_is_below_half_the_rate(rate):
    low, out = tone(1, rate, 1000), resample(tone(1, rate, 1000), rate, RATE)
    assert out.dtype == np.float32 and abs(len(out) - RATE) <= 1
    wanted = tone(1, RATE, 1000)[: len(out)]
    middle = slice(1600, -1600)
    assert np.abs(out[middle] - wanted[: len(out)][middle]).max() < 1e-3 * np.abs(low).max() * 10
    if rate > 2 * 9000:
        above = resample(tone(1, rate, 9000), rate, RATE)[middle]
        assert np.abs(above).max() < 1e-5  # 80 dB down
    assert resample(low, RATE, RATE) is low


def test_loudness_agrees_with_the_standard(recordings):
    for one in recordings:
        samples = soundfile_rate(one.samples)
        assert abs(loudness(samples, 48_000) - bs1770(samples)) < 0.1


def soundfile_rate(samples: np.ndarray) -> np.ndarray:
    return resample(samples, RATE, 48_000)


def test_loudness_is_brought_to_the_level(recordings):
    limited = 0
    for one in recordings:
        for level in (0.03, 1.0):
            done = process(one.samples[:, None] * level, RATE, 48_000, one.text, AudioSettings())
            assert isinstance(done, Processed) and np.abs(done.waveform).max() <= 1
            limited += done.peak_limited
            found = bs1770(done.waveform)
            if done.peak_limited:
                assert found < -16 and np.abs(done.waveform).max() > 0.999
            else:
                assert abs(found + 16) < 0.1
    assert 0 < limited < 2 * len(recordings)
    quieter = process(
        recordings[0].samples[:, None], RATE, RATE, "x", AudioSettings(loudness=-30.0)
    )
    assert abs(loudness(quieter.waveform, RATE) + 30) < 0.1 and not quieter.peak_limited
    untouched = process(recordings[0].samples[:, None], RATE, RATE, "x", OFF)
    np.testing.assert_array_equal(untouched.waveform, recordings[0].samples)
    assert untouched.gain_db is None


@pytest.mark.parametrize("seconds", [0.005, 0.1, 0.399, 0.4, 0.401])
def test_loudness_of_less_than_a_block(seconds):
    done = process(tone(seconds)[:, None], RATE, RATE, "x", AudioSettings(max_silence=None))
    assert isinstance(done, Processed) and np.isfinite(done.gain_db)
    if seconds > 0.3:  # the filter has settled: a sine's loudness follows its level
        assert done.gain_db == pytest.approx(-16 - (20 * math.log10(0.1) - 3.7), abs=0.5)


def test_loudness_of_any_length():
    """Rounding in a block's length must not make it longer than the audio."""
    noise = (0.1 * np.random.default_rng(0).standard_normal(500)).astype("f4")
    for rate in (16_000, 24_000, 48_000):
        for samples in range(5, 500, 9):
            assert -40 < loudness(noise[:samples], rate) < 0


@pytest.mark.parametrize("noise_db", [None, -60, -45, -30])
def test_silence_is_capped_and_speech_never_cut(recordings, noise_db):
    random = np.random.default_rng(0)
    cut = 0
    for one in recordings:
        lead, tail = round(0.9 * RATE), round(1.3 * RATE)
        samples = np.concatenate([np.zeros(lead), one.samples, np.zeros(tail)]).astype("f4")
        if noise_db is not None:
            level = np.sqrt((one.samples**2).mean()) * 10 ** (noise_db / 20)
            samples += level * random.standard_normal(len(samples)).astype("f4")
        start, stop = speech_span(samples, RATE, 0.25)
        assert start <= lead and stop >= lead + len(one.samples)
        if noise_db in (None, -60):
            kept = 0.25 * RATE + 160  # frames of 10 ms
            assert start >= lead - kept and stop <= lead + len(one.samples) + kept
        cut += start > 0
    assert cut == len(recordings) or noise_db in (-45, -30)


def test_silence_within_the_cap_or_nothing_but_silence_stays(recordings):
    samples = recordings[0].samples
    assert speech_span(samples, RATE, 0.25) == (0, len(samples))
    assert speech_span(np.zeros(5000, "f4"), RATE, 0.25) == (0, 5000)
    assert speech_span(np.full(77, 0.3, "f4"), RATE, 0.1) == (0, 77)
    # A pause between words is not touched, and a quiet word after a loud one is speech.
    gap = np.zeros(RATE, "f4")
    two = np.concatenate([gap, samples, gap, 0.05 * samples, gap])
    start, stop = speech_span(two, RATE, 0.1)
    assert start <= RATE and stop >= len(two) - RATE and stop - start < len(two) - 1.5 * RATE


def filtered(name: str, value: float) -> AudioSettings:
    return AudioSettings(**{"loudness": None, "max_silence": None, name: value})


@pytest.mark.parametrize(
    "reason, settings",
    [
        ("too_short", filtered("min_seconds", 1.01)),
        ("too_long", filtered("max_seconds", 0.99)),
        ("chars_per_second_low", filtered("min_chars_per_second", 4.1)),
        ("chars_per_second_high", filtered("max_chars_per_second", 3.9)),
        ("clipped", filtered("max_clipped", 0.09)),
    ],
)
def test_filters(reason, settings):
    samples = tone(1.0)
    samples[::10] = 1.0
    assert process(samples[:, None], RATE, RATE, "four", settings) == reason
    assert reason in REASONS
    limit = {name: value for name, value in vars(settings).items() if value is not None}
    ((name, value),) = limit.items()
    other = value + (-0.02 if name.startswith("min") else 0.02) * (10 if "chars" in name else 1)
    kept = process(samples[:, None], RATE, RATE, "four", filtered(name, other))
    assert isinstance(kept, Processed) and kept.seconds == 1.0


def test_audio_of_hardly_a_sample():
    one = np.full((1, 1), 0.5, "f4")
    assert process(one, 96_000, RATE, "x", OFF) == "silent"  # no sample is left at the lower rate
    assert process(one, 96_000, RATE, "x", filtered("min_seconds", 0.1)) == "too_short"
    assert isinstance(process(one, RATE, RATE, "x", OFF), Processed)


@pytest.mark.parametrize("settings", [AudioSettings(), OFF])
def test_silence_is_dropped(settings):
    for samples in (np.zeros((8000, 1), "f4"), np.full((8000, 2), 1e-5, "f4")):
        assert process(samples, RATE, RATE, "x", settings) == "silent"


def test_batches_are_encoded_as_singles(recordings):
    import torch

    codec = build_codec("mel_dct", device="cuda")  # stays on the CPU, where there is nothing else
    batch = torch.stack([torch.from_numpy(one.samples[:8000]) for one in recordings])
    encoded = codec.encode_batch(batch)
    assert encoded.shape == (len(recordings), 13, 128)
    for row, waveform in zip(encoded, batch, strict=True):
        assert (row - codec.encode(waveform)).abs().max() <= 1e-5
    for wrong in (batch[0], batch[:0]):
        with pytest.raises(InputError, match=r"shape \(B, samples\)"):
            codec.encode_batch(wrong)


def test_mpeg_frames_and_aac_are_told_apart():
    assert audio._is_mpeg_frame(b"\xff\xfb\x90\x00") and not audio._is_mpeg_frame(b"\xff\xf1\x50")
