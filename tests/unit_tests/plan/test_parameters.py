"""Exact parameter counts, and downloads, without data, weights or network."""

import huggingface_hub.constants
import pytest

from tests.helpers.plan_cases import shipped_debug_config
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from titan_tts.plan.parameters import describe_model, downloads
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary


@pytest.mark.parametrize("model", ["bytes", "chars", "t5gemma2"])
def test_only_what_depends_on_the_data_is_not_counted(model, tmp_path):
    folder = write_tiny_t5gemma2(tmp_path, tokenizer=False) if model == "t5gemma2" else model
    fields = ["speaker", "duration"]
    config = shipped_debug_config(encoder={"model": str(folder)}, data={"conditioning": fields})
    sizes = describe_model(config)
    seconds = config.data.max_frames / config.data.frames_per_second
    known = make_vocabulary(
        "bytes", conditioning=["duration"], duration_token_seconds=0.5, max_seconds=seconds
    )
    rows = 1 + 1 + len(known.conditioning["duration"])  # the unknown tokens and the bins
    count = {
        "bytes": sizes.args.text_vocab_size - 259,
        "chars": sizes.args.text_vocab_size - 4,
        "t5gemma2": sizes.args.condition_tokens,
    }[model]
    assert count == rows
    assert any("speaker" in sentence for sentence in sizes.unknown)
    assert any("characters" in sentence for sentence in sizes.unknown) == (model == "chars")


@pytest.mark.long
@pytest.mark.parametrize("frozen", [True, False])
def test_a_pretrained_encoder_is_counted_where_it_belongs(frozen, tmp_path):
    folder = write_tiny_t5gemma2(tmp_path, tokenizer=False)
    config = shipped_debug_config(encoder={"model": str(folder), "frozen": frozen})
    found = describe_model(config)
    own = 243_520
    assert found.encoder_parameters == own * frozen and found.frozen == own * frozen
    inside = {name: size for name, size in found.parts().items() if name == "text_encoder"}
    assert inside == ({} if frozen else {"text_encoder": own})
    assert found.trained == sum(found.parts().values())


@pytest.mark.long
def test_what_is_missing_and_what_is_here(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    name, codec = "google/t5gemma-2-270m-270m", "facebook/dacvae-watermarked"
    config = shipped_debug_config(encoder={"model": name}, sampling={"codec": codec})
    encoder, found = downloads(config, describe_model(config).source)
    assert encoder == f"{name} (text encoder): MISSING; fetch it with: hf download {name}"
    assert found.endswith(f"MISSING; fetch it with: hf download {codec} weights.pth")

    snapshot = tmp_path / "hub/models--facebook--dacvae-watermarked/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "weights.pth").write_bytes(b"0")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    folder = write_tiny_t5gemma2(tmp_path / "encoder")
    config = shipped_debug_config(encoder={"model": str(folder)}, sampling={"codec": codec})
    encoder, found = downloads(config, describe_model(config).source)
    assert encoder.endswith("on this machine") and found.endswith("on this machine")
    path = shipped_debug_config(sampling={"codec": str(tmp_path / "no.pth")})
    [missing] = downloads(path, None)
    assert missing.endswith("MISSING")
    assert downloads(shipped_debug_config(), None) == []
