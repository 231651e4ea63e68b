"""`titan-tts prepare`: recordings of any format to shards of latents."""

import os
import shlex
import sys
from pathlib import Path

from titan_tts.prepare.formats import find_format
from titan_tts.prepare.settings import Options
from torchtitan.models.dit_tts.data.heldout import FEW_SAMPLES
from torchtitan.models.dit_tts.errors import require_modules, show
from torchtitan.models.dit_tts.speech.codec.interface import codec_kind

OF_FINETUNE = "TITAN_TTS_OF_FINETUNE"
"""Environment variable: titan-tts finetune runs this and says what comes next"""


def run(options: Options) -> int:
    find_format(options.source, options.format)  # before seconds of imports

    from titan_tts.jobs.engines import LIBRARIES

    require_modules(*LIBRARIES, *(["swift_f0"] if options.captions else []))
    from titan_tts.prepare.pipeline import lines, prepare_corpus

    record = prepare_corpus(options)
    state = "was complete already" if record["reused"] else "is complete"
    show("\n  ".join([f"{options.output} {state}:", *lines(record["summary"])]))
    trained = record["summary"]["train"]
    if not trained["samples"]:
        command = ["titan-tts", "evaluate", "RUN", "--test", options.output]
        print(f"test on it:   {shlex.join(command)}")
        return 0
    if OF_FINETUNE in os.environ:
        return 0
    held_out = record["summary"]["heldout"]["samples"]
    if 0 < held_out < FEW_SAMPLES:
        print(
            f"warning: only {held_out} recordings are held out, by which a training chooses its best step; give a larger "
            "--heldout-fraction and another OUTPUT",
            file=sys.stderr,
        )
    train = str(Path(options.output, "train"))
    print(f"inspect it:   {shlex.join(['titan-tts', 'data', 'inspect', train])}")
    config, *keys = _config_for(options, trained["hours"])
    command = ["titan-tts", "train", config, "--data.path", train, *keys]
    print(f"train on it:  {shlex.join(command)}")
    if trained["hours"] < 1:
        source = options.output if held_out else options.source  # finetune holds some out itself
        adapt = shlex.join(["titan-tts", "finetune", "MODEL", source, "TUNED"])
        print(f"or better, with so little: {adapt}")
    return 0


def _config_for(options: Options, hours: float) -> list[str]:
    """A shipped config and the options with which it accepts these data."""
    config, codec = "800m", "facebook/dacvae-watermarked"
    if codec_kind(options.codec) == "mel_dct":  # the embedded one, for work without downloads
        config, codec = "one_gpu" if hours >= 10 else "small", "mel_dct"
    keys = [] if options.codec == codec else ["--sampling.codec", options.codec]
    keys += [] if options.references else ["--data.references", "drawn"]
    heard = ["--data.max_caption_tokens", "256", "--objective.speaker_dropout", "0.5"]
    return [config, *keys, *(heard if options.captions else [])]
