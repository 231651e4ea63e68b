"""The network applied to batches of the loader: copies to the device, noise, conditions and losses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.flow.distillation import Distillation
from torchtitan.models.dit_tts.flow.objective import build_objective
from torchtitan.models.dit_tts.infra.compile import compile_function, static_shapes
from torchtitan.models.dit_tts.model.conditions import Conditions, condition_inputs
from torchtitan.models.dit_tts.model.flops import MicroBatch
from torchtitan.models.dit_tts.streams import PackedStreams, stream_of, valid_mask
from torchtitan.models.dit_tts.text.packing import TextRows
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder


def measure(batch: dict[str, Any], rows: TextRows | None) -> MicroBatch:
    """The shape of a batch on the CPU and the valid lengths of its samples, for the metrics."""
    rows_of_batch, frames, _ = batch["latents"].shape
    padded = {
        "text_tokens": "text_ids",
        "speaker_frames": "speaker",
        "caption_tokens": "caption_ids",
    }
    padded = {name: entry for name, entry in padded.items() if entry in batch}
    lengths = list(zip(*(batch[name].tolist() for name in ("frames", *padded)), strict=True))
    slots = len(lengths) if "longest" in batch else 0
    positions = (batch[entry].shape[:2].numel() // rows_of_batch for entry in padded.values())
    return MicroBatch(
        (rows_of_batch, frames, *positions),
        # All of its samples may be corrupt.
        ([each for each in lengths if each[0]] or lengths[:1]) if slots else lengths,
        [rows.shape] if rows is not None else (),
        slots,
    )


def packed_streams(batch: dict[str, Any], patch_size: int) -> PackedStreams | None:
    """Return the streams of a packed batch; None of a padded one."""
    if "longest" not in batch:
        return None
    patches = -(-batch["speaker_frames"] // patch_size)
    frames, text, speaker = batch["longest"]
    captions = None
    if "caption_ids" in batch:
        samples, longest = batch["caption_ids"].shape
        lengths = torch.full_like(batch["frames"], longest)
        captions = stream_of(lengths, samples * longest, longest)
    return PackedStreams(
        stream_of(batch["frames"], batch["latents"].shape[1], frames),
        stream_of(batch["text_tokens"], batch["text_ids"].shape[1], text),
        stream_of(patches, batch["speaker"].shape[1] // patch_size, -(-speaker // patch_size)),
        captions,
    )


@dataclass(eq=False)
class ForwardPass:
    """The network's forward pass, for training and validation."""

    config: JobConfig
    """the run's, as upstream sees it"""

    model: Any
    text_encoder: PretrainedTextEncoder | None
    """the frozen one outside the model"""

    first_condition_id: int
    """the first id of conditioning tokens, which a text encoder does not see"""

    loss_fn: Callable[..., torch.Tensor]
    """(prediction, target, frame_mask) to (B,) losses, each summed over valid frames"""

    device: torch.device
    amp: Any
    """context of the network's precision"""

    teacher: "Teacher | None" = None

    def __post_init__(self) -> None:
        compiled = self.config.compile
        self.add_noise = build_objective(self.config).add_noise
        if compiled.enable and "loss" in compiled.components:
            backend, shapes = compiled.backend, static_shapes(self.config)
            self.add_noise = compile_function(self.add_noise, backend, shapes)
            self.loss_fn = compile_function(self.loss_fn, backend, shapes)

    def to_device(self, batch: dict[str, Any], rows: TextRows | None = None) -> dict[str, Any]:
        """The batch with its tensors on the device, and with `text_rows`, `packed` and `frame_mask` (B, T), true at the
        frames of the task. The host does not wait for the copies, which are from pinned memory in training."""
        rows = rows or self.text_rows(batch)
        moved = {
            name: value.to(self.device, non_blocking=True)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in batch.items()
        }
        packed = packed_streams(moved, self.config.data.speaker_patch_size)
        lengths = moved["frames"] if packed is None else packed.frames.starts[-1:]
        mask = valid_mask(lengths, moved["latents"].shape[1])
        return moved | {
            "text_rows": rows.to(self.device) if rows is not None else None,
            "packed": packed,
            "frame_mask": torch.ones_like(mask) if self.config.objective.loss_on_padding else mask,
        }

    def text_rows(self, batch: dict[str, Any]) -> TextRows | None:
        """Return the rows in which a pretrained encoder, inside the model or outside, reads the batch's texts; None without one."""
        encoder = self.text_encoder or self.model.text_encoder
        if not isinstance(encoder, PretrainedTextEncoder):
            return None
        ids, tokens = batch["text_ids"], batch["text_tokens"]
        in_text = ids < self.first_condition_id
        if "longest" in batch:
            return encoder.rows(in_text.numpy(), tokens.numpy())
        return encoder.rows((in_text & valid_mask(tokens, ids.shape[1])).numpy())

    def loss_sum(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a micro-batch, summed over the frames of `frame_mask`."""
        frame_mask = batch["frame_mask"]
        packed: PackedStreams | None = batch["packed"]
        in_frames = () if packed is None else (packed.frames,)
        with torch.no_grad():
            place = batch["global_batch"], batch["row"], batch["global_batch_size"]
            noisy = self.add_noise(batch["latents"], *place, *in_frames)
            batch = self._with_features(batch)
            target, given = noisy.target, (noisy.latents, noisy.t)
            if self.teacher is not None:
                target = self.teacher.target(batch, *given, noisy.keep)
        prediction = self.predict(batch, *given, noisy.keep)
        losses = self.loss_fn(prediction, target, frame_mask, *in_frames)
        return losses.sum()

    def _with_features(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with the `text_features` (B, L, h) of a text encoder outside the model."""
        if self.text_encoder is None or "text_features" in batch:
            return batch
        inputs = condition_inputs(batch)
        features = self.text_encoder(inputs["text_ids"], inputs["text_mask"], batch["text_rows"])
        return batch | {"text_features": features}

    def encode(self, batch: dict[str, Any]) -> Conditions:
        """Encoded conditions of a batch, for several calls of `predict`."""
        inputs = condition_inputs(self._with_features(batch))
        with self.amp:
            return self.model.encode_conditions(**inputs)

    def predict(
        self,
        batch: dict[str, Any],
        noisy: torch.Tensor,
        times: torch.Tensor,
        keep: Sequence[torch.Tensor | None] = (None, None, None),
        conditions: Conditions | None = None,
    ) -> torch.Tensor:
        """The network's output: the one way of training, validation and distillation to it.

        Args:
            batch: on the device.
            noisy: (B, T, C) noisy latents at the times (B,).
            keep: of text, speaker and caption, (B,) bool; None keeps all.
            conditions: what `encode` made of the batch; None: they are encoded now.
        """
        mask, packed = batch["frame_mask"], batch["packed"]
        if conditions is not None:
            with self.amp:
                return self.model.denoise(noisy, times, mask, conditions, *keep, packed)
        inputs = condition_inputs(self._with_features(batch))
        with self.amp:
            return self.model(noisy, times, mask, *keep, **inputs)


@dataclass(eq=False)
class Teacher:
    """The frozen network whose guided flow a student learns."""

    forward_pass: ForwardPass
    """of the teacher's network"""

    distillation: Distillation

    def target(
        self,
        batch: dict[str, Any],
        latents: torch.Tensor,
        t: torch.Tensor,
        keep: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """The student's at noisy latents of a batch. `keep`: of text, speaker and caption, (B,)."""
        packed: PackedStreams | None = batch["packed"]
        conditions = self.forward_pass.encode(batch)

        def denoise(x: torch.Tensor, now: torch.Tensor, *has: bool) -> torch.Tensor:
            seen = [each & sees for each, sees in zip(keep, has, strict=True)]
            return self.forward_pass.predict(batch, x, now, seen, conditions)

        return self.distillation.mean_velocity(denoise, latents, t, packed and packed.frames)
