"""Trains the vocoder of mel_dct on a folder of speech (wav, flac, mp3, ogg, g722), on the CPU.

    OMP_NUM_THREADS=1 python recipes/vocoder/train_vocoder.py SPEECH OUT

Writes OUT/vocoder.safetensors, which the codec name `mel_dct+OUT/vocoder.safetensors` reads. The same command again
continues after a kill, from OUT/checkpoint.pt, with the same crops.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from tqdm import tqdm  # noqa: E402

from torchtitan.models.dit_tts.bounded import read_pickle  # noqa: E402
from torchtitan.models.dit_tts.errors import report_input_errors, require  # noqa: E402
from torchtitan.models.dit_tts.files import atomic_file, save_weights  # noqa: E402
from torchtitan.models.dit_tts.speech.audio import decode, resample, to_mono  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.mel_dct import MelDctCodec  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.spectrogram import (  # noqa: E402
    HOP,
    hann_window,
    stft,
)
from torchtitan.models.dit_tts.speech.codec.spectrogram import SAMPLE_RATE as RATE  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.vocoder import (  # noqa: E402
    HIGHEST_PITCH,
    LOWEST_PITCH,
    PITCH_BINS,
    Vocoder,
    fill_pitch,
    pitch_bins,
)

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".g722")
FRAMES = 100  # of 10 ms, of a crop
LEARNING_RATE = 1.5e-3
RESOLUTIONS = ((200, 50), (512, 128), (1120, 280))  # window, hop, in samples
FLOOR = 1e-4  # added to amplitudes, where a full-scale sine has 1; the codec's own
SAVE_SECONDS = 60.0


@dataclass
class Speech:
    """All recordings, one behind another, each of whole frames."""

    samples: np.ndarray  # (frames * HOP,) int16
    pitch: np.ndarray  # (frames,) float32 Hz, straight lines where not voiced
    voiced: np.ndarray  # (frames,) bool


def read_speech(folder: Path, without: list[str], hours: float) -> Speech:
    """Recordings of the folder, in a random order, until there are enough hours, with their pitch by SwiftF0."""
    from swift_f0 import SwiftF0

    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    files = [path for path in files if not any(part in str(path) for part in without)]
    require(bool(files), f"{folder} has no recordings ({', '.join(SUFFIXES)}) to train on")
    tracker, parts, seconds = SwiftF0(threads=1, spin=False), [], 0.0
    for number in tqdm(np.random.default_rng(0).permutation(len(files)), desc="pitch"):
        samples, rate = decode(str(files[number]))
        wave = resample(to_mono(samples), rate, RATE)
        wave = np.pad(wave, (0, -len(wave) % HOP)).clip(-1, 1)
        found = tracker.detect(wave, RATE, fmin=LOWEST_PITCH, fmax=HIGHEST_PITCH)
        heard, times = found.confidence >= 0.5, found.timestamps
        middle = (np.arange(len(wave) // HOP) + 0.5) * HOP / RATE
        filled = fill_pitch(torch.from_numpy(found.pitch_hz), torch.from_numpy(heard)).numpy()
        pitch = np.interp(middle, times, filled).astype(np.float32)
        voiced = np.interp(middle, times, found.confidence) >= 0.5
        parts.append(((wave * 32767).astype(np.int16), pitch, voiced))
        seconds += len(wave) / RATE
        if seconds >= hours * 3600:
            break
    require(seconds > 2 * FRAMES * HOP / RATE, f"{seconds:.1f} s of speech are too short")
    return Speech(*map(np.concatenate, zip(*parts)))


@dataclass
class Batch:
    log_mel: Tensor  # (B, F, 80), of the latents, as the decoder has it
    waveform: Tensor  # (B, F * HOP)
    pitch: Tensor  # (B, F) Hz
    voiced: Tensor  # (B, F) 0 or 1
    noise: Tensor  # (B, F * HOP)


def draw_batch(speech: Speech, codec: MelDctCodec, rows: int, step: int) -> Batch:
    """Crops for one step, a function of the step alone. Half are played faster or slower, as other voices; levels
    vary; small noise on the latents stands for the errors of a model that makes them."""
    random = np.random.default_rng(step)
    waves, pitches, voices = [], [], []
    for _ in range(rows):
        speed = np.exp(random.uniform(-0.2, 0.35)) if random.random() < 0.5 else 1.0
        rate = round(RATE * speed)
        taken = math.ceil(FRAMES * rate / RATE) + 2
        first = int(random.integers(0, len(speech.pitch) - taken))
        wave = speech.samples[first * HOP : (first + taken) * HOP].astype(np.float32) / 32768
        wave = resample(wave, rate, RATE)[: FRAMES * HOP]
        gain = 10 ** (random.uniform(-14, 6) / 20)
        waves.append(wave * min(gain, 0.95 / max(np.abs(wave).max(), 1e-3)))
        places = (np.arange(FRAMES) + 0.5) * rate / RATE - 0.5 + first
        pitch = np.interp(places, np.arange(first, first + taken), speech.pitch[first:][:taken])
        pitches.append((pitch * rate / RATE).clip(LOWEST_PITCH, HIGHEST_PITCH))
        voices.append(speech.voiced[places.round().astype(int)])
    waveform, pitch, voiced = (
        torch.from_numpy(np.stack(each)).float() for each in (waves, pitches, voices)
    )
    generator = torch.Generator().manual_seed(step)
    latents = codec.encode_batch(waveform)
    spread = 0.15 * torch.rand(rows, 1, 1, generator=generator)
    latents = latents + spread * torch.randn(latents.shape, generator=generator)
    log_mel = torch.stack([codec.log_mel(each) for each in latents])
    noise = torch.randn(waveform.shape, generator=generator)
    return Batch(log_mel, waveform, pitch, voiced, noise)


def amplitudes(waveform: Tensor, window: int, hop: int) -> Tensor:
    """STFT amplitudes (B, frames, bins), a full-scale sine having 1."""
    shape = hann_window(window)
    found = torch.view_as_real(stft(waveform, shape, hop)) * (2 / float(shape.sum()))
    return (found.square().sum(-1) + 1e-12).sqrt()  # much faster backwards than abs()


def spectral_loss(made: Tensor, real: Tensor) -> Tensor:
    """Mean over the resolutions of the log amplitudes' L1 and of the spectral convergence (Yamamoto et al. 2020)."""
    losses = []
    for window, hop in RESOLUTIONS:
        wanted, found = (amplitudes(each, window, hop) for each in (real, made))
        losses.append(F.l1_loss((found + FLOOR).log(), (wanted + FLOOR).log()))
        losses.append((found - wanted).norm() / wanted.norm().clamp_min(FLOOR))
    return torch.stack(losses).sum() / len(RESOLUTIONS)


def pitch_loss(network: Vocoder, batch: Batch) -> Tensor:
    """Cross-entropy of the pitch's bins in voiced frames, and of voicing."""
    logits, voiced_logits = network.pitch_logits(batch.log_mel)
    distance = torch.arange(PITCH_BINS) - pitch_bins(batch.pitch)[..., None]
    wanted = (-(distance**2) / 2).softmax(-1)
    each = F.cross_entropy(logits.mT, wanted.mT, reduction="none")
    is_voiced = F.binary_cross_entropy_with_logits(voiced_logits, batch.voiced)
    return (each * batch.voiced).sum() / batch.voiced.sum().clamp_min(1) + is_voiced


def train(speech: Speech, network: Vocoder, checkpoint: Path, rows: int, steps: int) -> None:
    """Trains in place, from the checkpoint where there is one; rows: of a batch."""
    codec, parameters = MelDctCodec(), network.parameters()
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, (0.8, 0.99), weight_decay=0.01)
    first = 0
    if checkpoint.is_file():
        first, weights, moments = read_pickle(checkpoint)
        network.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    print(f"{len(speech.pitch) * HOP / RATE / 3600:.2f} h of speech; from step {first}")
    began = saved = time.monotonic()
    for step in range(first, steps):
        batch = draw_batch(speech, codec, rows, step)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(
            (step + 1) / 50, 1, 2 - 2 * step / steps
        )
        with torch.autocast("cpu", torch.bfloat16):
            given = batch.log_mel, batch.pitch, batch.voiced, batch.noise
            spectral = spectral_loss(network.filter_excitations(*given), batch.waveform)
            pitch = pitch_loss(network, batch)
        optimizer.zero_grad()
        (spectral + 0.2 * pitch).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        now, done = time.monotonic(), step + 1
        if now - saved > SAVE_SECONDS or done == steps:
            with atomic_file(checkpoint) as file:
                torch.save((done, network.state_dict(), optimizer.state_dict()), file)
            saved = now
        if done % 50 == 0:
            losses = f"spectral {spectral.item():.3f}, pitch {pitch.item():.3f}"
            print(f"step {done}: {losses}; {now - began:.0f} s", flush=True)


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("speech", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--without", nargs="*", default=[], help="parts of paths to leave out")
    parser.add_argument("--hours", type=float, default=0.7, help="of speech at most")
    parser.add_argument("--steps", type=int, default=5500)
    parser.add_argument("--batch", type=int, default=8, help="crops of a second")
    options = parser.parse_args(args)
    asked = f"--hours = {options.hours}"
    require(0 < options.hours <= 2, f"{asked}, but memory holds them; give at most 2")
    speech = read_speech(options.speech, options.without, options.hours)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    network = Vocoder()
    train(speech, network, options.out / "checkpoint.pt", options.batch, options.steps)
    tensors = {name: each.half() for name, each in network.state_dict().items()}
    save_weights(tensors, options.out / "vocoder.safetensors", {"format": "pt"})
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
