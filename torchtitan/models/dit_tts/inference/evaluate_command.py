"""`titan-tts evaluate`: lets a run say held-out texts in each voice and has a recogniser read them."""

import argparse
import json
import sys
import time
from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

from torchtitan.models.dit_tts.data.build import open_training_data
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.inference.audio_files import write_wav
from torchtitan.models.dit_tts.inference.duration import fit_durations
from torchtitan.models.dit_tts.inference.evaluate import (
    Sound,
    listen,
    read_heldout,
    speak,
    untrained_tokens,
)
from torchtitan.models.dit_tts.inference.generate_command import (
    add_sampling_arguments,
    build_run_codec,
    sampling_settings,
)
from torchtitan.models.dit_tts.inference.load_run import load_run, untrained_model
from torchtitan.models.dit_tts.inference.pictures import save_spectrogram_comparison
from torchtitan.models.dit_tts.inference.recognizer import SPOKEN_DIGITS, KeywordRecognizer
from torchtitan.models.dit_tts.prepare.audio import resample
from torchtitan.models.dit_tts.prepare.audio_reader import read_audio_corpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sampling_arguments(parser)
    parser.add_argument(
        "--heldout", required=True, help="archives of texts that were not trained on"
    )
    parser.add_argument("--recordings", help="corpus with the held-out recordings, to compare with")
    parser.add_argument("--data", help="training archives; the run's [data] path by default")
    parser.add_argument(
        "--vocabulary",
        default=",".join(SPOKEN_DIGITS),
        help="words that the recogniser may hear, with commas between",
    )
    parser.add_argument("--pictures", type=int, default=4, help="pictures for each voice")


def run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    loaded = load_run(options.run, options.step, not options.no_ema, options.encoder)
    config = loaded.config
    codec = build_run_codec(options, loaded)
    guidance, steps = sampling_settings(options, loaded)
    recognizer = KeywordRecognizer(options.vocabulary.split(","))
    data = config.data
    durations = fit_durations(open_training_data(replace(data, path=options.data or data.path)))
    heldout = open_training_data(replace(data, path=options.heldout))
    items = read_heldout(heldout, data.max_speaker_frames)
    for sentence in untrained_tokens(items, loaded.tokenizer):
        print(f"warning: {options.heldout} has {sentence}", file=sys.stderr)

    audio: dict[str, list[Sound]] = {}
    if options.recordings:
        recordings = {
            u.key: (u.waveform, u.sample_rate) for u in read_audio_corpus(options.recordings)
        }
        missing = [item.key for item in items if item.key not in recordings]
        if missing:
            raise InputError(
                f"{options.recordings} lacks {len(missing)} of the held-out recordings, the first is "
                f"{missing[0]}; give the corpus that {options.heldout} was prepared from"
            )
        audio["recordings"] = [recordings[item.key] for item in items]
    audio["codec"] = [(codec.decode(item.latents), codec.sample_rate) for item in items]
    untrained = untrained_model(loaded)
    for name, model in (("generated", loaded.model), ("untrained", untrained)):
        bar = partial(tqdm, desc=f"speaking ({name})", unit="batch")
        spoken = speak(loaded, model, codec, items, durations, guidance, steps, options.seed, bar)
        audio[name] = [(waveform, codec.sample_rate) for waveform in spoken]

    rates, heard = {}, {}
    for name, sounds in audio.items():
        errors, heard[name] = listen(recognizer, items, sounds)
        rates[name] = errors.rates()

    folder = loaded.folder / "samples" / f"step-{loaded.step}"
    drawn: dict[str, int] = {}
    for index, item in enumerate(items):
        generated, rate = audio["generated"][index]
        write_wav(folder / f"{item.file_name}.wav", generated, rate)
        drawn[item.speaker] = drawn.get(item.speaker, 0) + 1
        if drawn[item.speaker] <= options.pictures:
            recording, recorded_rate = audio.get("recordings", audio["codec"])[index]
            # At one rate, so that the bands of both panels are the same.
            recording = torch.from_numpy(resample(recording.numpy(), recorded_rate, rate))
            panels = [
                (f'{item.speaker}: "{item.text}", recording', recording),
                (f'generated, heard as "{" ".join(heard["generated"][index])}"', generated),
            ]
            save_spectrogram_comparison(folder / f"{item.file_name}.png", panels, rate)

    report = {
        "step": loaded.step,
        "word_error_rate": rates,
        "utterances": len(items),
        "sampling_steps": steps,
        "text_scale": guidance.text_scale,
        "speaker_scale": guidance.speaker_scale,
        "seed": options.seed,
        "seconds": time.monotonic() - began,
        "heard": [
            {"key": item.key, "text": item.text, **{k: " ".join(v[i]) for k, v in heard.items()}}
            for i, item in enumerate(items)
        ],
    }
    write_atomic(folder / "evaluation.json", json.dumps(report, indent=2) + "\n")
    speakers = sorted({item.speaker for item in items}) + ["all"]
    print(f"\nWord error rate of {len(items)} held-out utterances, step {loaded.step}:")
    print(f"{'':12}" + "".join(f"{speaker:>9}" for speaker in speakers))
    for name, by_speaker in rates.items():
        print(f"{name:12}" + "".join(f"{by_speaker[speaker]:>9.1%}" for speaker in speakers))
    print(f"wavs, pictures and evaluation.json: {folder}")
    return 0
