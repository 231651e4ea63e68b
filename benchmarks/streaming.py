"""Speech that is streamed inside a sentence: seconds to its first sound, and its joints beside speech made at once.

    OMP_NUM_THREADS=1 python -m benchmarks.streaming               # 20 minutes of a core

Sentences of 19 to 26 words of Debian's fortunes and wordnet-base, on which the base voice was not trained. Each is said at once
and in blocks with the same noise. Whisper tiny.en hears both, DNSMOS judges both, and at the places of the joints both are
measured: the change of energy (20 ms on each side) and of F0 (the nearest voiced frames, within 50 ms), and how far the sharpest
bend of the waveform within 2 ms exceeds those of the 50 ms around, where a click would be.
"""

import asyncio
import time
from dataclasses import asdict, replace
from typing import Any

import aiohttp
import numpy as np
import torch
from swift_f0 import SwiftF0

from benchmarks.common import RESULTS, cell, spread, write_report
from recipes.base_voice.texts import corpus_texts, words_of
from titan_tts import from_pretrained
from titan_tts.serving import app, batcher, serve_command
from titan_tts.speak.utterance import Utterance
from torchtitan.models.dit_tts.speech.scoring import plugins, statistics
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

MEASURES = ("word errors", "DNSMOS", "energy, dB", "F0, semitones", "bend, dB")
TEXTS, SEEDS = 40, 2
# The last costs what a student of four steps does.
_LINEAR = {"schedule": "linear"}
SETTINGS = {
    "32 steps": _LINEAR | {"steps": 32},
    "8 steps": _LINEAR | {"steps": 8},
    "4 passes": _LINEAR | {"steps": 4, "text_scale": 0.0},
}


def at_joints(wave: np.ndarray, rate: int, places: list[int]) -> np.ndarray:
    """Means over the places of the last three of MEASURES; NaN without any."""
    pitch = SwiftF0(threads=1, spin=False)
    found = pitch.detect(wave * (0.5 / np.abs(wave).max()), rate, fmin=50.0, fmax=600.0)
    voiced = found.timestamps[found.confidence >= 0.5]
    semitones = 12 * np.log2(found.pitch_hz[found.confidence >= 0.5])
    table = np.full((len(places), 3), np.nan)
    for row, at in zip(table, places):
        sides = wave[at - rate // 50 : at + rate // 50].reshape(2, -1)
        row[0] = abs(np.diff(10 * np.log10(np.square(sides).mean(1) + 1e-7))[0])
        there = np.searchsorted(voiced, at / rate)
        pair = slice(max(0, there - 1), there + 1)
        if len(voiced[pair]) == 2 and np.abs(voiced[pair] - at / rate).max() < 0.05:
            row[1] = abs(np.diff(semitones[pair])[0])
        bends = np.abs(np.diff(wave[at - rate // 40 : at + rate // 40], 2)) + 1e-6
        middle = bends[len(bends) // 2 - rate // 500 :][: rate // 250]
        row[2] = 20 * np.log10(middle.max() / np.sqrt(np.square(bends).mean()))
    return np.ma.masked_invalid(table).mean(0).filled(np.nan)


def measure(model: Any, judges: list[Any], text: str, seed: int) -> dict[str, Any]:
    """One sentence: a row of MEASURES said at once and one in blocks, and how far they differ where they need not."""
    [piece] = model.pieces(Utterance(text, model.default_voice))
    [whole] = model.speak([piece], seed)
    blocks, sounds = model.blocks([piece]), list[torch.Tensor]()
    while (block := blocks.next) is not None:
        [speech] = model.speak([block], seed)
        sounds.append(blocks.add(speech))
    places = np.cumsum([len(each) for each in sounds])[:-1].tolist()
    joined, rate, rows = replace(speech, waveform=torch.cat(sounds)), model.sample_rate, []
    for sound in (whole, joined):
        heard = count_errors(text, judges[0].transcribe(sound, "en"), "en")
        found = at_joints(sound.waveform.numpy(), rate, places)
        rows.append([heard.word_errors, judges[1].score(sound), *found])
    off = joined.waveform - speech.waveform  # from what the last block decodes
    before = [slice(at - rate // 10, at) for at in places]
    decoding = [float(off[each].norm() / speech.waveform[each].norm()) for each in before]
    latents = float((speech.latents - whole.latents).norm() / whole.latents.norm())
    return dict(rows=rows, words=heard.words, latents=latents, decoding=decoding)


def compare(model: Any, texts: list[str]) -> dict[str, Any]:
    """Measures of the texts said at once and in blocks, with 95 % intervals over texts."""
    judges = [plugins.open_recognizer("whisper-tiny.en"), plugins.open_opinion_predictor("dnsmos")]
    found = [[measure(model, judges, text, seed) for text in texts] for seed in range(SEEDS)]
    decoding = [value for each in sum(found, []) for value in each["decoding"]]
    report = dict[str, Any](joints=len(decoding), decoding=spread(decoding))
    report["latents"] = spread(each["latents"] for each in sum(found, []))
    values = np.array([[each["rows"] for each in of_seed] for of_seed in found])
    for number, name in enumerate(MEASURES):
        first, second = (values[:, :, kind, number] for kind in range(2))
        of = () if number else ([each["words"] for each in found[0]],)
        interval = statistics.mean_interval if number else statistics.rate_interval
        rows = {"at once": interval(first, *of), "in blocks": interval(second, *of)}
        rows["more"] = statistics.difference(second, first, *of)
        report[name] = {row: asdict(each) for row, each in rows.items()}
        print(name, *rows.items(), sep="\n", flush=True)
    return report


async def first_sound(url: str, text: str, way: str) -> tuple[float, float]:
    """Seconds from a request to its first samples, and seconds of a core; the rest is read, too."""
    body = {"model": "tts-1", "input": text, "response_format": "pcm", "stream": way != "sentence"}
    began = time.perf_counter(), time.process_time()
    async with aiohttp.ClientSession(url) as session:
        if way == "websocket":
            async with session.ws_connect("/v1/audio/speech/stream") as socket:
                await socket.send_json(body)
                while (await socket.receive()).type != aiohttp.WSMsgType.BINARY:
                    pass
                found = time.perf_counter() - began[0], time.process_time() - began[1]
                while (await socket.receive()).type == aiohttp.WSMsgType.BINARY:
                    pass
        else:
            async with session.post("/v1/audio/speech", json=body) as answer:
                await answer.content.readany()
                found = time.perf_counter() - began[0], time.process_time() - began[1]
                await answer.read()
    return found


async def latency(model: Any, texts: list[str]) -> dict[str, Any]:
    """Seconds to the first sound of a server, of each way in turn."""
    works, listening = batcher.Batcher(model), serve_command.listen("127.0.0.1", 0)
    service = app.SpeechService(model, works, "base", {}, 4096)
    listening.listen()
    server = serve_command.server(app.build_app(service), service.body_limit)
    serving = asyncio.create_task(server.serve([listening]))
    url, found = f"http://127.0.0.1:{listening.getsockname()[1]}", dict[str, Any]()
    for way in ("sentence", "chunks", "websocket"):
        both = [await first_sound(url, text, way) for text in (texts[0], *texts)][1:]
        found[way] = dict(zip(("seconds", "core_seconds"), map(spread, zip(*both))))
        print(way, *(cell(each) for each in found[way].values()), flush=True)
    server.should_exit = True
    await serving
    works.close()
    return found


def main() -> None:
    torch.set_num_threads(1)
    model = from_pretrained("titan_tts:base", dtype="float32")
    long = sorted(t for part in corpus_texts(0, 26) for t in part if len(words_of(t)) > 18)
    texts = [long[n] for n in np.linspace(0, len(long) - 1, TEXTS).round().astype(int)]
    own, report = model.sampling, dict[str, Any](texts=TEXTS, seeds=SEEDS, first_sound={})
    for name, keys in SETTINGS.items():
        model.sampling = replace(own, **keys)
        report["first_sound"][name] = asyncio.run(latency(model, texts[:: TEXTS // 5]))
    model.sampling = replace(own, steps=8)
    report["joints, 8 steps"] = compare(model, texts)
    write_report(RESULTS / "streaming.json", report)


if __name__ == "__main__":
    main()
