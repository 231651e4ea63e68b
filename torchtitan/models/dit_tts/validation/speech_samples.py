"""A fixed set of prompts, synthesized while a run trains: sound, pictures and scores.

samples/step-1000/000-ann-utt17.wav  .png     with the slowest average of the weights
samples/step-1000/scores.json                 what was heard, and the scores of each prompt
"""

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset
from torchtitan.models.dit_tts.data.references import FixedReferences
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.forward_pass import ForwardPass
from torchtitan.models.dit_tts.infra.collectives import gather_from_ranks, share_of
from torchtitan.models.dit_tts.run.trackers import Trackers
from torchtitan.models.dit_tts.speech.codec import Codec
from torchtitan.models.dit_tts.speech.sampling.plots import save_spectrograms
from torchtitan.models.dit_tts.speech.sampling.sampler import (
    SpeechRequest,
    generate_latents,
    own_frames,
    speech_end,
)
from torchtitan.models.dit_tts.speech.sampling.sound_files import write_sound
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import open_scorers
from torchtitan.models.dit_tts.speech.scoring.scores import corpus_scores, score
from torchtitan.models.dit_tts.text.durations import LinearDurationModel
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer, with_duration

_BATCH = 16


@dataclass(frozen=True)
class Prompt:
    """One text to say, of a held-out utterance.

    Attributes:
        name: of its files.
        recording: (T, C) latents of the utterance.
    """

    name: str
    request: SpeechRequest
    language: str
    recording: torch.Tensor


def choose_prompts(
    dataset: Dataset,
    samples: np.ndarray,
    count: int,
    durations: LinearDurationModel,
    config: JobConfig,
) -> list[Prompt]:
    """`count` of these samples (n,), each speaker's first before any speaker's second."""
    codes, _ = dataset.labels("speaker")
    seen: dict[int, int] = {}
    turns = []
    for sample, code in zip(samples.tolist(), codes[samples].tolist()):
        turns.append((seen.get(code, 0), sample))
        seen[code] = seen.get(code, 0) + 1
    data = config.data
    references = FixedReferences(dataset) if data.references == "drawn" else None
    prompts: list[Prompt] = []
    for _, sample in sorted(turns):
        if (number := len(prompts)) == count:
            break
        try:
            loaded = dataset.load(sample)
        except CorruptSampleError:
            if data.on_error != "skip":
                raise
            continue
        metadata = loaded.metadata
        speaker = str(metadata.get("speaker") or "")
        frames = own_frames(config)
        if not frames:
            frames = min(durations.frames(metadata["text"], speaker), data.max_frames)
        name = re.sub(r"[^\w-]+", "_", f"{number:03d}-{speaker}-{dataset.key(sample)}")
        name = name.encode()[:100].decode(errors="ignore")  # a file system counts bytes
        reference = loaded.reference[: data.max_speaker_frames]
        if references is not None:
            reference = references.load(sample, loaded, data.max_speaker_frames)
        request = SpeechRequest(
            metadata["text"],
            torch.from_numpy(reference),
            frames,
            with_duration(metadata, frames, data.frames_per_second),
        )
        recording = torch.from_numpy(loaded.latents)
        language = str(metadata.get("language") or "")
        prompts.append(Prompt(name, request, language, recording))
    return prompts


class SpeechSamples:
    """Synthesizes and scores the prompts.

    Args:
        rank, ranks: of the data-parallel ranks, which share the prompts.
        sharded: the blocks' weights are gathered only while they run.
        writes: whether this process writes scores.json and logs.
        reports: whether this rank writes and scores what it has made; false where another rank makes the same.
        until_stopped: yields batches and prompts, and raises once the run is to end.
    """

    def __init__(
        self,
        config: JobConfig,
        folder: Path,
        prompts: list[Prompt],
        codec: Codec,
        tokenizer: ConditionedTokenizer,
        objective: FlowMatching,
        forward_pass: ForwardPass,
        rank: int = 0,
        ranks: int = 1,
        sharded: bool = False,
        writes: bool = True,
        reports: bool = True,
        until_stopped: Callable[[Any], Iterable[Any]] = iter,
    ):
        self.config, self.folder, self.codec, self.writes = config, folder, codec, writes
        self.tokenizer, self.objective, self.sharded = tokenizer, objective, sharded
        self.model, self.text_encoder = forward_pass.model, forward_pass.text_encoder
        self.device, self.amp = forward_pass.device, forward_pass.amp
        self.until_stopped = until_stopped
        share = share_of(len(prompts), rank, ranks)
        self.own = [(prompts[number], reports and counts) for number, counts in share]
        self.scorers = open_scorers(
            config.samples,
            AddedTokens(config.encoder.added_tokens),
            str(self.device),
            ((prompt.request.text, prompt.language) for prompt in prompts),
        )

    def make(self, step: int, weights: str, trackers: Trackers | None) -> dict[str, float | None]:
        """Synthesizes the prompts with the model's present weights, whose name is given for scores.json, writes and logs
        them. A collective; every rank returns the same figures.
        """
        began = time.perf_counter()
        prompts = [prompt for prompt, _ in self.own]
        latents: list[torch.Tensor] = []
        with self.amp:
            for first in self.until_stopped(range(0, len(prompts), _BATCH)):
                latents += generate_latents(
                    self.model,
                    self.tokenizer,
                    self.objective,
                    [prompt.request for prompt in prompts[first : first + _BATCH]],
                    self.config.sampling,
                    self.config.samples.seed,
                    self.device,
                    self.text_encoder,
                    cache_blocks=not self.sharded,
                )
        if own_end := own_frames(self.config) > 0:
            latents = [each[: speech_end(each)] for each in latents]
        waveforms = [self.codec.decode(each) for each in latents]
        seconds = time.perf_counter() - began
        folder = self.folder / f"step-{step}"
        rows = []
        for number, (prompt, is_own) in enumerate(self.until_stopped(self.own)):
            if is_own:
                rows.append(self._score(prompt, waveforms[number], folder))
        made = sum(map(len, waveforms)) / self.codec.sample_rate
        of_ranks, spent, lengths = zip(*gather_from_ranks((rows, seconds, made)), strict=True)
        rows = sorted((row for rows in of_ranks for row in rows), key=lambda row: row["name"])
        found = {
            **corpus_scores([row["score"] for row in rows]),
            "real_time_factor": sum(spent) / sum(lengths),
        }
        if own_end:  # the lengths of other models are the fit's, at every step the same
            found["duration_error"] = sum(row["duration_error"] for row in rows) / len(rows)
        if self.writes:
            listed = [{**row, "score": asdict(row["score"])} for row in rows]
            report = {"step": step, "weights": weights, **found, "prompts": listed}
            write_atomic(folder / "scores.json", json.dumps(report, indent=1) + "\n")
        if trackers is not None:
            for row in rows:
                self._show(trackers, row["name"], folder, step)
        return found

    def _score(self, prompt: Prompt, waveform: torch.Tensor, folder: Path) -> dict[str, Any]:
        rate, request = self.codec.sample_rate, prompt.request
        frames = len(waveform) / self.codec.hop_length
        reference = None
        if self.scorers.speaker is not None and len(request.reference):
            reference = Sound(self.codec.decode(request.reference), rate)
        sound = Sound(waveform, rate)
        found = score(sound, request.text, self.scorers, reference, prompt.language)
        write_sound(folder / f"{prompt.name}.wav", waveform, rate)
        heard = "" if found.heard is None else f', heard as "{found.heard}"'
        panels = [
            (f'recording: "{request.text[:80]}"', self.codec.decode(prompt.recording)),
            (f"generated{heard[:100]}", waveform),
        ]
        save_spectrograms(folder / f"{prompt.name}.png", panels, rate)
        return {
            "name": prompt.name,
            "text": request.text,
            "seconds": len(waveform) / rate,
            "duration_error": abs(frames / len(prompt.recording) - 1),
            "score": found,
        }

    def _show(self, trackers: Trackers, name: str, folder: Path, step: int) -> None:
        import soundfile

        try:
            samples, rate = soundfile.read(folder / f"{name}.wav", dtype="float32")
            picture = (folder / f"{name}.png").read_bytes()
        except OSError as error:
            raise InputError(
                f"{folder / name}.wav was written by another rank and is not here ({error}); put [job] dump_folder "
                f"on a file system that all machines share"
            ) from None
        # A tag of TensorBoard's holds one kind of data.
        sound = torch.from_numpy(samples), rate
        trackers.log({f"speech/{name}": sound, f"speech/{name}_spectrogram": picture}, step)
