"""evaluation.html: the tables, and the worst utterances to hear and see, in one file without network."""

import base64
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from titan_tts.evaluate.prompts import Prompt, decoded
from titan_tts.evaluate.report import (
    CODEC,
    FIGURES,
    RECORDINGS,
    SPEED,
    SYSTEM,
    numbers,
    shown_figures,
    warnings,
    worst_first,
)
from titan_tts.html import page_template
from torchtitan.models.dit_tts.speech.audio import decode, to_mono
from torchtitan.models.dit_tts.speech.sampling.plots import DYNAMIC_RANGE_DB, log_mel_decibels
from torchtitan.models.dit_tts.speech.sampling.sound_files import encoded
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.word_errors import guess_language, normalizer

if TYPE_CHECKING:
    from titan_tts.evaluate.evaluate import Evaluation

MAX_SPEAKERS = 50
"""Rows of the table by speaker; evaluation.json has all."""

MAX_RATE = 48_000  # Hz; nobody hears frequencies above half of it


def render(report: dict[str, Any], utterances: list[dict[str, Any]]) -> str:
    """The page, of what `report.build` and `shown_utterances` return."""
    template = page_template(__package__, "evaluation.html.jinja", {})
    rates = [row["wer_by_speaker"] for row in report["rows"] if row["kind"] == SYSTEM]
    speakers = {speaker for each in rates for speaker in each}
    worst = sorted(speakers, key=lambda speaker: (-max(r.get(speaker, 0) for r in rates), speaker))
    return template.render(
        all_figures=FIGURES,
        figures=shown_figures(report),
        speed=SPEED,
        speakers=worst[:MAX_SPEAKERS],
        more_speakers=max(0, len(worst) - MAX_SPEAKERS),
        shown=utterances,
        warnings=warnings(report),
        numbers=numbers(report),
        **report,
    )


def shown_utterances(
    report: dict[str, Any], evaluation: "Evaluation", count: int
) -> list[dict[str, Any]]:
    """The `count` worst utterances, each with the noise seed that has most word errors over all systems, and a
    panel for every sound: audio (FLAC) and spectrogram as data URLs, transcript and scores."""
    systems = [row for row in report["rows"] if row["kind"] == SYSTEM]
    scorers = evaluation.scorers
    spelling = getattr(scorers.recognizer, "spelling", None)
    shown = []
    for index in worst_first(evaluation.scored, len(report["utterances"]))[:count]:
        row, prompt = report["utterances"][index], evaluation.tests.prompts[index]
        scores = row["scores"]
        errors = [
            sum(scores[system["name"]][seed]["word_errors"] for system in systems)
            for seed in range(len(systems[0]["seeds"]))
        ]
        seed = int(np.argmax(errors))
        sounds = list(_sounds(prompt, evaluation, systems, seed))
        panels = draw_panels([(label, sound) for label, sound, _ in sounds])
        for panel, (label, _, scored) in zip(panels, sounds, strict=True):
            score = scores[scored][seed if len(scores[scored]) > 1 else 0] if scored else None
            panel["score"] = score
            if score:
                wanted = scorers.expected(row["text"])
                panel["marks"] = marks(wanted, score["heard"], prompt.language, spelling)
        shown.append(row | {"seed": systems[0]["seeds"][seed], "panels": panels})
    return shown


def _sounds(
    prompt: Prompt, evaluation: "Evaluation", systems: Sequence[dict[str, Any]], seed: int
) -> Iterator[tuple[str, Sound, str]]:
    """(label, sound, name of the row with its scores, if any) of every sound of an utterance."""
    names = {row.name for row in evaluation.scored}
    if prompt.load_reference is not None:
        yield "reference", prompt.load_reference(), ""
    if RECORDINGS in names and prompt.load_recording is not None:
        yield "recording", prompt.load_recording(), RECORDINGS
    if CODEC in names and prompt.latents is not None:
        yield "codec", decoded(evaluation.codec, prompt.latents), CODEC
    for system in systems:
        path = evaluation.wav(system["name"], system["seeds"][seed], prompt)
        samples, rate = decode(str(path))
        yield system["name"], Sound(torch.from_numpy(to_mono(samples)), rate), system["name"]


def draw_panels(sounds: Sequence[tuple[str, Sound]]) -> list[dict[str, Any]]:
    """Players and spectrograms on one scale of time and of loudness."""
    # At one rate, so that the bands of all panels are the same.
    rate = min(sound.sample_rate for _, sound in sounds)
    spectrograms = [log_mel_decibels(torch.from_numpy(s.samples(rate)), rate) for _, s in sounds]
    loudest = max(float(one.max()) for one in spectrograms)
    longest = max(sound.seconds for _, sound in sounds)
    return [
        {
            "label": label,
            "seconds": sound.seconds,
            "width": 100 * sound.seconds / longest,
            "audio": _data_url("audio/flac", _flac(sound)),
            "picture": _data_url("image/png", _picture(spectrogram, loudest)),
        }
        for (label, sound), spectrogram in zip(sounds, spectrograms, strict=True)
    ]


def _flac(sound: Sound) -> bytes:
    rate = min(sound.sample_rate, MAX_RATE)
    return encoded(torch.from_numpy(sound.samples(rate)), rate, "flac")


def _picture(spectrogram: Tensor, loudest: float) -> bytes:
    """(frames, bands) in dB as a PNG, one pixel each."""
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(
        buffer,
        spectrogram.T.numpy(),
        vmin=loudest - DYNAMIC_RANGE_DB,
        vmax=loudest,
        cmap="magma",
        origin="lower",
        format="png",
    )
    return buffer.getvalue()


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def marks(
    text: str, heard: str, language: str = "", spelling: Any = None
) -> list[tuple[str, str, str]]:
    """(word, kind, expected word) of the words as they are compared; the kind is right, wrong (another word was
    expected), extra, or missing (it was not heard)."""
    import jiwer

    normalize = normalizer(language or guess_language(text), spelling)
    wanted, found = normalize(text).split(), normalize(heard).split()
    if not wanted:
        return [(word, "extra", "") for word in found]
    out: list[tuple[str, str, str]] = []
    for chunk in jiwer.process_words(" ".join(wanted), " ".join(found)).alignments[0]:
        lost = wanted[chunk.ref_start_idx : chunk.ref_end_idx]
        said = found[chunk.hyp_start_idx : chunk.hyp_end_idx]
        if chunk.type == "equal":
            out += [(word, "right", "") for word in said]
        elif chunk.type == "substitute":
            out += [(word, "wrong", instead) for word, instead in zip(said, lost, strict=True)]
        elif chunk.type == "insert":
            out += [(word, "extra", "") for word in said]
        else:
            out += [(word, "missing", "") for word in lost]
    return out
