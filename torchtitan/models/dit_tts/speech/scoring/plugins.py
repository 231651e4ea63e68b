"""Recognizers, speaker encoders and predictors of opinion by name. Heavy libraries are loaded when one is opened.

A user's own is `package.module:factory`: factory(device) returns an object with the methods of the
protocol in `interface`. `package.module:factory:ARGUMENT` calls factory(device, "ARGUMENT").
"""

import os
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.config.job_config import Samples
from torchtitan.models.dit_tts.errors import require_modules
from torchtitan.models.dit_tts.factories import call_factory, failures_named
from torchtitan.models.dit_tts.speech.scoring import wheels
from torchtitan.models.dit_tts.speech.scoring.interface import (
    OpinionPredictor,
    Recognizer,
    SpeakerEncoder,
)
from torchtitan.models.dit_tts.speech.scoring.pretrained import from_folder_or_hub
from torchtitan.models.dit_tts.speech.scoring.scores import Scorers

RECOGNIZERS = (
    "words:zero,one,..., whisper-tiny.en, whisper-base, whisper:SIZE_OR_FOLDER, "
    "faster-whisper:SIZE_OR_FOLDER"
)
SPEAKER_ENCODERS = "resemblyzer, xvector:HUB_NAME_OR_FOLDER"
OPINION_PREDICTORS = "dnsmos"


def check_pretrained(samples: Samples) -> None:
    """Before a run reads data and loads its model: whether the models of its scorers can be found."""
    for spec in (samples.recognizer, samples.speaker_scorer):
        kind, _, model = spec.partition(":")
        if spec in wheels.MODULES:
            require_modules("faster_whisper", *wheels.MODULES[spec])
        elif kind == "whisper":
            from torchtitan.models.dit_tts.speech.scoring.whisper import check_whisper

            check_whisper(model)
        elif kind == "faster-whisper" and not os.path.isdir(model):
            require_modules("faster_whisper")
            from faster_whisper import download_model

            from_folder_or_hub(partial(download_model, model), model, spec)
        elif kind == "xvector":
            from transformers import AutoConfig

            from_folder_or_hub(partial(AutoConfig.from_pretrained, model), model, spec)
        elif spec == "resemblyzer":
            require_modules("resemblyzer")


def open_scorers(
    samples: Samples, added: AddedTokens, device: str, texts: Iterable[tuple[str, str]]
) -> Scorers:
    """The scorers that [samples] names.

    Args:
        added: of the run.
        texts: (text, language) of what will be said, which the recognizer has to know.
    """
    recognizer = open_recognizer(samples.recognizer, device) if samples.recognizer else None
    if recognizer is not None:
        pairs = list(texts)
        languages = [language for _, language in pairs]
        recognizer.check_texts([added.without(text) for text, _ in pairs], languages)
    speaker = samples.speaker_scorer
    return Scorers(
        recognizer,
        open_speaker_encoder(speaker, device) if speaker else None,
        open_opinion_predictor(samples.opinion, device) if samples.opinion else None,
        added,
    )


def open_recognizer(spec: str, device: str = "cpu") -> Recognizer:
    """A recognizer by its spec: one of RECOGNIZERS or package.module:factory."""
    kind, _, argument = spec.partition(":")
    if kind == "words" and argument:
        require_modules("pocketsphinx")
        from torchtitan.models.dit_tts.speech.scoring.keyword_recognizer import KeywordRecognizer

        return KeywordRecognizer([word.strip().lower() for word in argument.split(",")])
    if spec in wheels.MODULES:
        require_modules("faster_whisper", *wheels.MODULES[spec])
        from torchtitan.models.dit_tts.speech.scoring.whisper import FasterWhisperRecognizer

        name = spec.replace("whisper-", "Whisper ")
        return FasterWhisperRecognizer(wheels.folder_of(spec), device, name)
    if kind in ("whisper", "faster-whisper") and argument:
        from torchtitan.models.dit_tts.speech.scoring import whisper

        if kind == "whisper":
            return whisper.WhisperRecognizer(argument, device)
        return whisper.FasterWhisperRecognizer(argument, device)
    methods = "transcribe", "check_texts"
    return _from_factory(
        spec, device, "recognizer", RECOGNIZERS, *methods, optional="transcribe_batch"
    )


def open_speaker_encoder(spec: str, device: str = "cpu") -> SpeakerEncoder:
    """A speaker encoder by its spec: one of SPEAKER_ENCODERS or package.module:factory."""
    kind, _, argument = spec.partition(":")
    if spec == "resemblyzer":
        from torchtitan.models.dit_tts.speech.scoring.voice_encoder import ResemblyzerEncoder

        return ResemblyzerEncoder(device)
    if kind == "xvector" and argument:
        from torchtitan.models.dit_tts.speech.scoring.xvector import XVectorEncoder

        return XVectorEncoder(argument, device)
    return _from_factory(spec, device, "speaker encoder", SPEAKER_ENCODERS, "embed")


def open_opinion_predictor(spec: str, device: str = "cpu") -> OpinionPredictor:
    """A predictor of opinion by its spec: one of OPINION_PREDICTORS or package.module:factory."""
    if spec == "dnsmos":
        from torchtitan.models.dit_tts.speech.scoring.opinion import DNSMOS

        return DNSMOS(device)
    return _from_factory(spec, device, "opinion predictor", OPINION_PREDICTORS, "score")


def _from_factory(
    spec: str, device: str, kind: str, known: str, *methods: str, optional: str = ""
) -> Any:
    """The object that a user's factory returns, with `name` and all methods of its protocol."""
    made = call_factory(
        spec, device, kind, known, ("name", *methods), "speech/scoring/interface.py"
    )
    failing = failures_named(kind, spec)
    offered = [*methods, optional] if hasattr(made, optional) else methods
    return SimpleNamespace(
        name=made.name, **{method: failing(getattr(made, method)) for method in offered}
    )
