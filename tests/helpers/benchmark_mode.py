"""A run's config and loader in benchmark mode, small."""

from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import load_config, upstream_view
from torchtitan.models.dit_tts.data.dataloader import LatentDataLoader
from torchtitan.models.dit_tts.run.benchmark.loader import (
    build_synthetic_dataloader,
    build_synthetic_tokenizer,
)

SMALL = [
    "--benchmark.enable",
    "--benchmark.steps=5",
    "--benchmark.warmup_steps=2",
    "--benchmark.mean_seconds=3",
    "--data.max_frames=128",
    "--data.max_speaker_frames=64",
    "--data.max_text_tokens=64",
    "--data.num_buckets=3",
    "--data.num_workers=0",
    "--data.latent_channels=16",
    "--training.global_batch_size=8",
]


def config(tmp_path, *arguments: str) -> JobConfig:
    loaded = load_config([*SMALL, f"--job.dump_folder={tmp_path}", *arguments])
    return upstream_view(loaded, tmp_path, 1)


def loader_of(job: JobConfig) -> LatentDataLoader:
    return build_synthetic_dataloader(1, 0, build_synthetic_tokenizer(job), job)
