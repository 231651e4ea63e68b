"""Speech that is streamed inside a sentence: seconds to its first sound, and its joints beside speech made at once.

    OMP_NUM_THREADS=1 python benchmarks/streaming.py               # titan_tts:base, 40 minutes of a core

Sentences of 19 to 26 words of Debian's fortunes and wordnet-base, on which the base voice was not trained. Each is said at once
and in blocks with the same noise. Whisper tiny.en hears both, DNSMOS judges both, and at the places of the joints both are
measured: the change of energy (20 ms on each side) and of F0 (the nearest voiced frames of SwiftF0 within 50 ms), and how far
the sharpest bend of the waveform within 2 ms exceeds those of the 50 ms around, where a click would be.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from swift_f0 import SwiftF0  # noqa: E402

from benchmarks.common import RESULTS, cell, spread, write_report  # noqa: E402
from recipes.base_voice.texts import corpus_texts, words_of  # noqa: E402
from titan_tts import from_pretrained  # noqa: E402
from titan_tts.serving.app import SpeechService, build_app  # noqa: E402
from titan_tts.serving.batcher import Batcher  # noqa: E402
from titan_tts.serving.serve_command import listen, server  # noqa: E402
from titan_tts.speak.synthesizer import Synthesizer  # noqa: E402
from titan_tts.speak.utterance import Utterance  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.interface import Sound  # noqa: E402
from torchtitan.models.dit_tts.speech.scoring.plugins import (  # noqa: E402
    open_opinion_predictor,
    open_recognizer,
)
from torchtitan.models.dit_tts.speech.scoring.statistics import (  # noqa: E402
    difference,
    mean_interval,
    rate_interval,
)
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors  # noqa: E402

JOINTS = ("energy, dB", "F0, semitones", "bend, dB")


def sentences(count: int) -> list[str]:
    found = [t for part in corpus_texts(0, 26) for t in part if len(words_of(t)) > 18]
    return [sorted(found)[n] for n in np.linspace(0, len(found) - 1, count).round().astype(int)]


def joints(wave: np.ndarray, rate: int, places: Sequence[int], pitch: SwiftF0) -> np.ndarray:
    """Mean of each of JOINTS over the places; NaN without any."""
    found = pitch.detect(wave * (0.5 / np.abs(wave).max()), rate, fmin=50.0, fmax=600.0)
    voiced = found.timestamps[found.confidence >= 0.5]
    semitones = 12 * np.log2(found.pitch_hz[found.confidence >= 0.5])
    table = np.full((len(places), len(JOINTS)), np.nan)
    for row, at in zip(table, places):
        before, behind = (wave[at - rate // 50 : at], wave[at : at + rate // 50])
        row[0] = abs(
            10 * np.log10((np.square(before).mean() + 1e-7) / (np.square(behind).mean() + 1e-7))
        )
        there = np.searchsorted(voiced, at / rate)
        if (
            0 < there < len(voiced)
            and np.abs(voiced[there - 1 : there + 1] - at / rate).max() < 0.05
        ):
            row[1] = abs(semitones[there] - semitones[there - 1])
        bends = np.abs(np.diff(wave[at - rate // 40 : at + rate // 40], 2)) + 1e-6
        middle = len(bends) // 2
        sharpest = bends[middle - rate // 500 : middle + rate // 500].max()
        row[2] = 20 * np.log10(sharpest / np.sqrt(np.square(bends).mean()))
    counts = np.isfinite(table).sum(0)
    return np.where(counts, np.nansum(table, 0) / np.maximum(counts, 1), np.nan)


def compare(model: Synthesizer, texts: list[str], seeds: int) -> dict[str, Any]:
    """Words, opinion and joints of the texts said at once and in blocks."""
    hears, judges = open_recognizer("whisper-tiny.en"), open_opinion_predictor("dnsmos")
    pitch, rate = SwiftF0(threads=1, spin=False), model.sample_rate
    shape = seeds, len(texts)
    errors, opinion = ({kind: np.zeros(shape) for kind in ("at once", "in blocks")} for _ in "ab")
    at_joints = {kind: np.full((len(JOINTS), *shape), np.nan) for kind in errors}
    words, distances, decoding, count = np.zeros(len(texts)), [], [], 0
    for seed, index in np.ndindex(shape):
        [piece] = model.pieces(Utterance(texts[index], model.default_voice))
        [whole] = model.speak([piece], seed)
        blocks, sounds = model.blocks([piece]), []
        while (block := blocks.next) is not None:
            [speech] = model.speak([block], seed)
            sounds.append(blocks.add(speech))
        places = np.cumsum([len(each) for each in sounds])[:-1].tolist()
        made = {"at once": whole.waveform, "in blocks": torch.cat(sounds)}
        for kind, wave in made.items():
            sound = Sound(wave, rate)
            counted = count_errors(texts[index], hears.transcribe(sound, "en"), "en")
            errors[kind][seed, index], words[index] = counted.word_errors, counted.words
            opinion[kind][seed, index] = judges.score(sound)
            at_joints[kind][:, seed, index] = joints(wave.numpy(), rate, places, pitch)
        distances.append(float((speech.latents - whole.latents).norm() / whole.latents.norm()))
        off = made["in blocks"] - speech.waveform  # what the last block decoded at once
        decoding += [
            float(off[a - 1600 : a].norm() / speech.waveform[a - 1600 : a].norm()) for a in places
        ]
        count += len(places)
    first, second = errors
    found: dict[str, Any] = {
        "words_wrong": {kind: asdict(rate_interval(errors[kind], words)) for kind in errors},
        "more_words_wrong": asdict(difference(errors[second], errors[first], words)),
        "dnsmos": {kind: asdict(mean_interval(opinion[kind])) for kind in errors},
        "joints": count,
        "relative_difference_of_latents": spread(distances),
        "relative_difference_of_0.1_s_before_a_joint_to_decoding_at_once": spread(decoding),
    }
    for number, name in enumerate(JOINTS):
        values = {kind: at_joints[kind][number] for kind in errors}
        found[name] = {kind: asdict(mean_interval(values[kind])) for kind in errors}
        found[name]["more"] = asdict(difference(values[second], values[first]))
    return found


async def first_sound(url: str, text: str, way: str) -> tuple[float, float]:
    """Seconds from the request to its first samples, and this process's own; reads the rest, too."""
    body = {"model": "tts-1", "input": text, "response_format": "pcm", "stream": way != "sentence"}
    clocks, found = (time.perf_counter, time.process_time), []
    async with aiohttp.ClientSession(url) as session:
        began = [clock() for clock in clocks]

        def heard() -> None:
            found.append([clock() - since for clock, since in zip(clocks, began)])

        if way == "websocket":
            async with session.ws_connect("/v1/audio/speech/stream") as socket:
                await socket.send_json(body)
                while (got := await socket.receive()).data != '{"type":"audio.done"}':
                    if got.type is aiohttp.WSMsgType.BINARY:
                        heard()
        else:
            async with session.post("/v1/audio/speech", json=body) as answer:
                async for _ in answer.content.iter_any():
                    heard()
    return found[0][0], found[0][1]


def latency(model: Synthesizer, texts: list[str]) -> dict[str, Any]:
    """Seconds to the first sound, of each way in turn."""
    batcher, listening = Batcher(model), listen("127.0.0.1", 0)
    service = SpeechService(model, batcher, "base", {}, 4096)
    listening.listen()
    serving = server(build_app(service), service.body_limit)
    thread = threading.Thread(target=serving.run, args=([listening],))
    thread.start()
    url, found = f"http://127.0.0.1:{listening.getsockname()[1]}", {}
    for way in ("sentence", "chunks", "websocket"):
        asyncio.run(first_sound(url, texts[0], way))  # warms up
        both = [asyncio.run(first_sound(url, text, way)) for text in texts]
        found[way] = dict(zip(("seconds", "cpu_seconds"), map(spread, zip(*both))))
        print(way, *(cell(each) for each in found[way].values()), flush=True)
    serving.should_exit = True
    thread.join()
    batcher.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2, help="of the noise")
    parser.add_argument("--steps", type=int, nargs="+", default=[8], help="whose joints are heard")
    parser.add_argument("--out", type=Path, default=RESULTS / "streaming.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, texts = from_pretrained("titan_tts:base", dtype="float32"), sentences(given.texts)
    own, found = model.sampling, {"sentences": given.texts, "seeds": given.seeds}
    # The last costs what a student of four steps would.
    plain = {"steps": 4, "text_scale": 0.0}
    for name, keys in (("32 steps", {}), ("8 steps", {"steps": 8}), ("4 passes", plain)):
        model.sampling = replace(own, **keys)
        found[f"first sound, {name}"] = latency(model, texts[:: max(1, given.texts // 10)])
    for steps in given.steps:
        model.sampling = replace(own, steps=steps)
        found[f"{steps} steps"] = compare(model, texts, given.seeds)
        print(json.dumps(found[f"{steps} steps"], indent=1), flush=True)
        write_report(given.out, found)


if __name__ == "__main__":
    main()
