"""What is padding in every row is cut off, and nothing else."""

import torch

from torchtitan.models.dit_tts.data.trim import trim_padding


def test_streams_end_with_their_longest_row():
    frames, text, speaker = (torch.tensor(each) for each in ([17, 3], [2, 16], [0, 0]))
    batch = {
        "latents": torch.randn(2, 40, 4),
        "frames": frames,
        "text_ids": torch.arange(60).view(2, 30),
        "text_tokens": text,
        "text_features": torch.randn(2, 30, 3),
        "text_positions": torch.rand(2, 30),
        "speaker": torch.randn(2, 32, 4),
        "speaker_frames": speaker,
        "sample_id": ["a", "b"],
    }
    labels = torch.where(torch.arange(40) < frames[:, None], 0, -100)
    before = dict(batch)
    trimmed = trim_padding(batch, labels)
    ends = {"latents": 24, "text_ids": 16, "text_features": 16, "text_positions": 16, "speaker": 8}
    for name, end in ends.items():
        assert torch.equal(batch[name], before[name][:, :end]), name
    assert torch.equal(trimmed, labels[:, :24]) and (trimmed == 0).sum() == 20
    assert batch["text_tokens"] is text and batch["sample_id"] == ["a", "b"]
