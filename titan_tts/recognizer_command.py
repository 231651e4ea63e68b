"""`titan-tts recognizer finetune`: Whisper trained on corrected transcripts, by transformers' trainer.

Everything is in OUT.work until it is complete: settings, the word errors before, the trainer's checkpoints. The same
command continues there after an interruption; then the result is renamed to OUT.
"""

import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import tyro

from torchtitan.models.dit_tts.errors import InputError, check_range, require, require_modules, show
from torchtitan.models.dit_tts.files import check_writable, fingerprint, write_atomic

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
    check_range("--heldout-fraction", options.heldout_fraction, 0.01, 0.9)
    check_range("--epochs", options.epochs, 0.01, 1000)
    check_range("--lr", options.lr, 1e-9, 1)
    check_range("--batch", options.batch, 1, 4096)
    out, work = Path(options.out), Path(f"{options.out}.work")
    require(not out.exists(), f"OUT = {out} exists already; give a new folder")
    check_writable(work / "settings.json", "OUT")
    require_modules("transformers", "accelerate", "soundfile", "soxr", "jiwer")
    import torch

    from titan_tts.launch.supervisor import interrupt_on_signals
    from titan_tts.prepare.settings import difference
    from torchtitan.models.dit_tts.speech.scoring.whisper import WhisperRecognizer

    interrupt_on_signals()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = WhisperRecognizer(options.model, device)
    examples = Examples(options, base)
    path = work / "settings.json"
    rows = fingerprint(Path(options.manifest).read_bytes())
    settings = asdict(options) | {"out": "", "rows": rows}
    if path.exists() and (changed := difference(json.loads(path.read_text()), settings)):
        raise InputError(f"{work} was begun otherwise ({changed}); give that again, or remove it")
    write_atomic(path, json.dumps(settings))
    before = work / "before.json"
    if not before.exists():
        write_atomic(before, json.dumps(examples.word_error_rate(base)))
    trained = _train(options, work, examples)
    rates = (
        json.loads(before.read_text()),
        examples.word_error_rate(WhisperRecognizer(str(trained), device)),
    )
    record: dict[str, Any] = asdict(options) | {
        "rows": len(examples.rows),
        "heldout_rows": len(examples.heldout),
    }
    record |= {"wer_before": rates[0], "wer": rates[1]}
    write_atomic(trained / "finetune.json", json.dumps(record, indent=1))
    trained.rename(out)
    shutil.rmtree(work)
    percent = "{:.1f} % before, {:.1f} % after".format(*(100 * rate for rate in rates))
    show(f"word error rate of {len(examples.heldout)} held-out rows: {percent}")
    show(f"use it: --recognizer whisper:{out}")
    return 0


class Example(NamedTuple):
    segment: "Segment"
    text: str
    language: str  # its code


class Examples:
    """Rows as what Whisper hears and writes; `rows` to train on and `heldout` to measure on."""

    def __init__(self, options: Options, recognizer: "WhisperRecognizer"):
        from titan_tts.annotate.segments import annotated_segments, read_segments
        from titan_tts.prepare.recordings import drawn

        self.options, self.manifest = options, Path(options.manifest)
        self.processor, self.languages = recognizer.processor, recognizer.languages
        config = recognizer.model.config
        self.eos, self.max_tokens = config.eos_token_id, config.max_target_positions
        every = read_segments(self.manifest).values() if options.all else ()
        found = [self._example(each) for each in every or annotated_segments(self.manifest)]
        fits = [each for each in found if self._fits(each)]
        if left_out := len(found) - len(fits):
            show(f"{left_out} rows are too long for Whisper ({_SECONDS} s) and left out")
        draws = [drawn(each.segment.id, options.seed) < options.heldout_fraction for each in fits]
        self.heldout = [each for each, held_out in zip(fits, draws) if held_out]
        self.rows = [each for each, held_out in zip(fits, draws) if not held_out]
        require(
            bool(self.rows and self.heldout),
            f"{self.manifest}: {len(self.rows)} rows to train on and {len(self.heldout)} held out; give more rows, or "
            "another --heldout-fraction or --seed",
        )

    def _example(self, segment: "Segment") -> Example:
        from torchtitan.models.dit_tts.speech.scoring.word_errors import language_code

        which, where = self.options.text, f"{self.manifest}: {segment.id}"
        text = segment.text if which == "clean" else segment.text_verbatim
        code = language_code(segment.language or self.options.language)
        require(bool(text), f"{where} has no {which} text; correct it, or choose --text")
        require(
            not self.languages or code in self.languages,
            f"{where} has the language {code!r}, which the model does not know; give --language",
        )
        return Example(segment, str(text), code)

    def _fits(self, example: Example) -> bool:
        short = len(self.tokens(example)) <= self.max_tokens
        return short and self.sound(example).seconds <= _SECONDS

    def tokens(self, example: Example) -> list[int]:
        """What the decoder writes after its start token: language and task, as generation gives them, and the text."""
        first = [f"<|{example.language}|>", "<|transcribe|>"] if self.languages else []
        tokenizer = self.processor.tokenizer
        # Whisper's own transcripts begin with a blank.
        text = tokenizer(f" {example.text}", add_special_tokens=False).input_ids
        return [*tokenizer.convert_tokens_to_ids([*first, "<|notimestamps|>"]), *text, self.eos]

    def sound(self, example: Example) -> "Sound":
        import torch

        from titan_tts.annotate.segments import load_audio
        from torchtitan.models.dit_tts.speech.audio import to_mono
        from torchtitan.models.dit_tts.speech.scoring.interface import Sound

        audio = load_audio(self.manifest, example.segment)
        return Sound(torch.from_numpy(to_mono(audio.samples)), audio.rate)

    def batch(self, examples: "Sequence[Example]") -> dict[str, Any]:
        """input_features (B, mels, 3000) and labels (B, L), -100 behind a text's end."""
        import torch

        samples = [self.sound(each).samples(_RATE) for each in examples]
        extract = self.processor.feature_extractor
        features = extract(samples, sampling_rate=_RATE, return_tensors="pt").input_features
        tokens = [torch.tensor(self.tokens(each)) for each in examples]
        labels = torch.nn.utils.rnn.pad_sequence(tokens, True, -100)
        return {"input_features": features, "labels": labels}

    def word_error_rate(self, recognizer: "WhisperRecognizer") -> float:
        """Of the held-out rows, as `evaluate` counts it."""
        from torchtitan.models.dit_tts.speech.scoring.scores import Scorers, corpus_scores, score

        scorers = Scorers(recognizer)
        scores = [
            score(self.sound(each), each.text, scorers, language=each.language)
            for each in self.heldout
        ]
        rate = corpus_scores(scores)["wer"]
        if rate is None:
            raise InputError(
                f"{self.manifest}: the held-out rows have no word; give another --seed"
            )
        return rate


def _train(options: Options, work: Path, examples: Examples) -> Path:
    """Trains from the last checkpoint that is complete. Returns the folder of the trained model."""
    import torch
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        WhisperForConditionalGeneration,
    )

    from torchtitan.models.dit_tts.speech.scoring.pretrained import load_model
    from torchtitan.models.dit_tts.speech.scoring.whisper import check_whisper

    path, spec = check_whisper(options.model), f"whisper:{options.model}"
    model = load_model(WhisperForConditionalGeneration, path, spec, dtype=torch.float32)
    on_gpu, steps = torch.cuda.is_available(), options.epochs * len(examples.rows) / options.batch
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
    if on_gpu:
        model.gradient_checkpointing_enable()
    rows: Any = examples.rows  # a list is a dataset
    trainer = Seq2SeqTrainer(model, arguments, examples.batch, rows)
    # The trainer writes this file last.
    complete = [each.parent for each in work.glob("checkpoints/checkpoint-*/trainer_state.json")]
    last = max(complete, key=lambda each: int(each.name.rpartition("-")[2]), default=None)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    model.save_pretrained(work / "model")
    examples.processor.save_pretrained(work / "model")
    return work / "model"
