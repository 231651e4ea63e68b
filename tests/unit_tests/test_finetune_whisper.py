"""`examples/finetune_whisper.py`: Whisper learns the corrected texts, and a killed run continues to the same weights."""

import importlib.util
import json

import pytest

from tests.helpers.collected import write_list
from tests.helpers.speech_checkpoints import write_tiny_whisper
from tools.harness import forked
from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def example():
    path = forked.ROOT / "examples/finetune_whisper.py"
    spec = importlib.util.spec_from_file_location("finetune_whisper", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_rows(folder):
    path = write_list(folder, 20, annotated=True, language="de")
    rows = [json.loads(line) | {"text": "Ja!"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_learns_the_texts_and_is_a_recognizer(example, tmp_path, capsys):
    whisper = write_tiny_whisper(tmp_path / "tiny")
    command = [str(write_rows(tmp_path)), str(tmp_path / "out"), "--model", str(whisper)]
    assert example.main([*command, "--lr", "0.02", "--batch", "4", "--epochs", "4"]) == 0
    said = capsys.readouterr().out.split()
    before, after = (float(said[said.index(word) - 1]) for word in ("before,", "after"))
    assert before > 2 and after <= 1  # it babbles before, and then writes the word or nothing
    assert open_recognizer(f"whisper:{tmp_path / 'out'}").spelling == {"colour": "color"}
    assert example.main(command) == 2
    assert "out exists already; give a new folder" in capsys.readouterr().err
