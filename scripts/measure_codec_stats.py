"""Measure the means and deviations of the embedded codec's coefficients on a corpus.

    python scripts/measure_codec_stats.py [--corpus CORPUS.tar]

writes torchtitan/models/dit_tts/speech/codec/mel_dct_stats.json. Latents made with other statistics are
other latents: after a change prepare the data and train again.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    import torch
    from torch.nn.functional import pad

    from titan_tts.evaluate.prompts import Corpus
    from torchtitan.models.dit_tts.speech.codec.mel_dct import (
        STATISTICS_FILE,
        MelDctCodec,
        MelDctTransform,
    )

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--corpus", type=Path, default=ROOT / "assets/spoken_digits/spoken_digits.tar"
    )
    arguments = parser.parse_args()
    transform = MelDctTransform()
    rows = []
    corpus = Corpus(str(arguments.corpus), "webdataset")
    if corpus.left_out:
        raise SystemExit(
            f"{arguments.corpus}: {corpus.left_out} left out; give a corpus without faults"
        )
    for item in corpus.items:
        if item.split == "train":
            waveform = corpus.load(item).waveform
            rows.append(
                transform.analyse(pad(waveform, (0, -len(waveform) % MelDctCodec.hop_length)))
            )
    coefficients = torch.cat(rows).double()
    statistics = {
        "measured_on": arguments.corpus.name,
        "frames": len(coefficients),
        "mean": [float(f"{value:.6g}") for value in coefficients.mean(0)],
        "standard_deviation": [float(f"{value:.6g}") for value in coefficients.std(0)],
    }
    STATISTICS_FILE.write_text(json.dumps(statistics, indent=0) + "\n")
    print(f"{len(coefficients)} frames: {STATISTICS_FILE}")


if __name__ == "__main__":
    main()
