"""`titan-tts prepare`: a corpus of recordings to archives of latent triplets."""

import argparse

from torchtitan.models.dit_tts.codec import KNOWN_CODECS, build_codec
from torchtitan.models.dit_tts.prepare.build_archives import prepare_corpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", help="tar of KEY.opus (or .ogg, .flac, .wav) and KEY.json")
    parser.add_argument("output", help="folder for the archives; train/ and heldout/ come below it")
    parser.add_argument("--codec", default="mel_dct", help=f"one of: {', '.join(KNOWN_CODECS)}")
    parser.add_argument("--samples-per-shard", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of references")


def run(options: argparse.Namespace) -> int:
    summary = prepare_corpus(
        options.corpus,
        options.output,
        build_codec(options.codec),
        options.samples_per_shard,
        options.seed,
    )
    state = "is complete already" if summary["reused"] else "was made"
    print(f"{options.output} {state}:")
    for name, value in summary.items():
        if name != "reused":
            print(f"  {name}: {value}")
    return 0
