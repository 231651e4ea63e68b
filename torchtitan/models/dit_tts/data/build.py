"""Build the training loader from a job config, and say what it will do."""

import os
from collections import Counter

import numpy as np

from torchtitan.models.dit_tts.config.batch_split import batch_split
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.buckets import Selection, select_samples, sufficient_limits
from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.data.dataset import Dataset, open_training_data
from torchtitan.models.dit_tts.data.heldout import heldout_shards
from torchtitan.models.dit_tts.data.left_out import samples_left_out
from torchtitan.models.dit_tts.data.packed_rows import PackedPolicy, batch_policy, make_order
from torchtitan.models.dit_tts.data.references import DrawnReferences
from torchtitan.models.dit_tts.data.row_loader import Tokenizer
from torchtitan.models.dit_tts.data.sampling_weights import draws_per_epoch
from torchtitan.models.dit_tts.data.storage import plain_name
from torchtitan.models.dit_tts.errors import InputError, printable, require
from torchtitan.tools.logging import logger


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: Tokenizer, job_config
) -> LatentDataLoader:
    """The loader of data-parallel rank `dp_rank`, as upstream's `build_dataloader_fn`. Every rank computes the same
    order, so nothing is exchanged."""
    data = job_config.data
    global_batch_size, accumulation_steps = batch_split(job_config.training, dp_world_size)
    dataset = open_training_data(data, (dp_rank, dp_world_size))
    if not data.allow_heldout:
        _refuse_heldout(dataset)
    text_tokens = tokenizer.max_tokens(dataset, (dp_rank, dp_world_size))
    selection = training_samples(data, dataset, text_tokens)
    samples = selection.samples
    draws = sample_draws(data, dataset, selection)
    lengths = selection.frames, dataset.reference_frames[samples], text_tokens[samples]
    policy = batch_policy(data, global_batch_size, *lengths, draws)
    order = make_order(policy, samples, selection.frames, data.seed, draws)
    if data.epochs:
        # Upstream reads it after this call: for the schedule, the end and the log.
        job_config.training.steps = order.batches_before_epoch(data.epochs)
        if job_config.training.steps < 1:
            raise InputError(
                f"[data] epochs = {data.epochs} of {len(samples)} samples are less than one global batch; raise it"
            )
    loader = LatentDataLoader(
        dataset,
        order,
        policy,
        tokenizer,
        data,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        accumulation_steps=accumulation_steps,
        references=_drawn_references(data, dataset, samples),
    )
    if dp_rank == 0:
        for line in describe(dataset, selection, loader):
            logger.info(line)
        left = np.isin(np.arange(len(dataset)), samples, invert=True)
        if words := samples_left_out(dataset, left, data.frames_per_second):
            logger.warning(f"{words}; {sufficient_limits(dataset.frames, text_tokens, data)}")
    return loader


def _refuse_heldout(dataset: Dataset) -> None:
    held = heldout_shards(dataset.tar_paths)
    if any(held):
        folder = os.path.dirname(plain_name(dataset.tar_paths[held.index(True)]))
        raise InputError(
            f"[data] path names shards of {folder}, which holds held-out recordings for validation; give the folders "
            "of training recordings only, or train on all of it with --data.allow-heldout"
        )


def training_samples(data: Data, dataset: Dataset, text_tokens: np.ndarray) -> Selection:
    """The samples within the limits. Raises InputError where they leave out more than is allowed."""
    selection = select_samples(dataset.frames, text_tokens, data)
    total = len(dataset)
    dropped = 1 - len(selection.samples) / total
    if dropped > data.max_dropped_fraction:
        raise InputError(
            f"[data] max_frames = {data.max_frames} leaves out {selection.too_long / total:.1%} of the {total} samples "
            f"and max_text_tokens = {data.max_text_tokens} another {selection.too_much_text / total:.1%}; "
            f"{sufficient_limits(dataset.frames, text_tokens, data)}, or accept the loss with [data] "
            f"max_dropped_fraction = {min(1.0, dropped + 0.005):.2f} (now {data.max_dropped_fraction:g})"
        )
    return selection


def sample_draws(data: Data, dataset: Dataset, selection: Selection) -> np.ndarray | None:
    """Draws per epoch of each selected sample; see `draws_per_epoch`."""
    samples = selection.samples
    codes = None
    if data.balance_by:
        codes, values = dataset.labels(data.balance_by)
        if not values:
            raise InputError(
                f"[data] balance_by = '{data.balance_by}', but no sample's JSON has this key; leave it empty"
            )
        codes = codes[samples]
    weights = dataset.weight[samples] if data.use_sample_weights else None
    if weights is not None and np.isnan(weights).any():
        name = dataset.sample_id(int(samples[np.isnan(weights)][0]))
        raise InputError(
            f"[data] use_sample_weights = true, but the \"weight\" in the JSON of sample '{name}' is not a number from "
            "1e-6 to 1e6; correct it or set use_sample_weights = false"
        )
    return draws_per_epoch(data, dataset.source[samples], selection.frames, codes, weights)


def _drawn_references(data: Data, dataset: Dataset, samples: np.ndarray) -> DrawnReferences | None:
    if data.references != "drawn" and dataset.reference_frames[samples].any():
        return None
    codes, _ = dataset.labels("speaker")
    drawn = DrawnReferences(samples, codes, dataset.frames, dataset.latents_hash)
    if data.references == "drawn":
        require(
            bool(drawn.samples_with_same_speaker),
            "[data] references = 'drawn', but no two samples have the same speaker in their JSON; prepare the data "
            "with speaker labels or set references = 'stored'",
        )
        return drawn
    require(
        not drawn.samples_with_same_speaker,
        "[data] references = 'stored', but no sample has a stored reference, as titan-tts prepare --references 0 leaves "
        "them; set references = 'drawn', and [objective] speaker_dropout = 1 if the model is to have none",
    )
    return None


def describe(dataset: Dataset, selection: Selection, loader: LatentDataLoader) -> list[str]:
    """The arithmetic of a run's data, as lines for the log."""
    policy, ranks, steps = loader.policy, loader.dp_world_size, loader.accumulation_steps
    hours = int(selection.frames.sum()) / loader.frames_per_second / 3600
    low, high = min(policy.batch_sizes), max(policy.batch_sizes)
    lines = [
        f"{len(selection.samples)} samples, {hours:.2f} hours, {len(dataset.tar_paths)} shards; left out: "
        f"{selection.too_long} too long, {selection.too_much_text} with too much text; "
        f"problems skipped: {len(dataset.problems)}"
    ]
    counts = Counter(tar_path for tar_path, _ in dataset.problems)
    first = {tar_path: problem.sentence for tar_path, problem in reversed(dataset.problems)}
    for tar_path, count in counts.items():
        name, sentence = printable(plain_name(tar_path)), printable(first[tar_path])
        lines.append(f"{name}: {count} problems left out, the first: {sentence}")
    unit = "samples"
    if isinstance(policy, PackedPolicy):
        unit = f"packed rows of up to {policy.max_samples} samples"
    lines.append("bucket  frames  text  speaker  samples  global batch  micro-batch")
    sizes = zip(policy.shapes, policy.sample_counts, policy.batch_sizes)
    for number, ((T, L, R), count, size) in enumerate(sizes):
        lines.append(
            f"{number:6d}  {T:6d}  {L:4d}  {R:7d}  {count:7d}  {size:12d}  {size // (ranks * steps):11d}"
        )
    lines.append(
        f"{low} to {high} {unit} per step = {ranks} ranks x {steps} accumulation steps x {low // (ranks * steps)} "
        f"to {high // (ranks * steps)}; {loader.order.batches_per_epoch:.1f} steps per epoch; padding: "
        f"{1 - policy.useful_fraction:.1%} of the frames, {1 - policy.useful_text_fraction:.1%} of the "
        f"text and {1 - policy.useful_reference_fraction:.1%} of the reference"
    )
    if loader.references is not None:
        drawn = loader.references.samples_with_same_speaker
        lines.append(
            f"references are drawn anew for {drawn} samples of {loader.references.speakers} speakers; "
            f"{len(selection.samples) - drawn} without another sample by their speaker keep theirs"
        )
    return [f"data: {line}" for line in lines]
