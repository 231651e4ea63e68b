"""Whisper as a recognizer of any text, through transformers or through faster-whisper (CTranslate2).

Both decode greedily and without the text before, so that a sound's transcript depends on nothing else.
"""

import logging
import math
import os
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from torchtitan.models.dit_tts.errors import InputError, require_modules
from torchtitan.models.dit_tts.files import quiet_transformers
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.pretrained import from_folder_or_hub, load_model
from torchtitan.models.dit_tts.speech.scoring.word_errors import language_code

_RATE = 16_000  # Hz
_SECONDS = 30  # that the model hears at once
_FRAME_RATE = 100  # frames of its spectrogram in a second


class _Whisper:
    """The check of texts that both recognizers share."""

    name: str
    of_english: bool  # trained on English alone

    def check_texts(self, texts: Sequence[str], languages: Sequence[str] = ()) -> None:
        """Raises InputError for other than Latin letters, and other languages, if it was trained on
        English alone."""
        for text in texts if self.of_english else ():
            letters = [c for c in text if c.isalpha()]
            latin = [c for c in letters if unicodedata.name(c, "").startswith("LATIN")]
            if 2 * len(latin) < len(letters):
                raise InputError(
                    f"{self.name} was trained on English alone and cannot write a text such as '{text[:40]}'; take "
                    "a multilingual one"
                )
        for code in map(language_code, languages if self.of_english else ()):
            if code not in ("", "en"):
                raise InputError(
                    f"{self.name} was trained on English alone and the language is {code}; take a multilingual one"
                )


class WhisperRecognizer(_Whisper):
    """Whisper through transformers; float16 on a GPU, float32 on a CPU."""

    def __init__(self, model: str, device: str = "cpu") -> None:
        """`model`: folder, hub name or size ("large-v3" is openai/whisper-large-v3)."""
        require_modules("transformers")
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        spec = f"whisper:{model}"
        path = check_whisper(model)
        dtype = torch.float16 if torch.device(device).type == "cuda" else torch.float32
        self.model = load_model(WhisperForConditionalGeneration, path, spec, dtype=dtype).to(device)
        self.processor: Any = from_folder_or_hub(
            lambda **where: WhisperProcessor.from_pretrained(path, **where), path, spec
        )
        tokenizer, generation = self.processor.tokenizer, self.model.generation_config
        start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
        if start != self.model.config.decoder_start_token_id:
            raise InputError(
                f"'{spec}' has no tokenizer, or another model's; copy tokenizer.json from the checkpoint"
            )
        if not hasattr(generation, "no_timestamps_token_id"):
            raise InputError(
                f"'{spec}' has no generation_config.json of Whisper's; copy it from the checkpoint, or from "
                "the one that it was trained from"
            )
        self.name = f"Whisper {os.path.basename(os.path.normpath(model))}"
        # One that was trained on English alone has no languages and takes none.
        self.languages = {token.strip("<|>") for token in getattr(generation, "lang_to_id", {})}
        self.of_english = not self.languages
        self.spelling: dict[str, str] | None = tokenizer.english_spelling_normalizer

    def transcribe(self, sound: Sound, language: str = "") -> str:
        """The words heard, as Whisper writes them; over 30 s in windows that follow its timestamps.

        A language that is empty or that Whisper does not know is detected.
        """
        return self._generate([sound], [language_code(language)])[0]

    def transcribe_batch(
        self, sounds: Sequence[Sound], language: str = ""
    ) -> list[tuple[str, str]]:
        """(words, language code) of each; those of up to 30 s are heard at once."""
        if len(sounds) > 1 and any(sound.seconds > _SECONDS for sound in sounds):
            return [pair for sound in sounds for pair in self.transcribe_batch([sound], language)]
        codes = [language_code(language)] * len(sounds)
        if self.of_english:
            codes = [code or "en" for code in codes]
        elif sounds and codes[0] not in self.languages:
            features = self._features(sounds)[0]["input_features"][..., : _SECONDS * _FRAME_RATE]
            tokens = self.model.detect_language(features).tolist()
            codes = [self.processor.tokenizer.decode([token]).strip("<|>") for token in tokens]
        texts = self._generate(sounds, codes) if sounds else []
        return list(zip(texts, codes, strict=True))

    def _features(self, sounds: Sequence[Sound]) -> tuple[Any, bool]:
        """The model's inputs, and whether they are longer than it hears at once."""
        samples = [sound.samples(_RATE) for sound in sounds]
        long = max(map(len, samples)) > _SECONDS * _RATE
        features = self.processor(
            samples,
            sampling_rate=_RATE,
            return_tensors="pt",
            return_attention_mask=True,
            **({"truncation": False, "padding": "longest"} if long else {}),
        )
        return features.to(self.model.device, self.model.dtype), long

    def _generate(self, sounds: Sequence[Sound], codes: Sequence[str]) -> list[str]:
        """The words in sounds of up to 30 s, or in one of any length."""
        features, long = self._features(sounds)
        options: dict[str, Any] = {"return_timestamps": True} if long else {}
        if self.languages:
            options["task"] = "transcribe"
            if all(code in self.languages for code in codes):
                options["language"] = codes[0] if len(codes) == 1 else list(codes)
        with torch.inference_mode(), quiet_transformers():
            tokens = self.model.generate(**features, do_sample=False, num_beams=1, **options)
        texts = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return [text.strip() for text in texts]


class FasterWhisperRecognizer(_Whisper):
    """Whisper through faster-whisper; float16 on a GPU, float32 on a CPU."""

    spelling = None

    def __init__(self, model: str, device: str = "cpu", name: str = "") -> None:
        """`model`: folder of a converted model, size or hub name. `name`: its name for people, by default of `model`."""
        require_modules("faster_whisper")
        from faster_whisper import WhisperModel

        logging.getLogger("faster_whisper").setLevel(logging.WARNING)  # a line for every sound
        place = torch.device(device)
        threads = torch.get_num_threads()
        # A second thread gains next to nothing within a sound, and half of the time between two.
        self.workers = min(4, threads) if place.type == "cpu" else 1

        def load(local_files_only: bool) -> WhisperModel:
            return WhisperModel(
                model,
                device=place.type,
                device_index=place.index or 0,
                compute_type="float16" if place.type == "cuda" else "float32",
                cpu_threads=threads // self.workers,
                num_workers=self.workers,
                local_files_only=local_files_only,
            )

        self.model = from_folder_or_hub(load, model, f"faster-whisper:{model}")
        self.name = name or f"faster-whisper {os.path.basename(os.path.normpath(model))}"
        self.of_english = self.model.supported_languages == ["en"]

    def transcribe(self, sound: Sound, language: str = "") -> str:
        """See `WhisperRecognizer.transcribe`."""
        return self.transcribe_batch([sound], language)[0][0]

    def transcribe_batch(
        self, sounds: Sequence[Sound], language: str = ""
    ) -> list[tuple[str, str, float]]:
        """(words, language code, confidence) of each; on a CPU some at once."""
        code = language_code(language)
        if code not in self.model.supported_languages:
            code = ""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(lambda sound: self._hear(sound.samples(_RATE), code), sounds))

    def _hear(self, samples: np.ndarray, code: str) -> tuple[str, str, float]:
        if not len(samples):
            return "", code, 0.0
        parts, about = self.model.transcribe(
            samples,
            language=code or None,
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
        )
        parts = list(parts)
        tokens = sum(len(part.tokens) for part in parts)
        likely = sum(part.avg_logprob * len(part.tokens) for part in parts) / max(1, tokens)
        text = "".join(part.text for part in parts).strip()
        return text, about.language, math.exp(likely) if tokens else 0.0


def check_whisper(model: str) -> str:
    """Folder or hub name of a Whisper checkpoint. Raises InputError: it does not exist, or is another model."""
    from transformers import AutoConfig

    spec = f"whisper:{model}"
    path = model if os.path.isdir(model) or "/" in model else f"openai/whisper-{model}"
    kind = from_folder_or_hub(
        lambda **where: AutoConfig.from_pretrained(path, **where), path, spec
    ).model_type
    if kind != "whisper":
        raise InputError(
            f"'{spec}': {path} holds a model of type {kind}, not whisper; give a Whisper checkpoint, or "
            "another recognizer as package.module:factory"
        )
    return path
