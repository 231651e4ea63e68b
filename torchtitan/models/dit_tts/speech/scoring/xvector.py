"""Voices as a speaker verification model of transformers with an x-vector head tells them apart."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan.models.dit_tts.errors import require_modules
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.pretrained import from_folder_or_hub, load_model

_MIN_SECONDS = 0.5  # a shorter sound is repeated


class XVectorEncoder:
    """Computes in float32. `model`: a folder, or a hub name such as microsoft/wavlm-base-plus-sv."""

    def __init__(self, model: str, device: str = "cpu") -> None:
        require_modules("transformers")
        from transformers import AutoFeatureExtractor, AutoModelForAudioXVector

        spec = f"xvector:{model}"
        network = load_model(AutoModelForAudioXVector, model, spec, dtype=torch.float32)
        self.network, self.device = network.to(device), device
        self.extractor: Any = from_folder_or_hub(
            lambda **where: AutoFeatureExtractor.from_pretrained(model, **where), model, spec
        )
        self.name = f"x-vectors of {os.path.basename(os.path.normpath(model))}"

    @torch.inference_mode()
    def embed(self, sounds: Sequence[Sound]) -> np.ndarray:
        """(n, E) float32, of unit length."""
        vectors = torch.stack([self._embedding(sound) for sound in sounds])
        return torch.nn.functional.normalize(vectors, dim=1).cpu().numpy()

    def _embedding(self, sound: Sound) -> Tensor:
        rate = self.extractor.sampling_rate
        shortest = int(_MIN_SECONDS * rate)
        samples = sound.samples(rate)
        if not len(samples):
            samples = np.zeros(shortest, np.float32)
        samples = np.tile(samples, -(-shortest // len(samples)))
        inputs = self.extractor(samples, sampling_rate=rate, return_tensors="pt")
        return self.network(**inputs.to(self.device)).embeddings[0]
