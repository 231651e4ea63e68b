"""`titan-tts finetune`: from an exported model and recordings to a model of their voice, and a comparison of both.

Every step is a command of its own, which is printed: prepare, train, evaluate. After an interruption the same command
continues where it was.
"""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_tts.finetune.settings import Options
from titan_tts.launch.supervisor import wait_passing_on
from titan_tts.prepare.prepare_command import OF_FINETUNE
from torchtitan.models.dit_tts.bounded import read_json, read_toml
from torchtitan.models.dit_tts.errors import InputError, reading, require, require_modules, show
from torchtitan.models.dit_tts.files import check_writable, write_atomic
from torchtitan.models.dit_tts.run.launcher import die_with_parent

if TYPE_CHECKING:
    from torchtitan.models.dit_tts.config.job_config import JobConfig

_RECORD_NAME = "finetune.json"

_BATCH = 16
"""Samples of a step: a minute of speech has about so many"""

_MINUTES_TO_STEPS = ((20.0, 400), (math.inf, 1000))
"""Up to so many minutes of training data -> steps. benchmarks/README.md has the trials"""

_VALIDATIONS, _BETWEEN = 3, (40, 500)
"""Validations of a training, and the fewest and most steps from one to the next"""

_SAMPLES, _STEPS_PER_SAMPLE = (4, 32), 32
"""Held-out samples that a validation measures, and as many training ones, one for so many steps: all validations take at
most a tenth of the training's time"""

_RATES = {"full": 0.1, "lora": 0.3}
"""Method -> fraction of the base's learning rate"""

_RATE_OF_LANGUAGE = 0.5
"""the same where the texts are in another language than the base's (docs/fine_tune.md has the trials)"""

_RANK = 16

_SPEAKER_SCORER = "resemblyzer"


def run(options: Options) -> int:
    if Path(options.recordings, "prepare.json").is_file():
        for name in ("where", "speaker", "format", "on_error", "heldout_fraction"):
            require(
                getattr(options, name) == getattr(Options, name),
                f"--{name.replace('_', '-')} is for recordings, but {options.recordings} is prepared already; leave it out",
            )
    if options.recognizer:  # before training
        from torchtitan.models.dit_tts.config.job_config import Samples
        from torchtitan.models.dit_tts.speech.scoring.plugins import check_pretrained

        require_modules("swift_f0")
        check_pretrained(Samples(recognizer=options.recognizer, speaker_scorer=_SPEAKER_SCORER))
    from torchtitan.models.dit_tts.data.storage import find_shards

    for shards in filter(None, (options.keep, options.keep_test)):
        find_shards(shards)
    try:
        _finetune(options)
    except _Ended as end:
        return int(end.args[0])
    return 0


def _finetune(options: Options) -> None:
    out = Path(options.out)
    from titan_tts.speak.open_run import find_folder
    from torchtitan.models.dit_tts.config.exported import is_exported
    from torchtitan.models.dit_tts.config.trust import refuse_function_as_codec

    base = find_folder(options.base)
    _remember(base, out, options.method)
    if not is_exported(base):
        # The weights that would speak, and all that they need, whatever becomes of the run.
        exported, of_run = out / "base", ("export", str(base), str(out / "base"))
        if not is_exported(exported):
            best = (base / "validation.jsonl").is_file() and _config_of(base).validation.keep_best
            _titan_tts(*of_run, *(("--step", "best") if best else ()), *_codec(options))
        base = exported
    if not options.codec:
        refuse_function_as_codec(_config_of(base).sampling.codec, str(base), "--codec")
    from titan_tts.finetune.recordings import encoder_keys

    encoder = encoder_keys(options, _config_of(base))
    data = _prepared(options, base, encoder)
    _train(options, base, data, encoder)
    speak = ["titan-tts", "generate", str(out / "run"), "--step", "best", *_codec(options)]
    for voice in (*_voice(data, out / "run"), ("--reference", "VOICE.wav")):
        show(f"speak:   {shlex.join([*speak, *voice, '--text', '...'])}")
    if options.method != "full":
        shutil.rmtree(out / "adapter", ignore_errors=True)  # another step may be the best now
        alone = ("export", str(out / "run"), str(out / "adapter"), "--step", "best", "--adapter")
        _titan_tts(*alone, *_codec(options))
    _compare(options, base, data)


def _remember(base: Path, out: Path, method: str) -> None:
    """Refuses a folder that holds a fine-tune of another base or by another method, which would go on instead."""
    record, this = out / _RECORD_NAME, {"base": str(base.resolve()), "method": method}
    had = this | read_json(record, base=str)
    another = had["base"] != this["base"] and Path(had["base"]).exists()  # it may have moved
    of = f"OUT = {out} holds a fine-tune"
    require(not another, f"{of} of {had['base']}, not of {base}; give another OUT")
    require(had["method"] == method, f"{of} by --method {had['method']}; give another OUT")
    check_writable(record, "OUT")
    write_atomic(record, json.dumps(this) + "\n")


def _voice(data: Path, run: Path) -> list[tuple[str, str]]:
    """--speaker with the first name of the new data; empty where their samples have none."""
    from torchtitan.models.dit_tts.data.dataset import open_training_data

    settings = replace(_config_of(run).data, path=str(data / "train"), weights=[])
    names = open_training_data(settings).labels("speaker")[1]
    return [("--speaker", min(names))] if names else []


def _codec(options: Options) -> tuple[str, ...]:
    return ("--codec", options.codec) if options.codec else ()


def _titan_tts(*arguments: str) -> None:
    """Runs a command and shows it. Raises _Ended where it fails or is stopped; its own sentence stands above."""
    show(f"\n$ {shlex.join(['titan-tts', *arguments])}")
    command = [sys.executable, "-m", "titan_tts", *arguments]
    environment = os.environ | {OF_FINETUNE: "1"}
    process = subprocess.Popen(command, preexec_fn=die_with_parent, env=environment)

    def pass_on(number: int) -> None:
        # A terminal's Ctrl-C reaches both; the command then saves and ends, and this one waits for it.
        if number != signal.SIGINT:
            process.send_signal(number)

    if status := wait_passing_on(process, (signal.SIGINT, signal.SIGTERM), pass_on):
        raise _Ended(status)


class _Ended(Exception):
    """A command has ended with this exit status."""


def _prepared(options: Options, base: Path, encoder: dict[str, str]) -> Path:
    """The folder of train/ and heldout/."""
    from titan_tts.finetune.recordings import fraction_held_out
    from torchtitan.models.dit_tts.config.exported import read_exported

    given = Path(options.recordings)
    if (given / "prepare.json").is_file():
        return given
    data, config = Path(options.out, "data"), _config_of(base)
    arguments = [str(given), str(data), "--codec", options.codec or config.sampling.codec]
    for name, value in read_exported(base)["audio"].items():
        arguments += [f"--{name.replace('_', '-')}", "off" if value is None else str(value)]
    longest = config.data.max_frames / config.data.frames_per_second
    arguments += ["--max-seconds", f"{longest:g}"]
    for name in ("language", "speaker", "where", "format", "on_error"):
        if value := getattr(options, name):
            arguments += [f"--{name.replace('_', '-')}", value]
    if options.on_error == "skip":  # of few recordings one is more than prepare's hundredth
        arguments += ["--max-corrupt-fraction", "1"]
    if not config.encoder.added_tokens:  # `prepare` does not know these; training checks the rest
        arguments += ["--encoder", encoder["encoder.model"]]
    fraction = options.heldout_fraction or fraction_held_out(options)
    _titan_tts("prepare", *arguments, "--heldout-fraction", f"{fraction:.9g}")
    return data


def _config_of(base: Path) -> "JobConfig":
    from torchtitan.models.dit_tts.config.manager import load_run_config

    return load_run_config(base)


def _train(options: Options, base: Path, data: Path, encoder: dict[str, str]) -> None:
    from titan_tts.prepare.work_folder import RECORD_NAME, read_record
    from torchtitan.models.dit_tts.config.exported import FINE_TUNE

    out, config = Path(options.out), _config_of(base)
    with reading(base / FINE_TUNE):
        of_base = read_toml(base / FINE_TUNE)
    record = read_record(data)
    if record is None:
        raise InputError(
            f"{data / RECORD_NAME} is not a record of titan-tts prepare; prepare again"
        )
    heldout = data / "heldout"
    require(
        any(heldout.glob("*.tar")) or any("--validation." in each for each in options.config_args),
        f"{data} has no held-out recordings, by which the best step is chosen; give more recordings, or a larger "
        "--heldout-fraction",
    )
    minutes = 60 * record["summary"]["train"]["hours"]
    steps = options.steps or next(n for limit, n in _MINUTES_TO_STEPS if minutes <= limit)
    if options.method == "lora" and not options.steps:  # 300 forget the other voices
        steps //= 3
    show(f"{minutes:.1f} minutes of speech to train on: {steps} steps")
    samples = _within(_SAMPLES, steps // _STEPS_PER_SAMPLE)
    there = record["summary"].get("heldout", {}).get("samples", 0)
    if samples < there and not any("--validation." in each for each in options.config_args):
        why = f"one for {_STEPS_PER_SAMPLE} steps, so that they take little of the time"
        show(
            f"validations measure {samples} of {there} held-out samples: {why}; or --validation.samples"
        )
    same = encoder["encoder.model"] == config.encoder.model
    rate = _RATES[options.method] if same else _RATE_OF_LANGUAGE
    warmup = max(1, steps // 20)
    keys = {
        "nproc": options.nproc,
        "data.path": ",".join(filter(None, (str(data / "train"), options.keep))),
        "validation.path": heldout,
        "checkpoint.initial_load_path": base,
        "job.dump_folder": out,
        "job.experiment": "run",
        **encoder,
        "sampling.codec": options.codec or config.sampling.codec,
        "lora.rank": 0 if options.method == "full" else _RANK,
        "optimizer.lr": rate * of_base["optimizer"]["lr"],
        "optimizer.weight_decay": 0.0,  # towards 0 is away from the base
        "lr_scheduler.warmup_steps": warmup,
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.decay_ratio": min(0.95, 1 - warmup / steps),
        "lr_scheduler.min_lr_factor": 0.0,
        "training.steps": steps,
        "training.local_batch_size": 0,
        "training.max_local_batch_size": _BATCH,
        "training.global_batch_size": _BATCH,
        "data.num_buckets": 4,  # a few recordings would leave more of them empty
        "data.batch_multiple": 4,
        "data.batching": "buckets",
        "ema.decays": "0.9,0.99",
        "validation.freq": _within(_BETWEEN, -(-steps // _VALIDATIONS)),
        "validation.samples": samples,
        "validation.keep_best": "best_heldout_loss",
        "checkpoint.interval": max(1, steps // 2),
        **_of_this_machine(),
    }
    if options.keep:
        keys["data.weights"] = "1,1"
    if options.method == "lora":  # whose matrices have no rate that follows the width
        keys |= {"optimizer.name": "AdamW", "optimizer.base_dim": 0}
    arguments = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    _titan_tts("train", str(base / FINE_TUNE), *arguments, *options.config_args)


def _of_this_machine() -> dict[str, str]:
    """Keys in which a CPU differs from what the base was trained on: its memory holds all activations, and bfloat16 is many
    times slower where it has no instructions for it."""
    import torch
    from torchtitan.tools import utils

    from torchtitan.models.dit_tts.infra.cpu_kernels import multiplies_bfloat16

    device = torch.device(utils.device_type)
    if device.type != "cpu":
        return {}
    precision = {} if multiplies_bfloat16(device) else {"training.mixed_precision_param": "float32"}
    return {"activation_checkpoint.mode": "none"} | precision


def _within(bounds: tuple[int, int], value: int) -> int:
    return min(max(value, bounds[0]), bounds[1])


def _compare(options: Options, base: Path, data: Path) -> None:
    if not options.recognizer:
        show("not compared: give --recognizer (docs/evaluate.md), and run the same command again")
        return
    out, reads = Path(options.out), _config_of(base).encoder.model
    systems = [str(base), f"{out / 'run'}@best"]
    tests = {"evaluation": data / "heldout"}
    if options.keep_test:
        tests["forgotten"] = Path(options.keep_test)
    for name, test in tests.items():
        arguments = ["--test", str(test), "--out", str(out / name), *_codec(options)]
        arguments += ["--recognizer", options.recognizer, "--speaker-scorer", _SPEAKER_SCORER]
        arguments += ["--max-utterances", str(options.max_utterances)]
        if name == "forgotten" and reads != _config_of(out / "run").encoder.model:
            arguments += ["--encoder", reads]  # its texts are in the base's language
        if name == "evaluation" and data == out / "data":  # made here, of these
            arguments += ["--recordings", options.recordings]
        _titan_tts("evaluate", *systems, *arguments)
    from titan_tts.evaluate.page import comparison_page

    headings = {"evaluation": "The new recordings", "forgotten": "What the base could say before"}
    title = f"{options.base} and its fine-tune {options.out}"
    page = comparison_page(title, {headings[name]: out / name for name in tests})
    page.write(out / "comparison.html")
    show(f"compare: {out / 'comparison.html'}")
