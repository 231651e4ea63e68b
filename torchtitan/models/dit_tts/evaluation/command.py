"""`titan-tts evaluate`: synthesizes held-out texts in each voice and counts a recognizer's word errors."""

import json
import sys
import time
from dataclasses import dataclass, replace

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.inference.generate_command import (
    SamplingOptions,
    load_for_sampling,
)


@dataclass(kw_only=True)
class Options(SamplingOptions):
    """Measure the word error rate of a run's speech on held-out texts; write its wavs."""

    heldout: str
    """Shards of texts that were not trained on."""

    recordings: str = ""
    """Corpus with the held-out recordings, to compare with."""

    data: str = ""
    """Training shards; the run's [data] path by default."""

    vocabulary: str = "zero,one,two,three,four,five,six,seven,eight,nine"
    """Words that the recognizer may hear, with commas between."""

    pictures: int = 4
    """Spectrograms per voice."""


def run(options: Options) -> int:
    import torch

    from torchtitan.models.dit_tts.audio import resample
    from torchtitan.models.dit_tts.data.build import open_training_data
    from torchtitan.models.dit_tts.evaluation.evaluate import (
        Sound,
        read_heldout,
        synthesize,
        transcribe,
        untrained_tokens,
    )
    from torchtitan.models.dit_tts.inference.load_run import untrained_model
    from torchtitan.models.dit_tts.prepare.audio_reader import read_audio_corpus
    from torchtitan.models.dit_tts.sampling.duration import fit_durations
    from torchtitan.models.dit_tts.sampling.sound_files import save_spectrograms, write_wav
    from torchtitan.models.dit_tts.scoring.keyword_recognizer import KeywordRecognizer

    began = time.monotonic()
    recognizer = KeywordRecognizer(options.vocabulary.split(","))
    loaded, codec, guidance, steps = load_for_sampling(options)
    data = loaded.config.data
    durations = fit_durations(open_training_data(replace(data, path=options.data or data.path)))
    heldout = open_training_data(replace(data, path=options.heldout))
    items = read_heldout(heldout, data.max_speaker_frames)
    for found in untrained_tokens(items, loaded.tokenizer):
        print(f"warning: {options.heldout} has {found}, given as unknown", file=sys.stderr)

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
        waveforms = synthesize(
            loaded,
            model,
            codec,
            items,
            durations,
            guidance,
            steps,
            options.seed,
            f"synthesizing ({name})",
        )
        audio[name] = [(waveform, codec.sample_rate) for waveform in waveforms]

    rates, heard = {}, {}
    for name, sounds in audio.items():
        errors, heard[name] = transcribe(recognizer, items, sounds)
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
            save_spectrograms(folder / f"{item.file_name}.png", panels, rate)

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
    speakers = [*sorted(drawn), "all"]
    print(f"\nWord error rate of {len(items)} held-out utterances, step {loaded.step}:")
    print(f"{'':12}" + "".join(f"{speaker:>9}" for speaker in speakers))
    for name, by_speaker in rates.items():
        print(f"{name:12}" + "".join(f"{by_speaker[speaker]:>9.1%}" for speaker in speakers))
    print(f"wavs, spectrograms and evaluation.json: {folder}")
    return 0
