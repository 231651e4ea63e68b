"""mel_dct with a vocoder: the latents stay, the waveforms are the network's; its training goes on after a kill."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file

from recipes.vocoder.train_vocoder import main as train
from recipes.vocoder.train_vocoder import spectral_loss, widened
from tests.helpers.sentences import refused
from torchtitan.models.dit_tts.config.codec_name import from_any_folder, split_vocoder
from torchtitan.models.dit_tts.speech.audio import resample
from torchtitan.models.dit_tts.speech.codec import build_codec, codec_kind
from torchtitan.models.dit_tts.speech.codec.vocoder import (
    Vocoder,
    fill_pitch,
    likeliest_pitch,
    minimum_phase,
    pitch_bins,
    pulse_train,
)

RATE = 16_000


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Weights as they are first drawn, in half precision, of a network that hears a pitch everywhere."""
    torch.manual_seed(0)
    tensors = {name: each.half() for name, each in Vocoder().state_dict().items()}
    tensors["pitch.head.bias"][-1] = 20.0
    path = tmp_path_factory.mktemp("vocoder") / "my+vocoder.safetensors"
    save_file(tensors, path)
    return path


def speech(seconds: float, pitch: float) -> np.ndarray:
    """A buzz under a moving formant, with pauses, (samples,) float32."""
    time = np.arange(int(seconds * RATE)) / RATE
    formant = 900 + 500 * np.sin(4 * time)
    harmonics = pitch * np.arange(1, 30)
    gains = np.exp(-np.abs(harmonics[:, None] - formant) / 600)
    wave = (gains * np.sin(2 * np.pi * harmonics[:, None] * time)).sum(0)
    return (0.1 * wave * (np.sin(7 * time) > -0.7)).astype(np.float32)


def test_only_decoding_changes(weights):
    plain, codec = build_codec("mel_dct"), build_codec(f"mel_dct+{weights}")
    assert codec.fingerprint == plain.fingerprint and codec_kind(f"mel_dct+{weights}") == "mel_dct"
    wave = torch.from_numpy(speech(0.9, 150))
    latents = plain.encode(wave)
    assert torch.equal(codec.encode(wave), latents)
    found = codec.decode(latents)
    assert found.shape == (len(latents) * 640,) and found.abs().max() <= 1
    assert torch.equal(codec.decode(latents), found)  # its noise is always the same
    assert not torch.equal(plain.decode(latents), found)
    # Its level follows the latents even before any training: the mel bands' own.
    quiet = codec.decode(plain.encode(wave / 10))
    assert 5 < float(found.std() / quiet.std()) < 20
    wild = codec.decode(100 * torch.randn(5, 128, generator=torch.Generator().manual_seed(0)))
    assert wild.isfinite().all() and wild.abs().max() <= 1


def test_at_24_khz_the_latents_are_those_of_16(tmp_path):
    save_file(widened(24_000).state_dict(), tmp_path / "wide.safetensors")
    codec, narrow = (
        build_codec(f"mel_dct+{tmp_path}/wide.safetensors"),
        build_codec("mel_dct+vocoder"),
    )
    assert (codec.sample_rate, codec.hop_length, codec.frames_per_second) == (24_000, 960, 25)
    assert codec.fingerprint == narrow.fingerprint
    waves = np.stack([speech(2.0, pitch) for pitch in (110, 210)])
    latents = torch.stack([narrow.encode(torch.from_numpy(wave)) for wave in waves])
    wide = torch.from_numpy(np.stack([resample(wave, RATE, 24_000) for wave in waves]))
    assert float((codec.encode_batch(wide) - latents).std()) < 0.05 * float(latents.std())
    assert codec.encode(wide[0, :961]).shape == (2, 128)
    # Before any training it says what the one of 16 kHz says.
    for row in latents:
        one, other = narrow.decode(row), codec.decode(row)
        assert other.shape == (len(row) * 960,)
        again = narrow.encode(torch.from_numpy(resample(other.numpy(), 24_000, RATE)))
        assert float((again - narrow.encode(one)).std()) < 0.2 * float(row.std())


def test_only_what_a_recording_has_is_learned():
    time = torch.arange(24_000) / 24_000
    real, tops = torch.randn(2, 24_000) / 10, torch.tensor([10_000.0, 12_000.0])
    made = real + 0.1 * (2 * torch.pi * 11_000 * time).sin()
    losses = [float(spectral_loss(made[[row]], real[[row]], tops[[row]], 24_000)) for row in (0, 1)]
    assert losses[0] < 0.03 * losses[1]


def test_the_shipped_one_keeps_what_the_latents_say():
    codec, plain = build_codec("mel_dct+vocoder"), build_codec("mel_dct")
    for pitch in (95, 160, 230):
        latents = plain.encode(torch.from_numpy(speech(2.0, pitch)))
        again = plain.encode(codec.decode(latents))
        assert float((again - latents).std()) < 0.7 * float(latents.std())
        logits, voiced = codec.vocoder.pitch_logits(codec.log_mel(latents)[None])
        found = likeliest_pitch(logits)[voiced > 0]
        assert len(found) > 80 and abs(float(found.median()) / pitch - 1) < 0.05


def test_names(weights, monkeypatch):
    for codec, vocoder in (
        ("mel_dct", "vocoder"),
        ("mel_dct", "/a/b+c.safetensors"),
        ("/x+y/mel_dct_stats.json", "vocoder"),
    ):
        assert split_vocoder(f"{codec}+{vocoder}") == (codec, vocoder)
    for name in ("mel_dct", "my_mel_dct+vocoder", "/x+y/mel_dct_stats.json", "/a+vocoder.pth"):
        assert split_vocoder(name) == (name, "")
    monkeypatch.chdir(weights.parent)
    assert from_any_folder(f"mel_dct+{weights.name}") == f"mel_dct+{weights}"
    assert from_any_folder("mel_dct+vocoder") == "mel_dct+vocoder"


def test_files_that_are_no_vocoder(weights, tmp_path):
    tensors = load_file(weights)
    for spoilt, words in (
        (None, "No such file"),
        (dict(list(tensors.items())[1:]), "other names or shapes"),
        (tensors | {"pitch.head.bias": torch.zeros(5)}, "other names or shapes"),
        (tensors | {"pitch.head.bias": torch.full((129,), torch.nan)}, "not finite"),
    ):
        path = tmp_path / "spoilt.safetensors"
        path.unlink(missing_ok=True)
        if spoilt is not None:
            save_file(spoilt, path)
        refused(lambda: build_codec(f"mel_dct+{path}"), f"vocoder = {path}", words)


def test_the_pulses_have_the_pitch_and_power_that_are_asked():
    pitch, voiced = torch.tensor([[120.0] * 100, [250.0] * 100]), torch.ones(2, 100)
    voiced[1, 50:] = 0
    pulses = pulse_train(pitch, voiced, 160, RATE)
    assert pulses.shape == (2, 16_000) and pulses[1, 8200:].abs().max() == 0
    spectrum = torch.fft.rfft(pulses[0]).abs()
    wanted = torch.zeros(8001)
    wanted[120 : 120 * 66 + 1 : 120] = spectrum[120]  # 66 harmonics below 8 kHz, all alike
    torch.testing.assert_close(spectrum, wanted, atol=0.02 * float(spectrum[120]), rtol=0)
    for row in (pulses[0], pulses[1, :7900]):
        assert abs(float(row.square().mean()) - 1) < 0.02


def test_the_filter_of_one_pole_has_its_own_phase():
    response = 1 / (1 - 0.8 * torch.exp(-1j * torch.linspace(0, torch.pi, 321)))
    found = minimum_phase(response.abs().log())
    torch.testing.assert_close(found, response.angle(), atol=1e-4, rtol=0)


def test_pitch_there_and_back():
    pitch = torch.tensor([50.0, 123.4, 600.0])
    logits = -((torch.arange(128) - pitch_bins(pitch)[:, None]) ** 2)
    logits[1, 100] += 1  # a smaller peak elsewhere is not averaged in
    torch.testing.assert_close(likeliest_pitch(logits), pitch, rtol=0.02, atol=0)
    given, voiced = torch.tensor([9.0, 100, 9, 200, 9, 9, 9, 80, 9]), torch.zeros(9).bool()
    assert set(fill_pitch(given, voiced).tolist()) == {50.0}
    voiced[[1, 3, 7]] = True
    filled = [100, 100, 150, 200, 170, 140, 110, 80, 80]
    assert fill_pitch(given, voiced).tolist() == filled


@pytest.mark.long
@pytest.mark.parametrize("target", [16_000, 24_000])
def test_training_goes_on_as_if_nothing_had_happened(tmp_path, capsys, target):
    folder = tmp_path / "speech"
    folder.mkdir()
    for number, (rate, pitch) in enumerate([(16_000, 110), (22_050, 180), (16_000, 240)]):
        soundfile.write(folder / f"{number}.flac", speech(1.5, pitch), rate)
    (folder / "notes.txt").write_text("no recording")
    small = ["--batch=2", f"--sample-rate={target}", "--without", "2.flac"]

    def run(name: str, steps: int) -> dict[str, torch.Tensor]:
        assert train([str(folder), str(tmp_path / name), f"--steps={steps}", *small]) == 0
        return load_file(tmp_path / name / "vocoder.safetensors")

    whole = run("whole", 4)
    with pytest.MonkeyPatch.context() as patched:  # the process dies in its third step
        calls, real = [1, 1], torch.optim.AdamW.step
        patched.setattr(torch.optim.AdamW, "step", lambda s, *a: (calls.pop(), real(s, *a)))
        patched.setattr("recipes.vocoder.train_vocoder.SAVE_SECONDS", 0.0)
        with pytest.raises(IndexError):
            run("killed", 4)
    assert not (tmp_path / "killed/vocoder.safetensors").exists()
    for name, tensor in run("killed", 4).items():
        assert torch.equal(tensor, whole[name]), name
    assert "from step 2" in capsys.readouterr().out
    trained = build_codec(f"mel_dct+{tmp_path}/whole/vocoder.safetensors")
    assert trained.sample_rate == target and trained.decode(torch.zeros(3, 128)).isfinite().all()
    refused(lambda: train([str(tmp_path / "whole"), str(tmp_path / "no")]), "has no recordings")
    short = [str(folder), str(tmp_path / "no"), "--without", "0.flac", "1.flac"]
    refused(lambda: train(short), "1.5 s of speech are too short")
