"""`titan-tts data inspect`: what a dataset holds, from its indexes alone."""

import argparse

from torchtitan.models.dit_tts.doctor.options import (
    add_dataset_arguments,
    open_whatever_is_there,
    print_json,
    show,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from torchtitan.models.dit_tts.doctor.summary import summarize
    from torchtitan.models.dit_tts.doctor.text_report import summary_lines

    dataset = open_whatever_is_there(options)
    summary = summarize(dataset, options.path, options.frames_per_second, options.top)
    if options.json:
        print_json(summary)
    else:
        show("\n".join(summary_lines(summary)))
    return 0
