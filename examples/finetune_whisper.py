"""Trains Whisper on the texts that people have corrected in `titan-tts annotate`, by transformers' own trainer.

    python examples/finetune_whisper.py /data/collected/collection.jsonl my_whisper --model small --language en

Then `--recognizer whisper:my_whisper` works in every command. It needs `pip install accelerate`. The same command
continues after an interruption, from my_whisper.checkpoints. A tenth of the rows is held out, and their word error rate
before and after is printed. Rows are left out that nobody has annotated (--all takes them) or that are over 30 seconds.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from titan_tts.overlay import install_overlay

install_overlay()

from titan_tts.annotate.segments import load_audio, read_segments  # noqa: E402
from titan_tts.records.columns import drawn  # noqa: E402
from torchtitan.models.dit_tts.errors import report_input_errors, require  # noqa: E402
from torchtitan.models.dit_tts.speech.audio import to_mono  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.interface import Sound  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.whisper import WhisperRecognizer  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors  # noqa: E402

RATE, SECONDS = 16_000, 30  # what Whisper hears


def sound_of(manifest, segment):
    audio = load_audio(manifest, segment)
    return Sound(torch.from_numpy(to_mono(audio.samples)), audio.rate)


def tokens_of(whisper, text, language):
    """The tokens after the start token, in the order in which generation gives them."""
    tokenizer = whisper.processor.tokenizer
    # A model of English alone has no languages and tasks.
    first = [f"<|{language}|>", "<|transcribe|>"] if whisper.languages else []
    first = tokenizer.convert_tokens_to_ids([*first, "<|notimestamps|>"])
    # Whisper's own transcripts begin with a blank.
    written = tokenizer(f" {text}", add_special_tokens=False).input_ids
    return [*first, *written, whisper.model.config.eos_token_id]


def word_error_rate(whisper, rows):
    counts = [
        count_errors(text, whisper.transcribe(sound, language), language, whisper.spelling)
        for sound, text, language in rows
    ]
    return sum(each.word_errors for each in counts) / sum(each.words for each in counts)


@report_input_errors
def main(words):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True, help="a folder, a hub name or a size")
    parser.add_argument("--language", default="", help="code of rows that have none")
    parser.add_argument("--all", action="store_true", help="also rows that nobody annotated")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args(words)
    require(not options.out.exists(), f"{options.out} exists already; give a new folder")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whisper = WhisperRecognizer(options.model, device)
    manifest = options.manifest
    segments = read_segments(manifest).values()
    rows, heldout = [], []
    for segment in segments:
        if not (options.all or segment.labels.get("annotated") is True):
            continue
        sound = sound_of(manifest, segment)
        language = str(segment.labels.get("language") or options.language)
        known = not whisper.languages or language in whisper.languages
        require(known, f"{segment.id}: the model does not know the language {language!r}")
        if sound.seconds <= SECONDS:
            part = heldout if drawn(segment.id, 0) < 0.1 else rows
            part.append((sound, segment.text, language))
    require(bool(rows and heldout), f"{len(rows)} rows to train on, {len(heldout)} held out")
    before = word_error_rate(whisper, heldout)

    def batch(chosen):
        sounds = [sound.samples(RATE) for sound, _, _ in chosen]
        features = whisper.processor.feature_extractor(
            sounds, sampling_rate=RATE, return_tensors="pt"
        )
        labels = [torch.tensor(tokens_of(whisper, text, language)) for _, text, language in chosen]
        padded = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
        return {"input_features": features.input_features, "labels": padded}

    checkpoints = Path(f"{options.out}.checkpoints")
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=options.batch,
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        warmup_steps=0.05,  # below 1: a fraction of all
        use_cpu=device == "cpu",
        save_steps=0.1,
        save_total_limit=1,
        logging_steps=0.05,
        report_to=[],
        remove_unused_columns=False,
    )
    trainer = Seq2SeqTrainer(whisper.model.float().train(), arguments, batch, rows)
    # The trainer writes this file last.
    complete = [each.parent for each in checkpoints.glob("checkpoint-*/trainer_state.json")]
    last = max(complete, key=lambda each: int(each.name.rpartition("-")[2]), default=None)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    whisper.model.eval()
    after = word_error_rate(whisper, heldout)
    for part in (whisper.model, whisper.processor):
        part.save_pretrained(options.out)
    if spelling := whisper.processor.tokenizer.english_spelling_normalizer:  # not saved with it
        (options.out / "normalizer.json").write_text(json.dumps(spelling))
    print(
        f"word error rate of {len(heldout)} held-out rows: {before:.3f} before, {after:.3f} after"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
