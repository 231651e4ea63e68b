"""`titan-tts recognizer finetune`: what Whisper learns from, that it learns it, and a continued run."""

import json
import os
import shutil

import pytest
import torch
from filelock import FileLock
from transformers import AutoProcessor, Seq2SeqTrainer, WhisperForConditionalGeneration

from tests.helpers.collected import write_list
from tests.helpers.sentences import refused
from tests.helpers.speech_checkpoints import write_tiny_whisper
from titan_tts.cli import main
from titan_tts.recognizer_command import Options, run
from torchtitan.models.dit_tts.speech.scoring.plugins import open_recognizer

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    return write_tiny_whisper(tmp_path_factory.mktemp("tiny"))


def write_rows(folder, count=6, **columns):
    path = write_list(folder, count, annotated=True, language="de", **columns)
    rows = list(map(json.loads, path.read_text().splitlines()))
    texts = {"text": "Ja!", "text_verbatim": "a\u0308h ja"}
    path.write_text("".join(json.dumps(row | texts) + "\n" for row in rows))
    return path


def options(path, out, model, **changes):
    settings = dict(epochs=3.0, lr=0.02, batch=2, heldout_fraction=0.3) | changes
    return Options(
        action="finetune", manifest=str(path), out=str(out), model=str(model), **settings
    )


def test_it_learns_the_texts_and_is_a_recognizer(whisper, tmp_path, capsys):
    path = write_rows(tmp_path)
    assert run(options(path, tmp_path / "out", whisper, epochs=8.0)) == 0
    record = json.loads((tmp_path / "out/finetune.json").read_text())
    # It babbles before, and then writes a word or nothing.
    assert record["wer_before"] > 2 and record["wer"] <= 1
    assert record["rows"] + record["heldout_rows"] == 6 and record["heldout_rows"] > 1
    said = capsys.readouterr().out
    assert (
        f"% before, {100 * record['wer']:.1f} % after" in said
        and f"whisper:{tmp_path / 'out'}" in said
    )
    assert "chance" not in said
    assert run(options(path, tmp_path / "same", whisper, lr=1e-9, epochs=0.5)) == 0
    record = json.loads((tmp_path / "same/finetune.json").read_text())
    same = f"{100 * record['wer_before']:.1f} % before, {100 * record['wer']:.1f} % after"
    assert f"{same}, which may be chance\n" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "same")
    recognizer = open_recognizer(f"whisper:{tmp_path / 'out'}")
    assert recognizer.spelling == {"colour": "color"}
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == ["out"]
    again = options(path, tmp_path / "out", whisper)
    refused(lambda: run(again), "out exists already", "give a new folder")


def test_its_loss_is_that_of_the_tokens_that_generation_gives(whisper, tmp_path, monkeypatch):
    path, batches = write_rows(tmp_path), []
    path.write_text(path.read_text().replace("a\\u0308h ja", "doch", 3))  # shorter texts

    def stop(self, **keys):
        loader = self.get_train_dataloader()
        batches.extend([next(iter(loader)), self.model])
        raise KeyboardInterrupt

    monkeypatch.setattr(Seq2SeqTrainer, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        run(options(path, tmp_path / "out", whisper, text="verbatim", batch=6))
    batch, model = batches
    processor = AutoProcessor.from_pretrained(whisper)
    start = ["<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    start = processor.tokenizer.convert_tokens_to_ids(start)
    texts = [
        [*start, *processor.tokenizer(text, add_special_tokens=False).input_ids, end]
        for text in (" äh ja", " doch")
        for end in [model.config.eos_token_id]
    ]
    assert batch["input_features"].shape[1:] == (80, 3000)
    labels = [[each for each in row if each != -100] for row in batch["labels"].tolist()]
    assert {tuple(row) for row in labels} == {tuple(ids[1:]) for ids in texts}
    with torch.no_grad():
        losses = []
        for features, row in zip(batch["input_features"], labels):  # alone, without padding
            given = torch.tensor([[start[0], *row[:-1]]])
            logits = model(features[None], decoder_input_ids=given).logits[0]
            losses += torch.nn.functional.cross_entropy(
                logits, torch.tensor(row), reduction="none"
            ).tolist()
        assert model(**batch).loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)


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


def test_two_at_once_do_not_share_a_work_folder(whisper, tmp_path):
    with FileLock(tmp_path / "out.lock"):
        refused(lambda: run(options(write_rows(tmp_path), tmp_path / "out", whisper)), "at work")
        refused(
            lambda: run(options(tmp_path / "list.jsonl", f"{tmp_path}/out/", whisper)), "at work"
        )
    assert not (tmp_path / "out.work").exists() and not (tmp_path / "out").exists()


def test_what_cannot_be_learned(whisper, tmp_path, capsys):
    def sentence(*words, path=None, **changes):
        made = options(path or tmp_path / "list.jsonl", tmp_path / "o", whisper, **changes)
        refused(lambda: run(made), *words)

    path = write_list(tmp_path, 6)
    sentence('has no row with "annotated": true', "titan-tts annotate")
    sentence("is no .jsonl file", path=tmp_path, all=True)
    unseen = options(tmp_path / "none.jsonl", tmp_path / "o", "nowhere")
    refused(lambda: run(unseen), "none.jsonl is no .jsonl file")  # before a model is loaded
    sentence("k0 has the language ''", "give --language", all=True)
    sentence("k0 has no verbatim text", all=True, language="en", text="verbatim")
    lines = path.read_text().splitlines()
    row = json.loads(lines[0]) | {"text": "much " * 20}
    path.write_text("\n".join([json.dumps(row), *lines[1:]]))
    capsys.readouterr()
    sentence("5 rows to train on and 0", all=True, language="en", heldout_fraction=0.01)
    assert "1 rows are too long for Whisper" in capsys.readouterr().out
    os.truncate(tmp_path / "2.wav", 500)
    sentence("list.jsonl: k2: the audio is cut short", all=True, language="en")
    assert main(["recognizer", "finetune", str(path), str(tmp_path / "o")]) == 2
    assert "needs --model" in capsys.readouterr().err
