"""README.md of an exported folder: what the model is, its data, and the licences to fill in."""

from collections.abc import Sequence
from pathlib import Path

from titan_tts.export.options import Options
from titan_tts.report.words import counted
from titan_tts.speak.load_run import LoadedRun
from titan_tts.speak.speech_data import TrainingShards
from torchtitan.models.dit_tts.config.codec_name import split_vocoder
from torchtitan.models.dit_tts.speech.codec import Codec
from torchtitan.models.dit_tts.speech.codec.interface import WITHOUT_WEIGHTS
from torchtitan.models.dit_tts.text.vocabulary import named

_SHOWN = 12
_MANY_SPEAKERS = 100
"""Fewer are too few for voices that were not trained: measured for three and four, a rule of thumb beyond"""

_FILL_IN = "**to fill in**"


def model_card(options: Options, loaded: LoadedRun, codec: Codec, shards: TrainingShards) -> str:
    """Markdown with the metadata that the hub reads, without paths but their last two names."""
    data = loaded.config.data
    name = Path(options.out).resolve().name
    parameters = sum(p.numel() for p in loaded.model.parameters())
    dataset = shards.dataset
    hours = float(dataset.frames.sum()) / data.frames_per_second / 3600
    speakers, languages = (dataset.labels(each)[1] for each in ("speaker", "language"))
    figures = {
        "parameters": f"{parameters:,}",
        "training steps": f"{loaded.step:,}",
        "weights": loaded.weights,
        "training data": f"{hours:.1f} h in {len(dataset):,} utterances",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    paths = [shards.data.path] if isinstance(shards.data.path, str) else shards.data.path
    encoder = loaded.config.encoder.model
    unit, _, language = encoder.partition(":")
    texts = {
        "chars": f"the characters {loaded.tokenizer.vocabulary.characters!r}",
        "bytes": "any, as utf-8 bytes",
        "phones": f"as the phones that espeak-ng has for its language {language}",
    }
    without_weights = codec.name in WITHOUT_WEIGHTS
    codec_is = "fixed transform, no weights" if without_weights else "DAC-VAE"
    if split_vocoder(codec.name)[1]:
        codec_is = "fixed transform, and a vocoder with weights"
    voice = f"--speaker {options.voices[0]}" if options.voices else "--reference voice.wav"
    return f"""---
license: {options.license}
library_name: titan-tts
pipeline_tag: text-to-speech
tags: [text-to-speech, flow-matching, diffusion-transformer]
---

# {name}

A diffusion transformer ({loaded.config.model.flavor}) that turns text and a reference of a voice into latents of the codec
`{codec.name if not Path(codec.name).is_absolute() else "DAC-VAE"}` ({codec.frames_per_second:g} frames per second, {codec.sample_rate} Hz), trained by flow matching with
titan-tts.

```bash
pip install 'titan-tts[speech,pretrained]'
titan-tts generate {name} {voice} --text "..." --out speech.wav
```

| | |
|---|---|
{table}

## What it can say

| | |
|---|---|
| text | {texts.get(unit, "as its text encoder reads it")}; only texts similar to the training data sound well |
| voices | {voices(speakers)} |
| languages | {named(sorted(languages), _SHOWN) if languages else _FILL_IN} |
| conditioning tokens | {", ".join(loaded.tokenizer.fields) or "none"} |
| captions | {f"the voice in up to {data.max_caption_tokens} tokens: `--caption`" if data.max_caption_tokens else "none"} |

## Data and licences

| | what | licence |
|---|---|---|
| weights | `model.safetensors` | {options.license if options.license != "unknown" else _FILL_IN} |
| training data | {", ".join(f"`{_short(path)}`" for path in paths)} | {_FILL_IN} |
| codec | {codec_is} | {"none needed" if without_weights else _FILL_IN} |

Whose voices it was trained on, and what they agreed to: {_FILL_IN}.
"""


def voices(speakers: Sequence[str]) -> str:
    """Whose voice the model can take; `speakers`: those of its training data."""
    if not speakers:
        return "of a reference, if its training data, which name no speakers, had many"
    known = f"of its {counted(len(speakers), 'speaker')}: {named(sorted(speakers), _SHOWN)}"
    if len(speakers) >= _MANY_SPEAKERS:
        return f"{known}; others from a reference"
    return f"{known}; too few to take another voice from a reference"


def _short(path: str) -> str:
    """The last two names of a path or URL."""
    return "/".join(Path(path.partition("?")[0]).parts[-2:]).lstrip("/")
