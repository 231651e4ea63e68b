"""Exact parameter counts without data, weights or network."""

import pytest

from tests.helpers.plan_cases import shipped_debug_config
from tests.helpers.pretrained_checkpoints import write_tiny_t5gemma2
from titan_tts.plan.parameters import describe_model


@pytest.mark.parametrize("model", ["bytes", "chars", "t5gemma2"])
def test_only_what_depends_on_the_data_is_not_counted(model, tmp_path):
    """Each of two fields has a row for an unknown value."""
    folder = write_tiny_t5gemma2(tmp_path, tokenizer=False) if model == "t5gemma2" else model
    fields = ["speaker", "emotion"]
    sizes = describe_model(
        shipped_debug_config(encoder={"model": str(folder)}, data={"conditioning": fields})
    )
    rows = {"bytes": 259 + 2, "chars": 4 + 2}.get(model, 0)
    assert (sizes.args.text_vocab_size, sizes.args.condition_tokens) == (rows, 0 if rows else 2)
    unknown = "values of speaker, values of emotion"
    characters = "characters, phones or pieces of the texts, " if model == "chars" else ""
    assert sizes.unknown == characters + unknown
    assert describe_model(shipped_debug_config(encoder={"vocab_size": 300})).unknown == ""


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
    units = {weight.unit for weight in found.weights if weight.name.startswith("text_encoder.")}
    blocks = {f"text_encoder.{number}" for number in range(6)}
    assert units == (set() if frozen else {"text_encoder"} | blocks)
