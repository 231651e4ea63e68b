"""`titan-tts recognizer finetune`: what Whisper learns from, that it learns it, and a continued run."""

import json

import pytest
import torch
from transformers import AutoProcessor, Seq2SeqTrainer, WhisperForConditionalGeneration

from tests.helpers.collected import write_list
from tests.helpers.sentences import refused
from tests.helpers.speech_checkpoints import write_tiny_whisper
from titan_tts.cli import main
from titan_tts.recognizer_command import Options, run
from torchtitan.models.dit_tts.speech.scoring.interface import Sound
from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    return write_tiny_whisper(tmp_path_factory.mktemp("tiny"))


def write_rows(folder, count=8, **columns):
    path = write_list(folder, count, annotated=True, language="de", **columns)
    rows = list(map(json.loads, path.read_text().splitlines()))
    texts = {"text": "Ja!", "text_verbatim": "äh ja"}
    path.write_text("".join(json.dumps(row | texts) + "\n" for row in rows))
    return path


def options(path, out, model, **changes):
    settings = dict(epochs=4.0, lr=0.02, batch=2, heldout_fraction=0.3) | changes
    return Options(
        action="finetune", manifest=str(path), out=str(out), model=str(model), **settings
    )


def test_it_learns_the_texts_and_is_a_recognizer(whisper, tmp_path, capsys):
    path = write_rows(tmp_path)
    assert run(options(path, tmp_path / "out", whisper, epochs=12.0)) == 0
    record = json.loads((tmp_path / "out/finetune.json").read_text())
    assert record["wer_before"] >= 0.9 and record["wer"] == 0
    assert record["rows"] + record["heldout_rows"] == 8 and record["heldout_rows"] > 1
    said = capsys.readouterr().out
    assert "% before, 0.0 % after" in said and f"whisper:{tmp_path / 'out'}" in said
    recognizer = open_recognizer(f"whisper:{tmp_path / 'out'}")
    assert recognizer.transcribe(Sound(torch.zeros(8000), 16_000), "de").startswith("Ja")
    assert recognizer.spelling == {"colour": "color"}
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == ["out"]
    again = options(path, tmp_path / "out", whisper)
    refused(lambda: run(again), "out exists already", "give a new folder")


def test_its_loss_is_that_of_the_tokens_that_generation_gives(whisper, tmp_path, monkeypatch):
    path, batches = write_rows(tmp_path), []

    def stop(self, **keys):
        loader = self.get_train_dataloader()
        batches.extend([next(iter(loader)), self.model])
        raise KeyboardInterrupt

    monkeypatch.setattr(Seq2SeqTrainer, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        run(options(path, tmp_path / "out", whisper, text="verbatim", batch=3))
    batch, model = batches
    processor = AutoProcessor.from_pretrained(whisper)
    start = ["<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    ids = processor.tokenizer.convert_tokens_to_ids(start)
    ids += processor.tokenizer(" äh ja", add_special_tokens=False).input_ids
    ids.append(model.config.eos_token_id)
    assert batch["input_features"].shape == (3, 80, 3000)
    assert batch["labels"].tolist() == [ids[1:]] * 3
    with torch.no_grad():
        given = torch.tensor([ids[:-1]] * 3)
        logits = model(batch["input_features"], decoder_input_ids=given).logits
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        assert torch.allclose(model(**batch).loss, wanted)


def test_an_interrupted_run_continues_to_the_same_weights(whisper, tmp_path, monkeypatch):
    path = write_rows(tmp_path)
    run(options(path, tmp_path / "whole", whisper))
    steps, save = [], Seq2SeqTrainer._save_checkpoint

    def save_and_stop(self, *arguments):
        save(self, *arguments)
        steps.append(self.state.global_step)
        if len(steps) == 2:
            (tmp_path / "out.work/checkpoints/checkpoint-999").mkdir()  # cut while it was written
            raise KeyboardInterrupt

    monkeypatch.setattr(Seq2SeqTrainer, "_save_checkpoint", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run(options(path, tmp_path / "out", whisper))
    other = options(path, tmp_path / "out", whisper, lr=0.01)
    refused(lambda: run(other), "out.work was begun otherwise", "lr was 0.02, is 0.01")
    run(options(path, tmp_path / "out", whisper))
    assert steps[2] > steps[1] and len(steps) == len(set(steps))
    whole, continued = (
        WhisperForConditionalGeneration.from_pretrained(tmp_path / name).state_dict()
        for name in ("whole", "out")
    )
    for name, weight in whole.items():
        assert torch.equal(weight, continued[name]), name


def test_what_cannot_be_learned(whisper, tmp_path, capsys):
    def sentence(*words, path=None, **changes):
        made = options(path or tmp_path / "list.jsonl", tmp_path / "o", whisper, **changes)
        refused(lambda: run(made), *words)

    path = write_list(tmp_path, 6)
    sentence('has no row with "annotated": true', "titan-tts annotate")
    sentence("k0 has the language ''", "give --language", all=True)
    sentence("k0 has no verbatim text", all=True, language="en", text="verbatim")
    lines = path.read_text().splitlines()
    row = json.loads(lines[0]) | {"text": "much " * 20}
    path.write_text("\n".join([json.dumps(row), *lines[1:]]))
    capsys.readouterr()
    sentence("5 rows to train on and 0", all=True, language="en", heldout_fraction=0.01)
    assert "1 rows are too long for Whisper" in capsys.readouterr().out
    assert main(["recognizer", "finetune", str(path), str(tmp_path / "o")]) == 2
    assert "needs --model" in capsys.readouterr().err
