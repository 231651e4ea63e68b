"""Utterances of mixed lengths, in our batches and F5-TTS's, of as many frames."""

import tempfile
from dataclasses import replace

import numpy as np
from torch.utils.data import SequentialSampler

from benchmarks.speed.peers import CHANNELS, Batch, LoaderBatch, fifty_million, make_batch
from benchmarks.synthetic_speech import lognormal_frames, random_text
from torchtitan.models.dit_tts.config.job_config import Data, JobConfig
from torchtitan.models.dit_tts.data.batch_sampler import GlobalBatchSampler
from torchtitan.models.dit_tts.data.buckets import ALIGNMENT, make_batch_policy
from torchtitan.models.dit_tts.data.build import build_dataloader
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary

CHARACTERS_PER_FRAME = 15 / 25
LONGEST, TEXT_LIMIT, REFERENCE_LIMIT = 768, 480, 384


class Lengths:
    """Utterances of log-normal lengths (mean 9 s, sigma 0.5), each with a text and the reference of
    another one, in ours' and F5-TTS's batches of as many frames."""

    def __init__(self, utterances: int):
        generator = np.random.default_rng(0)
        self.frames = lognormal_frames(generator, utterances, 9.0)
        text = self.frames * CHARACTERS_PER_FRAME * generator.lognormal(0, 0.15, utterances)
        self.text = np.clip(text.astype(int), 1, np.minimum(TEXT_LIMIT, self.frames))
        self.reference = np.minimum(generator.permutation(self.frames), REFERENCE_LIMIT)
        self.budget = 2 * LONGEST
        self.data = Data(
            max_frames=LONGEST,
            max_speaker_frames=REFERENCE_LIMIT,
            max_reference_ratio=1.0,
            max_text_tokens=TEXT_LIMIT,
            num_buckets=8,
            batch_multiple=1,
            speaker_patch_size=fifty_million().speaker_patch_size,
        )
        lengths = self.frames, self.reference, self.text
        self.policy = make_batch_policy(self.data, self.budget // LONGEST, *lengths)

    def ours(self, compiled: bool) -> list[Batch]:
        """An epoch's batches. As in training those that are not compiled end with their longest row."""
        buckets = self.policy.bucket_of(self.frames)
        samples = [np.flatnonzero(buckets == b) for b in range(len(self.policy.edges))]
        order = GlobalBatchSampler(samples, self.policy.batch_sizes, seed=0)
        found = []
        for batch in map(order.batch, range(order.batches_before_epoch(1))):
            shape = self.policy.shapes[batch.bucket]
            references = np.minimum(self.reference[batch.samples], shape[2])
            lengths = (self.frames[batch.samples], self.text[batch.samples], references)
            if not compiled:
                shape = [-(-int(each.max()) // ALIGNMENT) * ALIGNMENT for each in lengths]
            found.append(make_batch(*(each.tolist() for each in lengths), shape))
        return found

    def packed(self) -> list[LoaderBatch]:
        """An epoch's batches of one row, from our loader over shards of such utterances."""
        generator = np.random.default_rng(1)
        with tempfile.TemporaryDirectory() as folder:
            write_shard(
                f"{folder}/0.tar",
                (
                    Triplet(
                        f"{number:04d}",
                        0.8 * generator.standard_normal((frames, CHANNELS), np.float32),
                        0.8 * generator.standard_normal((reference, CHANNELS), np.float32),
                        {"text": random_text(generator, text)},
                    )
                    for number, (frames, text, reference) in enumerate(
                        zip(self.frames.tolist(), self.text.tolist(), self.reference.tolist())
                    )
                ),
            )
            config = JobConfig(data=replace(self.data, path=folder, batching="packed"))
            config.data.longest_per_row = self.budget // LONGEST
            config.data.num_workers = 0
            config.training.local_batch_size = self.budget // LONGEST
            config.training.global_batch_size = self.budget // LONGEST
            loader = build_dataloader(1, 0, UnitTokenizer(Vocabulary()), config)
            batches = range(loader.order.batches_before_epoch(1))
            return [LoaderBatch(*loader.micro_batch(number)) for number in batches]

    def of_f5(self) -> list[Batch]:
        """Its own dynamic batches, each padded to its longest."""
        from f5_tts.model.dataset import DynamicBatchSampler

        source = SequentialSampler(_FrameLengths(self.frames))
        batches = DynamicBatchSampler(source, self.budget, random_seed=0)
        return [
            make_batch(self.frames[b].tolist(), self.text[b].tolist(), [1] * len(b))
            for b in batches
        ]


class _FrameLengths:
    def __init__(self, frames: np.ndarray):
        self.frames = frames

    def __len__(self) -> int:
        return len(self.frames)

    def get_frame_len(self, index: int) -> int:
        return int(self.frames[index])
