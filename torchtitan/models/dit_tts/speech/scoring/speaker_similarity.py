"""Speaker similarity: the cosine of two embeddings, by a named speaker model or the model's own encoder."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from torchtitan.models.dit_tts.errors import InputError, require_modules
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.pretrained import from_folder_or_hub, load_model

_MIN_SECONDS = 0.5  # for an x-vector; a shorter sound is repeated


class EmbeddingScorer:
    """Cosine similarity of `embed(sound) -> (E,)`. A reference is embedded once for many utterances."""

    def __init__(self, name: str, embed: Callable[[Sound], Tensor]) -> None:
        self.name = name
        self._embed = embed
        self.references: dict[tuple[bytes, int], Tensor] = {}

    def similarity(self, sound: Sound, reference: Sound) -> float:
        """Cosine of the two speaker embeddings, in [-1, 1]."""
        both = self._embedding(sound), self._embed_reference(reference)
        return float(torch.nn.functional.cosine_similarity(*both, dim=0).clamp(-1.0, 1.0))

    def embed(self, sounds: Sequence[Sound]) -> np.ndarray:
        """(n, E) float32 unit vectors; see `SpeakerEncoder`."""
        vectors = torch.stack([self._embedding(sound) for sound in sounds])
        return torch.nn.functional.normalize(vectors, dim=1).float().numpy()

    def _embedding(self, sound: Sound) -> Tensor:
        with torch.inference_mode():
            return self._embed(sound).detach().double().cpu()

    def _embed_reference(self, reference: Sound) -> Tensor:
        digest = xxhash.xxh3_128()
        for tensor in (reference.waveform, reference.latents):
            if tensor is not None:
                digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        key = (digest.digest(), reference.sample_rate)
        if key not in self.references:
            self.references[key] = self._embedding(reference)
        return self.references[key]


def own_scorer(own: Callable[[Tensor], Tensor]) -> EmbeddingScorer:
    """The trained model's own encoder: own(latents (T, C)) -> (E,).

    It was trained to tell what the model imitates, so it rates the model's speech too well; it is a
    stand-in where no speaker model is at hand.
    """

    def embed(sound: Sound) -> Tensor:
        if sound.latents is None:
            raise InputError(
                "the model's own speaker encoder compares latents and this sound has none; encode it by "
                "the codec, or take xvector:FOLDER"
            )
        return own(torch.nan_to_num(sound.latents, posinf=0.0, neginf=0.0))

    return EmbeddingScorer("the model's own speaker encoder, not independent", embed)


def xvector_scorer(model: str, device: str = "cpu") -> EmbeddingScorer:
    """A speaker verification model of transformers with an x-vector head, in float32: a folder, or a hub name
    such as microsoft/wavlm-base-plus-sv."""
    require_modules("transformers")
    from transformers import AutoFeatureExtractor, AutoModelForAudioXVector

    spec = f"xvector:{model}"
    network: Any = load_model(AutoModelForAudioXVector, model, spec, dtype=torch.float32).to(device)
    extractor = from_folder_or_hub(
        lambda **where: AutoFeatureExtractor.from_pretrained(model, **where), model, spec
    )
    rate = extractor.sampling_rate

    def embed(sound: Sound) -> Tensor:
        samples = torch.from_numpy(sound.samples(rate))
        shortest = int(_MIN_SECONDS * rate)
        if not len(samples):
            samples = torch.zeros(shortest)
        samples = samples.repeat(-(-shortest // len(samples)))
        inputs = extractor(samples.numpy(), sampling_rate=rate, return_tensors="pt").to(device)
        return network(**inputs).embeddings[0]

    return EmbeddingScorer(f"x-vectors of {os.path.basename(os.path.normpath(model))}", embed)
