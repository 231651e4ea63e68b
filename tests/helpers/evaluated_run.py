"""An evaluation without a trained model: a miniature LibriTTS-R tree, a codec that keeps lengths, and
systems whose speech is noise of the right or another utterance's length."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import soundfile
import torch

from tests.helpers import duration_recognizer
from tests.helpers.row_model import CHANNELS
from tests.helpers.speech_corpora import AS_IS, tone
from titan_tts.cli import main
from titan_tts.speak.lengths import Lengths
from titan_tts.speak.load_run import LoadedRun
from titan_tts.speak.synthesizer import Synthesizer
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.speech.scoring.interface import Sound

RATE, HOP = 8000, 320
SCRIPT = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"

# Speaker, text as a corpus has it, words as they are said.
UTTERANCES = [
    ("84", 'In 1887, he paid "$23".', "in eighteen eighty seven he paid twenty three dollars"),
    ("84", "Mr. Brown's dog - is it 5?", "mister brown's dog is it five"),
    ("84", "ONE o'clock; (two) cats.", "one o'clock two cats"),
    ("9", f"Nothing {SCRIPT}", "nothing script script document title equals taken image"),
    ("9", "Yes!", "yes"),
]


@dataclass
class LengthCodec:
    """Latents have the mean of each frame; only lengths come back as they were."""

    name: str = "lengths"
    sample_rate: int = RATE
    hop_length: int = HOP
    latent_channels: int = CHANNELS
    frames_per_second: float = RATE / HOP
    fingerprint: str = "lengths"

    def encode(self, waveform: torch.Tensor) -> torch.Tensor:
        frames = torch.nn.functional.pad(waveform, (0, -len(waveform) % HOP)).unflatten(
            0, (-1, HOP)
        )
        return frames.abs().mean(1, keepdim=True).repeat(1, CHANNELS)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return latents[:, :1].repeat(1, HOP).flatten()


def frames_of(number: int) -> int:
    """Length of an utterance; no two are alike."""
    return 10 + 2 * number


def write_tree(folder: Path) -> Path:
    """test-clean/SPEAKER/CHAPTER/UTT.wav and UTT.normalized.txt, of tones."""
    for number, (speaker, text, _) in enumerate(UTTERANCES):
        chapter = folder / "test-clean" / speaker / "7"
        chapter.mkdir(parents=True, exist_ok=True)
        stem = chapter / f"{speaker}_7_{number:06d}_000000"
        samples = tone(frames_of(number) / 25, rate=24_000, level=0.1 + 0.05 * number, hertz=200)
        soundfile.write(f"{stem}.wav", samples, 24_000)
        stem.with_name(stem.name + ".normalized.txt").write_text(text)
    return folder


def set_up(monkeypatch, loaded: LoadedRun) -> None:
    """Replaces the run, its codec and the systems' speech; the recognizer knows the utterances."""

    def load(options, run, refit):
        found = replace(loaded, step=run.step, weights=run.weights or "ema")
        assert not options.data and not refit
        known, path = SimpleNamespace(), loaded.config.data.path
        lengths = Lengths("the fit", lambda texts: [9.0] * len(texts))
        sampling = Sampling(steps=4, text_scale=2.0)
        return Synthesizer(found, LengthCodec(), known, sampling, lambda: lengths, path)

    def speak(synthesizer, prompts, seed, batch_size):
        """Step 5 says the next utterance instead of the first two, with even seeds."""
        for place in reversed(range(len(prompts))):
            wrong = synthesizer.run.step == 5 and place < 2 and seed % 2 == 0
            frames = len(prompts[place + wrong].latents)
            synthesizer.seconds_spent += 0.1
            noise = torch.from_numpy(np.random.default_rng(place).uniform(-0.5, 0.5, frames * HOP))
            yield place, Sound(noise.float(), RATE)

    said = {frames_of(n): words for n, (_, _, words) in enumerate(UTTERANCES)}
    monkeypatch.setattr(duration_recognizer, "spoken", said)
    for name, replacement in (
        (
            "torchtitan.models.dit_tts.config.manager.load_run_config",
            lambda folder, args=(): loaded.config,
        ),
        ("titan_tts.speak.open_run.load_run_config", lambda folder, args=(): loaded.config),
        ("titan_tts.speak.open_run.OpenRun.find_weights", lambda opened: (opened.weights, "")),
        ("titan_tts.speak.open_run.find_folder", Path),
        ("titan_tts.speak.open_run.checkpoint_steps", lambda folder: [5, 7]),
        ("titan_tts.evaluate.evaluate.load_synthesizer", load),
        ("titan_tts.evaluate.evaluate.check_codec", lambda *arguments: None),
        ("titan_tts.evaluate.evaluate.reference_settings", lambda *arguments: AS_IS),
        ("titan_tts.evaluate.evaluate.speak", speak),
    ):
        monkeypatch.setattr(name, replacement)


def evaluate(*arguments: str | Path) -> int:
    return main(["evaluate", *map(str, arguments)])
