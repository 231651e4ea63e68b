"""The peers of benchmarks/peers.py, and ours, as the same work: training steps and sampling.

The peers' models, objectives and samplers are their own code, imported from checkouts that the user has.
What they import for audio, wave forms and Chinese text is not needed here and is stepped around.
"""

import importlib
import itertools
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.objective import FlowMatching, squared_error_sums
from torchtitan.models.dit_tts.infra.compile import apply_compile
from torchtitan.models.dit_tts.infra.kernels import build_model
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.speech.sampling.sampler import SpeechRequest, generate_latents
from torchtitan.models.dit_tts.text.vocabulary import BYTE_VOCAB_SIZE

IRODORI, F5, OURS = "Irodori-TTS", "F5-TTS", "ours"
SOURCES = {
    IRODORI: ("https://github.com/Aratako/Irodori-TTS", "irodori_tts/model.py"),
    F5: ("https://github.com/SWivid/F5-TTS", "src/f5_tts/model/cfm.py"),
}
CHANNELS = 128


def fifty_million() -> DiTTTSModelArgs:
    """Sizes of a model of about 50 million parameters, with a learned text encoder."""
    return DiTTTSModelArgs(
        dim=512,
        n_layers=9,
        n_heads=8,
        mlp_dim=1408,
        speaker_dim=256,
        speaker_n_layers=3,
        speaker_n_heads=4,
        speaker_mlp_dim=704,
        text_dim=256,
        text_vocab_size=BYTE_VOCAB_SIZE,
        text_n_layers=2,
        text_n_heads=4,
        adaln_rank=96,
        timestep_dim=256,
    )


def randomize(parameters: Iterable[torch.nn.Parameter], seed: int = 0) -> None:
    """Normal values everywhere, matrices with variance 1 / fan-in, so that no part is switched off by a
    zero initial value or too small to be seen in the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            mean, std = (1.0, 0.1) if parameter.dim() == 1 else (0.0, parameter.shape[-1] ** -0.5)
            parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))


@dataclass(frozen=True)
class Batch:
    """A micro-batch as all contenders get it, at its padded lengths."""

    latents: torch.Tensor
    """(B, T, C)"""

    text_ids: torch.Tensor
    """(B, L)"""

    reference: torch.Tensor
    """(B, R, C)"""

    frames: torch.Tensor
    """(B,) valid frames"""

    text_lengths: torch.Tensor
    """(B,)"""

    reference_frames: torch.Tensor
    """(B,)"""


def make_batch(rows: int, T: int, L: int, R: int) -> Batch:
    """Random latents, texts and references of full lengths."""
    generator = torch.Generator().manual_seed(rows + T)
    return Batch(
        0.8 * torch.randn(rows, T, CHANNELS, generator=generator),
        torch.randint(3, BYTE_VOCAB_SIZE, (rows, L), generator=generator),
        0.8 * torch.randn(rows, R, CHANNELS, generator=generator),
        *(torch.full((rows,), length) for length in (T, L, R)),
    )


def _mask(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.arange(longest) < lengths[:, None]


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Return positions (B, L) of tokens that all take the same time; -1 where `mask` is false."""
    middles = (torch.arange(mask.shape[1]) + 0.5) / mask.sum(1, keepdim=True)
    return middles.masked_fill(~mask, -1.0)


class Contender:
    """A model with its objective. `module` is what is trained."""

    name: str
    module: nn.Module

    def loss(self, batch: Batch, autocast: Callable[[], Any]) -> torch.Tensor:
        """Scalar loss; what the contender runs in mixed precision runs under `autocast()`."""
        raise NotImplementedError

    def compile(self) -> None:
        """Compiles each block for one static shape."""
        raise NotImplementedError


class Ours(Contender):
    name = OURS

    def __init__(self, args: DiTTTSModelArgs | None = None):
        self.args = replace(args or fifty_million(), text_positions="aligned")
        self.module = cast(DiTTTSModel, build_model(self.args))
        self.objective = FlowMatching()
        self.number = 0

    def loss(self, batch: Batch, autocast: Callable[[], Any]) -> torch.Tensor:
        self.number += 1
        rows = torch.arange(len(batch.latents))
        noisy = self.objective.add_noise(
            batch.latents, torch.tensor(self.number), rows, len(batch.latents)
        )
        valid = _mask(batch.frames, batch.latents.shape[1])
        with autocast():
            prediction = self.module(
                noisy.latents,
                noisy.t,
                valid,
                noisy.keep_text,
                noisy.keep_speaker,
                text_ids=batch.text_ids,
                text_mask=_mask(batch.text_lengths, batch.text_ids.shape[1]),
                speaker=batch.reference,
                speaker_mask=_mask(batch.reference_frames, batch.reference.shape[1]),
                text_positions=_positions(_mask(batch.text_lengths, batch.text_ids.shape[1])),
            )
        return squared_error_sums(prediction, noisy.target, valid).sum() / valid.sum()

    def compile(self) -> None:
        apply_compile(self.module, "inductor", 1, components=("model", "encoders"))

    def sample(self, batch: Batch, steps: int, text_scale: float, speaker_scale: float) -> None:
        requests = [
            SpeechRequest(str(row), reference, batch.latents.shape[1])
            for row, reference in enumerate(batch.reference)
        ]
        generate_latents(
            self.module,
            _Ids(batch.text_ids),
            self.objective,
            requests,
            Sampling(steps=steps, text_scale=text_scale, speaker_scale=speaker_scale, min_t=0.5),
            seed=0,
            device=torch.device("cpu"),
        )


class _Ids:
    """A tokenizer that knows the texts by their rows."""

    def __init__(self, ids: torch.Tensor):
        self.ids = ids

    def encode(self, text: str, metadata: Any) -> list[int]:
        return self.ids[int(text)].tolist()

    aligner = "ours needs none for positions that are spread evenly"

    def text_positions(self, text: str) -> np.ndarray:
        return _positions(torch.ones_like(self.ids[int(text)][None], dtype=torch.bool))[0].numpy()


def _compile_blocks(*stacks: Iterable[nn.Module]) -> None:
    """Compile each block, as `apply_compile` does ours. Compiling a peer's whole network takes minutes on a CPU; which of
    the two is faster has not been compared."""
    for block in itertools.chain(*stacks):
        block.compile(dynamic=False)


class Irodori(Contender):
    """Irodori-TTS as its train.py runs it; the masked loss is rewritten, since that script needs its own data."""

    name = IRODORI

    def __init__(self, args: DiTTTSModelArgs):
        config = importlib.import_module("irodori_tts.config")
        model = importlib.import_module("irodori_tts.model")
        self.flow = importlib.import_module("irodori_tts.rf")
        self.module = model.TextToLatentRFDiT(
            config.ModelConfig(
                latent_dim=CHANNELS,
                model_dim=args.dim,
                num_layers=args.n_layers,
                num_heads=args.n_heads,
                mlp_ratio=args.mlp_dim / args.dim,
                text_vocab_size=args.text_vocab_size,
                text_dim=args.text_dim,
                text_layers=args.text_n_layers,
                text_heads=args.text_n_heads,
                text_mlp_ratio=11 / 4,
                speaker_dim=args.speaker_dim,
                speaker_layers=args.speaker_n_layers,
                speaker_heads=args.speaker_n_heads,
                speaker_mlp_ratio=args.speaker_mlp_dim / args.speaker_dim,
                speaker_patch_size=args.speaker_patch_size,
                timestep_embed_dim=args.timestep_dim,
                adaln_rank=args.adaln_rank,
            )
        )

    def loss(self, batch: Batch, autocast: Callable[[], Any]) -> torch.Tensor:
        rows, T, _ = batch.latents.shape
        t = self.flow.sample_stratified_logit_normal_t(rows, batch.latents.device)
        noise = torch.randn_like(batch.latents)
        noisy = self.flow.rf_interpolate(batch.latents, noise, t)
        target = self.flow.rf_velocity_target(batch.latents, noise)
        valid = _mask(batch.frames, T)
        keep_text, keep_speaker = (torch.rand(2, rows, 1) >= 0.1).unbind()
        with autocast():
            prediction = self.module(
                x_t=noisy,
                t=t,
                text_input_ids=batch.text_ids,
                text_mask=_mask(batch.text_lengths, batch.text_ids.shape[1]) & keep_text,
                ref_latent=batch.reference * keep_speaker[..., None],
                ref_mask=_mask(batch.reference_frames, batch.reference.shape[1]) & keep_speaker,
                latent_mask=valid,
            )
        error = (prediction.float() - target).square().mean(-1)
        return (error * valid).sum() / valid.sum()

    def compile(self) -> None:
        module = self.module
        _compile_blocks(module.blocks, module.text_encoder.blocks, module.speaker_encoder.blocks)

    def sample(self, batch: Batch, steps: int, text_scale: float, speaker_scale: float) -> None:
        self.flow.sample_euler_rf_cfg(
            self.module,
            batch.text_ids,
            torch.ones_like(batch.text_ids, dtype=torch.bool),
            batch.reference.to(self.module.dtype),
            torch.ones(batch.reference.shape[:2], dtype=torch.bool),
            batch.latents.shape[1],
            num_steps=steps,
            cfg_scale_text=text_scale,
            cfg_scale_speaker=speaker_scale,
        )


class F5TTS(Contender):
    """Its in-fill objective: the reference is a part of the utterance. Without dropout."""

    name = F5

    def __init__(self, args: DiTTTSModelArgs):
        backbone = importlib.import_module("f5_tts.model.backbones.dit")
        cfm = importlib.import_module("f5_tts.model.cfm")
        network = backbone.DiT(
            dim=args.dim,
            depth=args.n_layers,
            heads=args.n_heads,
            dim_head=args.dim // args.n_heads,
            dropout=0.0,
            ff_mult=4,
            mel_dim=CHANNELS,
            text_num_embeds=args.text_vocab_size,
            text_dim=args.dim // 2,
            conv_layers=4,
        )
        no_spectrogram = nn.Identity()
        no_spectrogram.n_mel_channels = CHANNELS
        self.module = cfm.CFM(
            network,
            audio_drop_prob=0.0,  # the flag makes another graph, and costs nothing
            cond_drop_prob=0.0,
            mel_spec_module=no_spectrogram,
        )

    def loss(self, batch: Batch, autocast: Callable[[], Any]) -> torch.Tensor:
        text = batch.text_ids.masked_fill(~_mask(batch.text_lengths, batch.text_ids.shape[1]), -1)
        with autocast():
            loss, _, _ = self.module(batch.latents, text, lens=batch.frames)
        return loss

    def compile(self) -> None:
        """Its text blocks stay eager."""
        _compile_blocks(self.module.transformer.transformer_blocks)


def trainer(contender: Contender, precision: str) -> Callable[[Batch], None]:
    """A training step: loss, backward, clipping and fused AdamW, the same for all."""
    randomize(contender.module.parameters())  # what starts at zero would multiply zeros
    optimizer = torch.optim.AdamW(contender.module.parameters(), lr=1e-4, fused=True)

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        contender.loss(batch, autocast).backward()
        torch.nn.utils.clip_grad_norm_(contender.module.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step


# ---- importing the peers


def _stand_in(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def _package(name: str, folder: Path) -> None:
    """A package whose own `__init__` does not run: it would import the peer's trainer and audio code."""
    _stand_in(name).__path__ = [str(folder)]


def import_peer(name: str, checkout: Path) -> None:
    """Makes the peer's modules importable from a checkout.

    Raises:
        InputError: the folder is not a checkout of the peer, or a package that it needs is missing.
    """
    url, marker = SOURCES[name]
    if not (checkout / marker).is_file():
        raise InputError(
            f"{checkout} is not a checkout of {name}, it has no {marker}: git clone {url}"
        )
    if name == IRODORI:
        _package("irodori_tts", checkout / "irodori_tts")
        return
    for missing in ("torchaudio", "librosa", "rjieba"):
        _stand_in(missing)
    _stand_in("librosa.filters", mel=None)
    _stand_in("pypinyin", Style=None, lazy_pinyin=None)
    for package in ("f5_tts", "f5_tts.model", "f5_tts.model.backbones"):
        _package(package, checkout / "src" / package.replace(".", "/"))
    try:
        importlib.import_module("f5_tts.model.cfm")
    except ModuleNotFoundError as error:
        raise InputError(
            f"{name} needs {error.name}: pip install --no-deps -r benchmarks/requirements.txt"
        ) from error
