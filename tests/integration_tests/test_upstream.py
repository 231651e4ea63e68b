"""Upstream's families train through our tree, and find the converters that upstream registers."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

from tools.harness import forked

TEXT = "one two three four five six seven eight nine ten".split()
CONVERTERS = {
    "quantize.linear.float8",
    "quantize.grouped_mm.float8",
    "quantize.linear.mx",
    "quantize.grouped_mm.mx",
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    """A tokenizer and a dataset under the names that upstream's debug configs have."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("upstream")
    words = ["<unk>", "<s>", "</s>", *TEXT]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    rows = folder / "tests/assets/c4_test"
    rows.mkdir(parents=True)
    lines = [json.dumps({"text": " ".join(TEXT[n % 10 :] * 8)}) for n in range(40)]
    (rows / "data.json").write_text("\n".join(lines) + "\n")
    return folder


def train_upstream(folder: str, arguments: list[str]) -> None:
    """Two steps of upstream's own trainer; prints the result as JSON."""
    os.chdir(folder)
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import model_converter
    from torchtitan.train import Trainer

    from torchtitan.models.dit_tts.main import set_single_process_defaults

    set_single_process_defaults()
    trainer = Trainer(ConfigManager().parse_args(arguments))
    [model] = trainer.model_parts
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train()
    moved = [not (p == old).all() for p, old in zip(model.parameters(), before)]
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    float8 = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    found = {
        "step": trainer.step,
        "moved": sum(map(bool, moved)) / len(moved),
        "finite": finite,
        "float8": float8,
        "converters": sorted(model_converter._registry_model_converter_cls),
    }
    trainer.close()
    print("\n" + json.dumps(found), flush=True)
    sys.stdout.flush()


def test_it_trains_two_steps(assets, tmp_path):
    """One that a CPU can train: upstream's mixtures of experts and flux's encoders cannot run there."""
    arguments = ["--model.name=qwen3", "--model.flavor=debugmodel", "--training.steps=2"]
    arguments += ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.emulate"]
    arguments += ["--training.seq_len=64", "--training.local_batch_size=2"]
    arguments += ["--training.dataset=c4_test", "--model.hf_assets_path=tokenizer"]
    arguments += ["--lr_scheduler.warmup_steps=0", f"--job.dump_folder={tmp_path}"]
    log, errors = tmp_path / "log", tmp_path / "errors"
    child = forked.start(train_upstream, str(assets), arguments, log=log, errors=errors)
    assert child.wait() == 0, errors.read_text()[-4000:]
    found = json.loads(log.read_text().splitlines()[-1])
    assert found["step"] == 2 and found["finite"] and math.isclose(found["moved"], 1.0)
    assert found["float8"] > 0 and CONVERTERS <= set(found["converters"])
