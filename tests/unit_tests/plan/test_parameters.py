"""Exact parameter counts, and downloads, without data, weights or network."""

import huggingface_hub.constants
import pytest

from tests.helpers.plan_cases import shipped_debug_config
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from titan_tts.plan.parameters import build_on_meta, count_parameters, downloads, model_sizes, total
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary


@pytest.mark.parametrize("model", ["bytes", "chars", "t5gemma2"])
def test_only_what_depends_on_the_data_is_not_counted(model, tmp_path):
    folder = write_tiny_t5gemma2(tmp_path, tokenizer=False) if model == "t5gemma2" else model
    fields = ["speaker", "duration"]
    config = shipped_debug_config(encoder={"model": str(folder)}, data={"conditioning": fields})
    sizes = model_sizes(config)
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
    sizes = model_sizes(config)
    model = build_on_meta(sizes.args, "float32")
    parts = count_parameters(model, config.encoder, sizes.source)
    own = 243_520
    assert total(parts, trained=True) == sum(p.numel() for p in model.parameters())
    assert total(parts, trained=False) == own * frozen
    [encoder] = [part for part in parts if part.name.startswith(("text encoder", "text_encoder"))]
    assert (encoder.parameters, encoder.trained) == (own, not frozen)


@pytest.mark.long
def test_what_is_missing_and_what_is_here(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    name, codec = "google/t5gemma-2-270m-270m", "facebook/dacvae-watermarked"
    config = shipped_debug_config(encoder={"model": name}, sampling={"codec": codec})
    encoder, found = downloads(config, model_sizes(config).source)
    assert (encoder.name, encoder.here, encoder.command) == (name, False, f"hf download {name}")
    assert (found.here, found.command) == (False, f"hf download {codec} weights.pth")

    snapshot = tmp_path / "hub/models--facebook--dacvae-watermarked/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "weights.pth").write_bytes(b"0")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    folder = write_tiny_t5gemma2(tmp_path / "encoder")
    config = shipped_debug_config(encoder={"model": str(folder)}, sampling={"codec": codec})
    encoder, found = downloads(config, model_sizes(config).source)
    assert encoder.here and found.here and encoder.command == ""
    path = shipped_debug_config(sampling={"codec": str(tmp_path / "no.pth")})
    assert [(each.here, each.command) for each in downloads(path, None)] == [(False, "")]
    assert downloads(shipped_debug_config(), None) == []
