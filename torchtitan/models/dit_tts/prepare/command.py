"""`titan-tts prepare`: recordings of any format to archives of latent triplets."""

import argparse
from collections.abc import Callable
from pathlib import Path

from torchtitan.models.dit_tts.codec import KNOWN_CODECS
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.prepare.formats import FORMATS
from torchtitan.models.dit_tts.prepare.settings import (
    AudioSettings,
    PrepareSettings,
    number_or_off,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "; ".join(f"{name}: {layout}" for name, (_, layout) in FORMATS.items())
    parser.add_argument("source", help=f"the recordings. {kinds}")
    parser.add_argument("output", help="folder for the archives; train/ and heldout/ come below it")
    parser.add_argument("--format", default="auto", choices=["auto", *FORMATS])

    how = parser.add_argument_group("samples")
    defaults = PrepareSettings()
    how.add_argument("--codec", default=defaults.codec, help=f"one of: {', '.join(KNOWN_CODECS)}")
    how.add_argument("--samples-per-shard", type=int, default=defaults.samples_per_shard)
    how.add_argument(
        "--references",
        type=int,
        default=defaults.references,
        help="other utterances of the speaker in one reference",
    )
    how.add_argument("--max-reference-frames", type=int, default=defaults.max_reference_frames)
    how.add_argument("--seed", type=int, default=0, help="of the references and --heldout-share")
    how.add_argument(
        "--heldout-share",
        type=float,
        default=0.0,
        help="share of recordings without a split that are held out, drawn by the seed",
    )
    how.add_argument("--text-column", default="", help="where it has another name than text ...")
    how.add_argument("--speaker-column", default="")
    how.add_argument("--speaker", default="", help="name for recordings without a speaker")
    how.add_argument("--language", default="", help="code for recordings without a language")

    audio, given = parser.add_argument_group("audio and filters"), AudioSettings()
    audio.add_argument(
        "--loudness",
        type=number_or_off,
        default=given.loudness,
        help="LUFS by BS.1770, or off; default %(default)s",
    )
    audio.add_argument(
        "--max-silence",
        type=number_or_off,
        default=given.max_silence,
        help="seconds kept before and after the speech, or off; default %(default)s",
    )
    for name in ("min-seconds", "max-seconds", "min-chars-per-second", "max-chars-per-second"):
        audio.add_argument(f"--{name}", type=float, help="recordings outside are left out")
    audio.add_argument(
        "--max-clipped", type=float, help="largest share of the audio's samples at full scale"
    )

    text, encoder = parser.add_argument_group("text features"), Encoder()
    text.add_argument(
        "--encode-text",
        default="",
        metavar="MODEL",
        help="store this text encoder's features beside the archives: a hub name or a folder",
    )
    text.add_argument(
        "--text-dtype",
        default=encoder.dtype,
        choices=("bfloat16", "float32"),
        help="precision of the encoder, as [encoder] dtype; default %(default)s",
    )
    text.add_argument(
        "--text-feature-dtype",
        default="",
        choices=("bfloat16", "float16", "float32"),
        help="precision of the stored features, as [encoder] cache_dtype; default as --text-dtype",
    )

    work = parser.add_argument_group("work")
    work.add_argument(
        "--device",
        default="auto",
        help="of the codec and the text encoder: auto, cpu, cuda, or cuda:0,cuda:1",
    )
    work.add_argument(
        "--workers", type=_positive, default=0, help="processes; default: from cores and work"
    )
    work.add_argument("--engine", default="local", choices=("local", "ray"))
    work.add_argument(
        "--chunk-items",
        type=int,
        default=defaults.chunk_items,
        help="recordings that a worker takes at once, and that a kill can cost",
    )
    work.add_argument(
        "--on-error",
        default="raise",
        choices=("raise", "skip"),
        help="at a damaged recording: end, or leave it out and count it",
    )
    work.add_argument("--max-skipped-share", type=float, default=0.01)
    work.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an output that was made from something else",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


_positive.__name__ = "number of processes"  # argparse says it in its message


def run(options: argparse.Namespace) -> int:
    from torchtitan.models.dit_tts.prepare.pipeline import RunOptions, prepare_corpus
    from torchtitan.models.dit_tts.prepare.recordings import ItemRules
    from torchtitan.models.dit_tts.prepare.report import lines

    given = vars(options)

    def chosen(kind: Callable, **nested: object) -> dict:
        names = kind.__dataclass_fields__
        return {name: given[name] for name in names if name in given} | nested

    settings = PrepareSettings(
        **chosen(
            PrepareSettings,
            audio=AudioSettings(**chosen(AudioSettings)),
            items=ItemRules(**chosen(ItemRules, heldout_seed=options.seed)),
        )
    )
    encoder = Encoder(
        model=options.encode_text, dtype=options.text_dtype, cache_dtype=options.text_feature_dtype
    )
    if encoder.model:
        from torchtitan.models.dit_tts.prepare.encode_text import check_encoder, encode_texts

        check_encoder(encoder)
    record = prepare_corpus(
        options.source, options.output, settings, RunOptions(**chosen(RunOptions))
    )
    state = "is complete already" if record["reused"] else "was made"
    print(f"{options.output} {state}:")
    for line in lines(record["summary"], None if record["reused"] else record["throughput"]):
        print(f"  {line}")
    if encoder.model:
        counts = encode_texts(
            Path(options.output), list(record["shards"]), encoder, options.device, options.engine
        )
        print(
            f"  text features of {encoder.model}: {counts['texts']} texts, {counts['made']} of them "
            f"encoded now"
        )
        if counts["too_long"]:
            print(
                f"  {counts['too_long']} of these texts have no features, being longer than "
                f"{counts['longest']} tokens; train with [data] max_text_tokens of that at most"
            )
    return 0
