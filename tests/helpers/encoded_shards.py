"""Shards of synthetic samples whose texts a tiny encoder has encoded."""

from pathlib import Path

import torch

from titan_tts.prepare.encode_text import make_shard_features
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.text.feature_store import (
    feature_kind,
    find_feature_file,
    open_text_features,
)
from torchtitan.models.dit_tts.text.hf_tokenizer import load_subword_tokenizer
from torchtitan.models.dit_tts.text.text_encoder import load_text_encoder

SHARDS, SAMPLES, CHANNELS = 3, 30, 8


def write_shards(folder: Path) -> Path:
    return make_shards(folder, SAMPLES, seed=7, channels=CHANNELS, shards=SHARDS)


class Made:
    """A dataset and an encoder, and the features that they make."""

    def __init__(self, folder: Path, model: Path, channels: int = CHANNELS, **encoder):
        encoder = {"dtype": "float32"} | encoder
        self.encoder = Encoder(model=str(model), frozen=True, cache_features=True, **encoder)
        self.dataset = open_dataset(str(folder), channels)
        self.tokenizer = load_subword_tokenizer(str(model))
        self.module = load_text_encoder(self.encoder, "cpu")
        self.kind = feature_kind(self.encoder, self.tokenizer, self.module.source)

    def make(self, shards=None) -> None:
        for shard in range(len(self.dataset.tar_paths)) if shards is None else shards:
            if find_feature_file(self.dataset, shard, self.kind) is None:
                make_shard_features(self.dataset, shard, self.module, self.tokenizer, self.kind)

    def ids(self, sample: int) -> list[int]:
        return self.tokenizer.text_ids(self.dataset.metadata(sample)["text"])

    def read(self, sample: int, features=None) -> torch.Tensor:
        features = features or open_text_features(self.dataset, self.kind)
        out = torch.full((200, features.width), 7.0, dtype=features.torch_dtype)
        rows = features.read(sample, out.view(torch.uint8).numpy())
        assert rows == features.tokens[sample] and (out[rows:] == 7).all()
        return out[:rows]

    def path(self, shard: int) -> Path:
        name = f"{self.kind.folder_name}/{shard:06d}.safetensors"
        return Path(self.dataset.tar_paths[0]).parent / "text_features" / name


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
