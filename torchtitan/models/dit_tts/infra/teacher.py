"""Features of a pretrained speech encoder for the alignment's teacher, made once and stored.

There is no audio in the shards, so it is decoded from the latents. Hidden states of the encoder, usually 50
per second, are averaged to latent frames, and their principal components are kept: `teacher_features/`
beside the shards, in the format of `text.feature_store`. The components are fitted to utterances spread over
the dataset, so the features are of a dataset: with other shards they are made anew.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from torchtitan.models.dit_tts.audio import resample
from torchtitan.models.dit_tts.codec import Codec, build_codec
from torchtitan.models.dit_tts.codec.record import check_codec
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.dataset import CorruptSampleError, Dataset
from torchtitan.models.dit_tts.errors import InputError, require_modules
from torchtitan.models.dit_tts.infra.collectives import patient_group, run_on_all_ranks
from torchtitan.models.dit_tts.infra.feature_cache import FeatureMaker, make_all
from torchtitan.models.dit_tts.scoring.pretrained import from_folder_or_hub, load_model
from torchtitan.models.dit_tts.text.feature_builder import write_shard_features
from torchtitan.models.dit_tts.text.feature_store import (
    FeatureKind,
    TextFeatures,
    find_feature_file,
    open_text_features,
)
from torchtitan.tools.utils import device_type

_FITTED = 256
"""utterances that the principal components are fitted to"""


class TeacherKind(FeatureKind):
    """Everything that a teacher's features depend on."""

    store: ClassVar[str] = "teacher_features"


class SpeechTeacher:
    """A speech encoder of transformers: a waveform to hidden states of one of its blocks.

    Args:
        name: folder or hub name.
        layer: of the block, counted from 1; 0: at three quarters of the depth.

    Raises:
        InputError: it cannot be loaded, takes no waveform, or has fewer blocks.
    """

    def __init__(self, name: str, layer: int, device: str):
        require_modules("transformers")
        from transformers import AutoFeatureExtractor, AutoModel

        self.name, self.device = name, device
        self.model: Any = load_model(AutoModel, name, name, dtype=torch.float32).to(device)
        self.extractor = from_folder_or_hub(
            lambda **where: AutoFeatureExtractor.from_pretrained(name, **where), name, name
        )
        blocks = getattr(self.model.config, "num_hidden_layers", 0)
        if layer > blocks or not hasattr(self.extractor, "sampling_rate"):
            raise InputError(
                f"[alignment] teacher = {name!r} has {blocks} blocks, and teacher_hidden_layer = {layer}; "
                f"give a speech encoder that takes a waveform, and one of its blocks"
            )
        self.layer = layer or max(1, 3 * blocks // 4)

    def fingerprint(self) -> str:
        """16 hex digits of the weights and what is taken of them."""
        digest = hashlib.sha256(f"{self.layer} {self.extractor.to_json_string()}".encode())
        for key, value in sorted(self.model.state_dict().items()):
            flat = value.cpu().contiguous().flatten()  # one of no dimension has no view of bytes
            digest.update(key.encode() + flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    @torch.inference_mode()
    def frames(self, samples: np.ndarray, rate: int, frames: int) -> torch.Tensor:
        """Hidden states of a waveform, averaged to so many frames: (frames, h) float32 on the CPU."""
        wanted = self.extractor.sampling_rate
        samples = resample(samples, rate, wanted)
        # Shorter than a second, some encoders have no frame at all.
        padded = np.pad(samples, (0, max(0, wanted - len(samples))))
        inputs = self.extractor(padded, sampling_rate=wanted, return_tensors="pt").to(self.device)
        hidden = self.model(**inputs, output_hidden_states=True).hidden_states[self.layer][0]
        spoken = max(1, round(len(hidden) * len(samples) / len(padded)))
        return F.adaptive_avg_pool1d(hidden[:spoken].T.float(), frames).T.cpu()


def principal_components(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean (h,) of values (n, h) and their first components (h, count), of a sign that does not
    depend on the machine.

    Raises:
        InputError: fewer values or a narrower width than components.
    """
    if count > min(values.shape):
        raise InputError(
            f"[alignment] teacher_dim = {count}, but {len(values)} frames of a teacher of width "
            f"{values.shape[1]} have fewer components; lower it"
        )
    mean = values.double().mean(0)
    centered = values.double() - mean
    _, vectors = torch.linalg.eigh(centered.T @ centered)
    vectors = vectors.flip(1)[:, :count]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return mean.float(), (vectors * largest.sign()).float()


@dataclass
class _TeacherMaker(FeatureMaker):
    """This rank's part of the work."""

    config: JobConfig
    teacher: SpeechTeacher | None = None
    codec: Codec | None = None
    components: tuple[torch.Tensor, torch.Tensor] | None = None

    def load(self) -> None:
        """Loads teacher and codec; the kind then has the fingerprints."""
        alignment, codec = self.config.alignment, self.config.sampling.codec
        self.teacher = SpeechTeacher(alignment.teacher, alignment.teacher_hidden_layer, device_type)
        self.codec = build_codec(codec, device_type)
        check_codec(self.codec, self.config.data.path)
        inputs = [self.codec.fingerprint, self.dataset.fingerprint, alignment.teacher_dim, _FITTED]
        of_input = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
        self.kind = TeacherKind(
            alignment.teacher, self.teacher.fingerprint(), of_input, "float32", "float16"
        )

    def make(self, shards: list[int], progress: bool) -> None:
        if not shards:
            return
        if self.teacher is None:
            wanted = self.kind
            self.load()
            if self.kind != wanted:
                raise InputError(
                    f"[alignment] teacher = {wanted.model!r}: its weights or the codec's on this machine "
                    f"are others than rank 0's; give all machines the same"
                )
        if self.components is None:
            self.components = self._fit()
        mean, vectors = self.components
        count = int(np.isin(self.dataset.shard, shards).sum())
        with tqdm(desc="teacher", total=count, unit="utterance", disable=not progress) as bar:
            for shard in shards:
                if find_feature_file(self.dataset, shard, self.kind) is not None:
                    continue
                samples = np.flatnonzero(self.dataset.shard == shard)
                hidden = dict(self._hidden(samples))  # of one shard, after the projection

                def features() -> Iterator[tuple[int, torch.Tensor]]:
                    yield from hidden.items()

                write_shard_features(
                    self.dataset,
                    shard,
                    self.kind,
                    self.dataset.frames[samples].astype(np.int32),
                    np.isin(np.arange(len(samples)), list(hidden)),
                    vectors.shape[1],
                    features,
                    bar,
                )

    def _hidden(self, samples: np.ndarray) -> Iterator[tuple[int, torch.Tensor]]:
        """(place among the samples, components of its frames), without corrupt ones if those are left
        out."""
        mean, vectors = self.components or (0.0, None)
        for number, sample in enumerate(samples.tolist()):
            try:
                latents, _ = self.dataset.read(sample)
            except CorruptSampleError:
                if self.config.data.on_error == "raise":
                    raise
                continue
            assert self.codec is not None and self.teacher is not None
            waveform = self.codec.decode(torch.from_numpy(latents).float())
            rate = self.codec.sample_rate
            hidden = self.teacher.frames(waveform.cpu().numpy(), rate, len(latents))
            yield number, hidden if vectors is None else (hidden - mean) @ vectors

    def _fit(self) -> tuple[torch.Tensor, torch.Tensor]:
        spread = np.linspace(0, len(self.dataset) - 1, min(_FITTED, len(self.dataset)))
        values = torch.cat([hidden for _, hidden in self._hidden(spread.astype(np.int64))])
        return principal_components(values, self.config.alignment.teacher_dim)

    def release(self) -> None:
        self.teacher = self.codec = self.components = None


def ready_teacher_features(dataset: Dataset, job_config: JobConfig) -> TextFeatures:
    """The teacher's features of a run's data, made first where they are missing.

    Called by every rank of a job, or by a process without any.

    Raises:
        InputError: on every rank, where one cannot make or read its files.
    """
    maker = _TeacherMaker(dataset, TeacherKind("", None, "", "", "float16"), job_config)

    def find_kind(rank: int) -> FeatureKind | None:
        if rank != 0:
            return None
        maker.load()
        return maker.kind

    with patient_group() as group:
        kind = run_on_all_ranks(find_kind, "find the teacher", group)[0]
        assert kind is not None
        maker.kind = kind
        make_all(maker, maker.look_on_all_ranks(group), group)
    return open_text_features(dataset, maker.kind)
