"""`titan-tts recognizer finetune`: Whisper trained on corrected transcripts, by transformers' trainer.

Settings and checkpoints are in OUT.work until it is complete. The same command continues there after an
interruption; then the result is renamed to OUT.
"""

import json
import math
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from torchtitan.models.dit_tts.bounded import read_json
from torchtitan.models.dit_tts.errors import InputError, check_range, require, require_modules, show
from torchtitan.models.dit_tts.files import (
    check_writable,
    fingerprint,
    held,
    nfc,
    write_atomic,
)

if TYPE_CHECKING:
    from titan_tts.annotate.segments import Segment
    from torchtitan.models.dit_tts.speech.scoring.interface import Sound
    from torchtitan.models.dit_tts.speech.scoring.whisper import WhisperRecognizer

_RATE, _SECONDS = 16_000, 30  # what Whisper hears


@dataclass(kw_only=True)
class Options:
    """Train Whisper on corrected transcripts, and measure its word error rate before and after."""

    action: tyro.conf.Positional[Literal["finetune"]]
    """Action."""

    manifest: tyro.conf.Positional[str]
    """A .jsonl file with audio and text, such as the collection.jsonl of `titan-tts collect`."""

    out: tyro.conf.Positional[str]
    """New folder for the recognizer, which --recognizer whisper:OUT takes."""

    model: str
    """The Whisper to start from: a folder, a hub name or a size, such as small."""

    all: bool = False
    """Use all rows, not only annotated ones."""

    text: Literal["clean", "verbatim"] = "clean"
    """What it learns to write: the rows' text, or text_verbatim."""

    language: str = ""
    """Language code of rows that have none."""

    heldout_fraction: float = 0.1
    """Fraction of the rows that word errors are measured on."""

    epochs: float = 3.0
    """Passes over the rows."""

    lr: float = 1e-5
    """Largest learning rate; it rises over a twentieth of the steps and falls to 0."""

    batch: int = 16
    """Rows of a step on each device."""

    seed: int = 0
    """Seed of the order and of what is held out."""


def run(options: Options) -> int:
    options = replace(options, out=str(Path(options.out)))  # without a slash at its end
    lock = Path(f"{options.out}.lock")
    check_writable(lock, "OUT")
    lock.parent.mkdir(parents=True, exist_ok=True)
    sentence = "another titan-tts recognizer is at work there; wait for it, or give another OUT"
    with held(lock, f"{options.out}.work: {sentence}"):
        return _run(options)


def _run(options: Options) -> int:
    check_range("--heldout-fraction", options.heldout_fraction, 0.01, 0.9)
    check_range("--epochs", options.epochs, 0.01, 1000)
    check_range("--lr", options.lr, 1e-9, 1)
    check_range("--batch", options.batch, 1, 4096)
    out, work = Path(options.out), Path(f"{options.out}.work")
    require(not out.exists(), f"OUT = {out} exists already; give a new folder")
    require(
        options.manifest.endswith(".jsonl") and Path(options.manifest).is_file(),
        f"{options.manifest} is no .jsonl file; give the collection.jsonl of titan-tts collect",
    )
    require_modules("transformers", "accelerate", "soundfile", "soxr", "jiwer")
    import torch

    from titan_tts.launch.supervisor import interrupt_on_signals
    from titan_tts.prepare.settings import difference
    from torchtitan.models.dit_tts.speech.scoring import statistics
    from torchtitan.models.dit_tts.speech.scoring.whisper import WhisperRecognizer

    interrupt_on_signals()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = WhisperRecognizer(options.model, device)
    rows, heldout = _examples(options, base)
    path, content = work / "settings.json", Path(options.manifest).read_bytes()
    settings = asdict(options) | {"out": "", "manifest": fingerprint(content)}
    if path.exists() and (changed := difference(read_json(path), settings)):
        raise InputError(f"{work} was begun otherwise ({changed}); give that again, or remove it")
    write_atomic(path, json.dumps(settings))
    before, words = _word_errors(base, heldout)
    trained = _train(options, work, rows, base.processor)
    after, _ = _word_errors(WhisperRecognizer(str(trained), device), heldout)
    rates = [sum(errors) / sum(words) for errors in (before, after)]
    record = asdict(options) | {"rows": len(rows), "heldout_rows": len(heldout)}
    record |= dict(zip(("wer_before", "wer"), rates))
    write_atomic(trained / "finetune.json", json.dumps(record, indent=1))
    trained.rename(out)
    shutil.rmtree(work)
    change = statistics.difference(after, before, words)
    chance = ", which may be chance" if change.is_tie else ""
    said = "{:.1%} before, {:.1%} after".format(*rates).replace("%", " %")
    show(f"word error rate of {len(heldout)} held-out rows: {said}{chance}")
    show(f"use it: --recognizer whisper:{out}")
    return 0


@dataclass(frozen=True)
class Example:
    """A row as what Whisper hears and writes."""

    segment: "Segment"
    manifest: Path
    text: str
    language: str  # its code
    tokens: list[int]  # that the decoder writes after its start token

    def sound(self) -> "Sound":
        from torch import from_numpy

        from titan_tts.annotate.segments import load_audio
        from torchtitan.models.dit_tts.speech.audio import to_mono
        from torchtitan.models.dit_tts.speech.scoring.interface import Sound

        audio = load_audio(self.manifest, self.segment)
        return Sound(from_numpy(to_mono(audio.samples)), audio.rate)


def _examples(
    options: Options, recognizer: "WhisperRecognizer"
) -> tuple[list[Example], list[Example]]:
    """The rows to train on and the held-out ones."""
    from titan_tts.annotate.segments import annotated_segments, read_segments
    from titan_tts.prepare.recordings import drawn

    manifest, config = Path(options.manifest), recognizer.model.config
    every = read_segments(manifest).values() if options.all else annotated_segments(manifest)
    found = [_example(options, manifest, segment, recognizer) for segment in every]
    most = config.max_target_positions
    fits = [e for e in found if len(e.tokens) <= most and e.sound().seconds <= _SECONDS]
    if left_out := len(found) - len(fits):
        show(f"{left_out} rows are too long for Whisper ({_SECONDS} s) and left out")
    parts: tuple[list[Example], list[Example]] = ([], [])
    for each in fits:
        parts[drawn(each.segment.id, options.seed) < options.heldout_fraction].append(each)
    require(
        all(parts),
        f"{manifest}: {len(parts[0])} rows to train on and {len(parts[1])} held out; give more rows, or another "
        "--heldout-fraction or --seed",
    )
    return parts


def _example(
    options: Options, manifest: Path, segment: "Segment", recognizer: "WhisperRecognizer"
) -> Example:
    from torchtitan.models.dit_tts.speech.scoring.word_errors import language_code

    text = nfc((segment.text if options.text == "clean" else segment.text_verbatim) or "")
    code, known = language_code(segment.language or options.language), recognizer.languages
    where = f"{manifest}: {segment.id}"
    require(bool(text), f"{where} has no {options.text} text; correct it, or choose --text")
    require(
        not known or code in known,
        f"{where} has the language {code!r}, which the model does not know; give --language",
    )
    tokenizer = recognizer.processor.tokenizer
    # As generation gives them. A model of English alone has no languages and tasks.
    first = [*([f"<|{code}|>", "<|transcribe|>"] if known else []), "<|notimestamps|>"]
    # Whisper's own transcripts begin with a blank.
    written = tokenizer(f" {text}", add_special_tokens=False).input_ids
    end = recognizer.model.config.eos_token_id
    tokens = [*tokenizer.convert_tokens_to_ids(first), *written, end]
    return Example(segment, manifest, text, code, tokens)


def _word_errors(
    recognizer: "WhisperRecognizer", examples: list[Example]
) -> tuple[list[int], list[int]]:
    """(errors, words) of each example, as `evaluate` counts them."""
    from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

    found = []
    for each in examples:
        heard = recognizer.transcribe(each.sound(), each.language)
        found.append(count_errors(each.text, heard, each.language, recognizer.spelling))
    words = [each.words for each in found]
    require(sum(words) > 0, "the held-out rows have no word; give another --seed")
    return [each.word_errors for each in found], words


def _train(options: Options, work: Path, rows: Any, processor: Any) -> Path:
    """Trains from the last checkpoint that is complete. Returns the folder of the trained model."""
    import torch
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from transformers import WhisperForConditionalGeneration as Whisper

    from torchtitan.models.dit_tts.speech.scoring.pretrained import load_model
    from torchtitan.models.dit_tts.speech.scoring.whisper import check_whisper

    def batch(examples: list[Example]) -> dict[str, torch.Tensor]:
        """input_features (B, mels, 3000) and labels (B, L), -100 behind a text's end."""
        extract, sounds = processor.feature_extractor, [each.sound() for each in examples]
        samples = [each.samples(_RATE) for each in sounds]
        features = extract(samples, sampling_rate=_RATE, return_tensors="pt").input_features
        tokens = [torch.tensor(each.tokens) for each in examples]
        labels = torch.nn.utils.rnn.pad_sequence(tokens, True, -100)
        return {"input_features": features, "labels": labels}

    path, spec = check_whisper(options.model), f"whisper:{options.model}"
    model = load_model(Whisper, path, spec, dtype=torch.float32)
    on_gpu, steps = torch.cuda.is_available(), options.epochs * len(rows) / options.batch
    if on_gpu:
        model.gradient_checkpointing_enable()
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(work / "checkpoints"),
        per_device_train_batch_size=options.batch,
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        warmup_steps=math.ceil(steps / 20),
        seed=options.seed,
        bf16=on_gpu and torch.cuda.is_bf16_supported(),
        use_cpu=not on_gpu,
        save_steps=0.1,  # below 1: a fraction of all
        save_total_limit=1,
        logging_steps=0.05,
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=not sys.stderr.isatty(),
    )
    trainer = Seq2SeqTrainer(model, arguments, batch, rows)
    # The trainer writes this file last.
    complete = [each.parent for each in work.glob("checkpoints/checkpoint-*/trainer_state.json")]
    last = max(complete, key=lambda each: int(each.name.rpartition("-")[2]), default=None)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    trained = work / "model"
    for part in (model, processor):
        part.save_pretrained(trained)
    if spelling := processor.tokenizer.english_spelling_normalizer:  # which the latter leaves out
        write_atomic(trained / "normalizer.json", json.dumps(spelling))
    return trained
