"""Trains the vocoder of mel_dct on a folder of speech (wav, flac, mp3, ogg, g722), on the CPU.

    OMP_NUM_THREADS=1 python recipes/vocoder/train_vocoder.py SPEECH OUT

Writes OUT/vocoder.safetensors, which the codec name `mel_dct+OUT/vocoder.safetensors` reads. The same command again
continues after a kill, from OUT/checkpoint.pt, with the same crops. With --sample-rate 24000 it begins from the shipped
vocoder of 16 kHz. Of the sound above 8 kHz only what a recording has is learned, so recordings of 22 kHz serve, too.
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
from torchtitan.models.dit_tts.speech.codec.mel_dct import (  # noqa: E402
    VOCODER_FOLDER,
    VOCODERS,
    MelDctCodec,
)
from torchtitan.models.dit_tts.speech.codec.spectrogram import SAMPLE_RATE as RATE  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.spectrogram import hann_window, stft  # noqa: E402
from torchtitan.models.dit_tts.speech.codec.vocoder import (  # noqa: E402
    HIGHEST_PITCH,
    LOWEST_PITCH,
    PITCH_BINS,
    Vocoder,
    fill_pitch,
    load_vocoder,
    pitch_bins,
)

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".g722")
FRAMES = 100  # of 10 ms, of a crop: a second
LEARNING_RATES = {16_000: 1.5e-3, 24_000: 5e-4}  # the latter goes on from the shipped weights
RESOLUTIONS = ((200, 50), (512, 128), (1120, 280))  # window, hop, in samples at 16 kHz
PASSBAND = 0.91  # of the lower rate's half: what a change of the rate leaves as it is
FLOOR = 1e-4  # added to amplitudes, where a full-scale sine has 1; the codec's own
SAVE_SECONDS = 60.0


@dataclass
class Speech:
    """All recordings, one behind another, each of whole frames."""

    rate: int  # Hz
    samples: np.ndarray  # (frames * hop,) int16
    pitch: np.ndarray  # (frames,) float32 Hz, straight lines where not voiced
    voiced: np.ndarray  # (frames,) bool
    top: np.ndarray  # (frames,) float32 Hz: the recording has no sound above

    @property
    def hop(self) -> int:
        return self.rate // FRAMES


def passband(rate: int, other: int) -> float:
    """Highest frequency in Hz that stays from one rate to another."""
    return min(rate, other) / 2 * (1 if rate == other else PASSBAND)


def read_speech(folder: Path, without: list[str], hours: float, target: int) -> Speech:
    """Recordings of the folder at a rate, in a random order, until there are enough hours, with their pitch by SwiftF0."""
    from swift_f0 import SwiftF0

    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    files = [path for path in files if not any(part in str(path) for part in without)]
    require(bool(files), f"{folder} has no recordings ({', '.join(SUFFIXES)}) to train on")
    tracker, parts, seconds, hop = SwiftF0(threads=1, spin=False), [], 0.0, target // FRAMES
    for number in tqdm(np.random.default_rng(0).permutation(len(files)), desc="pitch"):
        samples, rate = decode(str(files[number]))
        wave = resample(to_mono(samples), rate, target)
        wave = np.pad(wave, (0, -len(wave) % hop)).clip(-1, 1)
        found = tracker.detect(
            resample(wave, target, RATE), RATE, fmin=LOWEST_PITCH, fmax=HIGHEST_PITCH
        )
        heard, times = found.confidence >= 0.5, found.timestamps
        middle = (np.arange(len(wave) // hop) + 0.5) / FRAMES
        filled = fill_pitch(torch.from_numpy(found.pitch_hz), torch.from_numpy(heard)).numpy()
        pitch = np.interp(middle, times, filled).astype(np.float32)
        voiced = np.interp(middle, times, found.confidence) >= 0.5
        top = np.full(len(pitch), passband(rate, target), np.float32)
        parts.append(((wave * 32767).astype(np.int16), pitch, voiced, top))
        seconds += len(wave) / target
        if seconds >= hours * 3600:
            break
    require(seconds > 2, f"{seconds:.1f} s of speech are too short")
    return Speech(target, *map(np.concatenate, zip(*parts)))


@dataclass
class Batch:
    log_mel: Tensor  # (B, F, 80), of the latents, as the decoder has it
    waveform: Tensor  # (B, F * hop)
    pitch: Tensor  # (B, F) Hz
    voiced: Tensor  # (B, F) 0 or 1
    noise: Tensor  # (B, F * hop)
    top: Tensor  # (B,) Hz, up to which the waveform is to be learned


def draw_batch(speech: Speech, codec: MelDctCodec, rows: int, step: int) -> Batch:
    """Crops for one step, a function of the step alone. Half are played faster or slower, as other voices; levels
    vary; small noise on the latents stands for the errors of a model that makes them."""
    random, own, hop = np.random.default_rng(step), speech.rate, speech.hop
    waves, pitches, voices, heard, tops = [], [], [], [], []
    for _ in range(rows):
        speed = np.exp(random.uniform(-0.2, 0.35)) if random.random() < 0.5 else 1.0
        rate = round(own * speed)
        taken = math.ceil(FRAMES * rate / own) + 2
        first = int(random.integers(0, len(speech.pitch) - taken))
        wave = speech.samples[first * hop : (first + taken) * hop].astype(np.float32) / 32768
        wave = resample(wave, rate, own)[: FRAMES * hop]
        gain = 10 ** (random.uniform(-14, 6) / 20)
        waves.append(wave * min(gain, 0.95 / max(np.abs(wave).max(), 1e-3)))
        heard.append(resample(waves[-1], own, RATE))
        tops.append(min(passband(rate, own), speech.top[first:][:taken].min() * rate / own))
        places = (np.arange(FRAMES) + 0.5) * rate / own - 0.5 + first
        pitch = np.interp(places, np.arange(first, first + taken), speech.pitch[first:][:taken])
        pitches.append((pitch * rate / own).clip(LOWEST_PITCH, HIGHEST_PITCH))
        voices.append(speech.voiced[places.round().astype(int)])
    waveform, pitch, voiced, given, top = (
        torch.from_numpy(np.stack(each)).float() for each in (waves, pitches, voices, heard, tops)
    )
    generator = torch.Generator().manual_seed(step)
    latents = codec.encode_batch(given)
    spread = 0.15 * torch.rand(rows, 1, 1, generator=generator)
    latents = latents + spread * torch.randn(latents.shape, generator=generator)
    log_mel = torch.stack([codec.log_mel(each) for each in latents])
    noise = torch.randn(waveform.shape, generator=generator)
    if own == RATE:  # its latents show where there is no sound
        top = torch.full_like(top, RATE / 2)
    return Batch(log_mel, waveform, pitch, voiced, noise, top)


def amplitudes(waveform: Tensor, window: int, hop: int) -> Tensor:
    """STFT amplitudes (B, frames, bins), a full-scale sine having 1."""
    shape = hann_window(window)
    found = torch.view_as_real(stft(waveform, shape, hop)) * (2 / float(shape.sum()))
    return (found.square().sum(-1) + 1e-12).sqrt()  # much faster backwards than abs()


def spectral_loss(made: Tensor, real: Tensor, top: Tensor, rate: int) -> Tensor:
    """Mean over the resolutions of the log amplitudes' L1 and of the spectral convergence (Yamamoto et al. 2020), both of
    frequencies up to `top` (B,) in Hz."""
    losses = []
    for window, hop in RESOLUTIONS:
        window, hop = window * rate // RATE, hop * rate // RATE
        is_learned = torch.arange(window // 2 + 1) * (rate / window) <= top[:, None, None]
        wanted, found = (amplitudes(each, window, hop) * is_learned for each in (real, made))
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


def widened(rate: int) -> Vocoder:
    """The shipped vocoder of 16 kHz at a higher rate, whose further bins begin as the last ones of before."""
    shipped = load_vocoder(VOCODER_FOLDER / f"{VOCODERS[RATE]}.safetensors")
    network, tensors = Vocoder(rate), shipped.state_dict()
    # Two bins from half the rate, where a filter's phase has no meaning.
    taken = torch.arange(network.bins).clamp_max(shipped.bins - 3)
    for name in ("filters.head.weight", "filters.head.bias"):
        tensors[name] = tensors[name].unflatten(0, (3, shipped.bins))[:, taken].flatten(0, 1)
    # Both excitations have unit power, of which a hertz has less.
    more = math.log(rate / RATE) / 2
    tensors["filters.head.bias"].unflatten(0, (3, network.bins))[[0, 2]] += more
    network.load_state_dict(tensors)
    return network


def train(speech: Speech, network: Vocoder, checkpoint: Path, rows: int, steps: int) -> None:
    """Trains in place, from the checkpoint where there is one; rows: of a batch."""
    codec, parameters = MelDctCodec(), network.parameters()
    optimizer = torch.optim.AdamW(parameters, betas=(0.8, 0.99), weight_decay=0.01)
    first = 0
    if checkpoint.is_file():
        first, weights, moments = read_pickle(checkpoint)
        network.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    print(f"{len(speech.pitch) / FRAMES / 3600:.2f} h of speech; from step {first}")
    began = saved = time.monotonic()
    for step in range(first, steps):
        batch = draw_batch(speech, codec, rows, step)
        optimizer.param_groups[0]["lr"] = LEARNING_RATES[speech.rate] * min(
            (step + 1) / 50, 1, 2 - 2 * step / steps
        )
        with torch.autocast("cpu", torch.bfloat16):
            given = batch.log_mel, batch.pitch, batch.voiced, batch.noise
            made = network.filter_excitations(*given)
            spectral = spectral_loss(made, batch.waveform, batch.top, speech.rate)
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
    parser.add_argument("--sample-rate", type=int, choices=VOCODERS, default=RATE, help="Hz")
    parser.add_argument("--batch", type=int, default=8, help="crops of a second")
    options = parser.parse_args(args)
    asked = f"--hours = {options.hours}"
    require(0 < options.hours <= 2, f"{asked}, but memory holds them; give at most 2")
    speech = read_speech(options.speech, options.without, options.hours, options.sample_rate)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    network = Vocoder() if options.sample_rate == RATE else widened(options.sample_rate)
    train(speech, network, options.out / "checkpoint.pt", options.batch, options.steps)
    tensors = {name: each.half() for name, each in network.state_dict().items()}
    save_weights(tensors, options.out / "vocoder.safetensors", {"format": "pt"})
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
