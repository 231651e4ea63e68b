"""Trains the vocoder of mel_dct on a folder of speech (wav, flac, mp3, ogg), on the CPU.

    OMP_NUM_THREADS=1 python recipes/vocoder/train_vocoder.py SPEECH OUT

OUT gets speech-*.npz (the samples and their pitch, by SwiftF0), checkpoint.pt, and at the end
vocoder.safetensors, which the codec name `mel_dct+OUT/vocoder.safetensors` reads. The same command
again continues after a kill, with the same crops. The network, its input and its excitations:
torchtitan/models/dit_tts/speech/codec/vocoder.py.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import (  # noqa: E402
    binary_cross_entropy_with_logits,
    cross_entropy,
    l1_loss,
)
from tqdm import tqdm  # noqa: E402

from torchtitan.models.dit_tts.bounded import read_arrays, read_pickle  # noqa: E402
from torchtitan.models.dit_tts.errors import InputError, report_input_errors, require  # noqa: E402
from torchtitan.models.dit_tts.files import atomic_file, fingerprint, save_weights  # noqa: E402
from torchtitan.models.dit_tts.speech.audio import decode, resample, to_mono  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.mel_dct import ANALYSIS, MelDctCodec  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.spectrogram import hann_window, stft  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.vocoder import (  # noqa: E402
    HIGHEST_PITCH,
    LOWEST_PITCH,
    PITCH_BINS,
    Vocoder,
    fill_pitch,
    pitch_bins,
)

RATE, HOP = ANALYSIS.sample_rate, ANALYSIS.hop
SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".g722")
RESOLUTIONS = ((200, 50), (512, 128), (1120, 280))  # window, hop, in samples
FLOOR = 1e-4  # added to amplitudes, where a full-scale sine has 1; the codec's own
SAVE_SECONDS = 60.0


@dataclass
class Speech:
    """All recordings, one behind another, each of whole frames."""

    samples: np.ndarray  # (frames * HOP,) int16
    pitch: np.ndarray  # (frames,) float32 Hz, straight lines where not voiced
    voiced: np.ndarray  # (frames,) bool


def read_speech(options: argparse.Namespace) -> Speech:
    """Recordings of the folder, in a random order, until there are enough hours; read once, then from OUT."""
    folder, without, hours = options.speech, options.without, options.hours
    asked = fingerprint(str(folder.resolve()), *without, str(hours))
    cache = options.out / f"speech-{asked[:8]}.npz"
    if not cache.is_file():
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
        files = [path for path in files if not any(part in str(path) for part in without)]
        if not files:
            raise InputError(f"{folder} has no recordings ({', '.join(SUFFIXES)}) to train on")
        with atomic_file(cache) as file:
            np.savez(file, **_read(files, hours))
    return Speech(**read_arrays(cache))


def _read(files: list[Path], hours: float) -> dict[str, np.ndarray]:
    from swift_f0 import SwiftF0

    tracker, parts, frames = SwiftF0(threads=1, spin=False), [], 0
    for number in tqdm(np.random.default_rng(0).permutation(len(files)), desc="pitch"):
        samples, rate = decode(str(files[number]))
        wave = resample(to_mono(samples), rate, RATE)
        wave = np.pad(wave, (0, -len(wave) % HOP)).clip(-1, 1)
        found = tracker.detect(wave, RATE, fmin=LOWEST_PITCH, fmax=HIGHEST_PITCH)
        middle = (np.arange(len(wave) // HOP) + 0.5) * HOP / RATE
        voiced = np.interp(middle, found.timestamps, found.confidence) >= 0.5
        pitch = np.interp(
            middle, found.timestamps, fill_pitch(found.pitch_hz, found.confidence >= 0.5)
        )
        parts.append(((wave * 32767).astype(np.int16), pitch.astype(np.float32), voiced))
        frames += len(voiced)
        if frames * HOP / RATE >= hours * 3600:
            break
    return dict(zip(("samples", "pitch", "voiced"), map(np.concatenate, zip(*parts)), strict=True))


@dataclass
class Batch:
    log_mel: Tensor  # (B, F, 80), of the latents, as the decoder has it
    waveform: Tensor  # (B, F * HOP)
    pitch: Tensor  # (B, F) Hz
    voiced: Tensor  # (B, F) 0 or 1
    noise: Tensor  # (B, F * HOP)


def draw_batch(speech: Speech, codec: MelDctCodec, rows: int, frames: int, step: int) -> Batch:
    """Crops for one step, a function of the step alone. Half are played faster or slower, as other voices; levels
    vary; small noise on the latents stands for the errors of a model that makes them."""
    random = np.random.default_rng(step)
    waves, pitches, voices = [], [], []
    for _ in range(rows):
        speed = np.exp(random.uniform(-0.2, 0.35)) if random.random() < 0.5 else 1.0
        rate = round(RATE * speed)
        taken = math.ceil(frames * rate / RATE) + 2
        first = int(random.integers(0, len(speech.pitch) - taken))
        wave = speech.samples[first * HOP : (first + taken) * HOP].astype(np.float32) / 32768
        wave = resample(wave, rate, RATE)[: frames * HOP]
        gain = 10 ** (random.uniform(-14, 6) / 20)
        waves.append(wave * min(gain, 0.95 / max(np.abs(wave).max(), 1e-3)))
        places = (np.arange(frames) + 0.5) * rate / RATE - 0.5 + first
        pitch = np.interp(places, np.arange(first, first + taken), speech.pitch[first:][:taken])
        pitches.append((pitch * rate / RATE).clip(LOWEST_PITCH, HIGHEST_PITCH))
        voices.append(speech.voiced[places.round().astype(int)])
    waveform = torch.from_numpy(np.stack(waves)).float()
    generator = torch.Generator().manual_seed(step)
    latents = codec.encode_batch(waveform)
    spread = 0.15 * torch.rand(rows, 1, 1, generator=generator)
    latents = latents + spread * torch.randn(latents.shape, generator=generator)
    return Batch(
        torch.stack([codec.log_mel(each) for each in latents]),
        waveform,
        torch.from_numpy(np.stack(pitches)).float(),
        torch.from_numpy(np.stack(voices)).float(),
        torch.randn(waveform.shape, generator=generator),
    )


def amplitudes(waveform: Tensor, window: int, hop: int) -> Tensor:
    """STFT amplitudes (B, frames, bins), a full-scale sine having 1."""
    shape = hann_window(window)
    found = torch.view_as_real(stft(waveform, shape, hop)) * (2 / float(shape.sum()))
    return (found.square().sum(-1) + 1e-12).sqrt()  # much faster backwards than abs()


def spectral_loss(made: Tensor, real: Tensor) -> Tensor:
    """Mean over the resolutions of the log amplitudes' L1 and of the spectral convergence (Yamamoto et al. 2020)."""
    losses = []
    for window, hop in RESOLUTIONS:
        with torch.no_grad():
            wanted = amplitudes(real, window, hop)
        found = amplitudes(made, window, hop)
        losses.append(l1_loss((found + FLOOR).log(), (wanted + FLOOR).log()))
        losses.append((found - wanted).norm() / wanted.norm().clamp_min(FLOOR))
    return torch.stack(losses).sum() / len(RESOLUTIONS)


def pitch_loss(network: Vocoder, batch: Batch) -> Tensor:
    """Cross-entropy of the pitch's bins in voiced frames, and of voicing."""
    logits, voiced_logits = network.pitch_logits(batch.log_mel)
    distance = torch.arange(PITCH_BINS) - pitch_bins(batch.pitch)[..., None]
    wanted = (-(distance**2) / 2).softmax(-1)
    each = cross_entropy(logits.mT, wanted.mT, reduction="none")
    is_voiced = binary_cross_entropy_with_logits(voiced_logits, batch.voiced)
    return (each * batch.voiced).sum() / batch.voiced.sum().clamp_min(1) + is_voiced


class Training:
    """The network and its optimizer: one step at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.options, self.step = options, 0
        self.network = Vocoder(ANALYSIS)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=options.lr, betas=(0.8, 0.99), weight_decay=0.01
        )

    def advance(self, batch: Batch) -> dict[str, float]:
        done = self.step / self.options.steps
        rate = self.options.lr * min((self.step + 1) / 50, 1.0, 2 * (1 - done))
        self.optimizer.param_groups[0]["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            given = batch.log_mel, batch.pitch, batch.voiced, batch.noise
            made = self.network.filter_excitations(*given)
            losses = {
                "spectral": spectral_loss(made, batch.waveform),
                "pitch": pitch_loss(self.network, batch),
            }
        self.optimizer.zero_grad()
        (losses["spectral"] + 0.2 * losses["pitch"]).backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return {name: float(loss.detach()) for name, loss in losses.items()}

    def save(self, path: Path) -> None:
        parts = self.network.state_dict(), self.optimizer.state_dict()
        with atomic_file(path) as file:
            torch.save({"step": self.step, "parts": parts}, file)

    def load(self, path: Path) -> None:
        content = read_pickle(path)
        self.step = content["step"]
        self.network.load_state_dict(content["parts"][0])
        self.optimizer.load_state_dict(content["parts"][1])


def lines_of(training: Training, speech: Speech, codec: MelDctCodec) -> Iterator[str]:
    options, began = training.options, time.monotonic()
    saved = began
    while training.step < options.steps:
        batch = draw_batch(speech, codec, options.batch, options.frames, training.step)
        losses = training.advance(batch)
        now = time.monotonic()
        if now - saved > SAVE_SECONDS or training.step == options.steps:
            training.save(options.out / "checkpoint.pt")
            saved = now
        if training.step % 50 == 0:
            shown = ", ".join(f"{name} {value:.3f}" for name, value in losses.items())
            yield f"step {training.step}: {shown}; {now - began:.0f} s"


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("speech", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--without", nargs="*", default=[], help="parts of paths to leave out")
    parser.add_argument("--hours", type=float, default=1.0, help="of speech at most")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--frames", type=int, default=100, help="of 10 ms, of a crop")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    options = parser.parse_args(args)
    asked = f"--hours = {options.hours}"
    require(0 < options.hours <= 2, f"{asked}, but memory holds them; give at most 2")
    options.out.mkdir(parents=True, exist_ok=True)
    speech = read_speech(options)
    seconds = len(speech.pitch) * HOP / RATE
    require(seconds * 25 > options.frames, f"{seconds:.1f} s of speech are too short; give minutes")
    training = Training(options)
    if (options.out / "checkpoint.pt").is_file():
        training.load(options.out / "checkpoint.pt")
    print(f"{seconds / 3600:.2f} h of speech; from step {training.step}")
    for line in lines_of(training, speech, MelDctCodec()):
        print(line, flush=True)
    tensors = {name: each.half() for name, each in training.network.state_dict().items()}
    save_weights(tensors, options.out / "vocoder.safetensors", {"format": "pt"})
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
