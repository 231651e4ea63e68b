"""Streams of speech, over HTTP and a WebSocket: their pieces, blocks and ends."""

import asyncio
import io
import json
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from http.client import IncompleteRead
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import soxr
import torch

from tests.helpers.sampled_run import HOP
from tests.helpers.web_server import ask, said, speech
from titan_tts.serving import serve_command
from titan_tts.speak.utterance import Utterance

pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("websockets", reason="the extra serve is not installed")
aiohttp = pytest.importorskip("aiohttp", reason="the extra remote is not installed")


def test_long_texts_are_streamed_in_pieces(server, synthesizer, monkeypatch):
    batches, speak = [], synthesizer.speak
    monkeypatch.setattr(synthesizer, "speak", lambda r, *a: batches.append(len(r)) or speak(r, *a))
    synthesizer.run.config.data.max_frames = 3
    url, batcher = server()
    text = "One two one two. Two one. One two. " * 3
    status, headers, content = speech(url, input=text, response_format="wav")
    assert status == 200 and headers["Transfer-Encoding"] == "chunked"
    assert headers["X-Sample-Rate"] == "100"
    assert batches[:2] == [1, 2] and len(batches) == 3  # the first alone, the others while it plays
    samples, _ = soundfile.read(io.BytesIO(content), dtype="float32")
    wanted = said(synthesizer, text)
    assert len(samples) == len(wanted) > 2 * HOP
    assert abs(torch.from_numpy(samples) - wanted).max() < 1e-4
    with batcher.admitted(8):
        status, headers, content = speech(url)
    assert status == 429 and json.loads(content)["error"]["code"] == "queue_full"
    assert headers["Retry-After"] == "1" and speech(url)[0] == 200


def blocks_of(synthesizer, monkeypatch):
    """The last frame of each utterance in each batch, 0 if it is whole."""
    batches, speak = [], synthesizer.speak
    record = lambda given: batches.append([each.until for each in given])  # noqa: E731
    monkeypatch.setattr(synthesizer, "speak", lambda given, *a: record(given) or speak(given, *a))
    return batches


LONG = f"One{' two one' * 40}. Two one. One two."


def test_a_stream_begins_before_its_first_sentence_is_complete(server, synthesizer, monkeypatch):
    """Where the client asks for it and the model can."""
    batches, config = blocks_of(synthesizer, monkeypatch), synthesizer.run.config
    url, _ = server()
    config.data.max_frames = config.data.max_text_tokens = 999
    whole = Utterance(LONG, synthesizer.speaker("ann"), speed=0.25)
    frames = synthesizer.pieces(whole, low_latency=True)[0].frames
    assert 104 < frames <= 200
    ask_for = {"input": LONG, "speed": 0.25}
    for positions, more, wanted in (
        ("aligned", {"stream": True}, [[32], [56], [104], [frames], [0]]),
        ("aligned", {}, [[0], [0]]),
        ("none", {"stream": True}, [[0], [0]]),
    ):
        config.model.text_positions = positions
        batches.clear()
        samples = {}
        for kind, rate in (("wav", "100"), ("pcm", "24000")):
            _, headers, content = speech(url, response_format=kind, **ask_for, **more)
            assert headers["X-Sample-Rate"] == rate
            samples[kind] = np.frombuffer(content[44 if kind == "wav" else 0 :], "<i2") / 32767
        assert batches == 2 * wanted
        whole = said(synthesizer, LONG, speed=0.25).numpy()
        assert len(samples["wav"]) == len(whole) and abs(samples["wav"] - whole).max() < 1e-4
        at_24k = soxr.resample(samples["wav"], 100, 24000).clip(
            -1, 1
        )  # as of the whole: it has no joints
        assert len(samples["pcm"]) == len(at_24k) and abs(samples["pcm"] - at_24k).max() < 1e-4
    assert speech(url, response_format="flac", stream=True)[0] == 200


async def conversation(url, *messages, **headers):
    """The answers of the socket to each message: events, and the samples between them."""
    address = f"{url}/v1/audio/speech/stream"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, headers=headers) as socket,
    ):
        for message in messages:
            await socket.send_str(message if isinstance(message, str) else json.dumps(message))
        answers = []
        for _ in messages:
            events, sound = [], b""
            while not events or events[-1]["type"] == "audio.start":
                got = await socket.receive(timeout=20)
                if got.type is aiohttp.WSMsgType.CLOSE:
                    return got.data
                if got.type is aiohttp.WSMsgType.BINARY:
                    sound += got.data
                else:
                    events.append(got.json())
            answers.append((events, sound))
        return answers


def test_a_websocket_says_one_text_after_the_other(server, synthesizer, monkeypatch):
    synthesizer.run.config.model.text_positions = "aligned"
    synthesizer.run.config.data.max_frames = 999
    url, _ = server(max_characters=400)
    first = {"model": "tiny", "input": LONG, "voice": "ann", "speed": 0.25}
    second = {"model": "tiny", "input": "one", "voice": "bob", "response_format": "pcm"}
    wrong = (
        ("{", "the body must be a JSON object", None),
        ('{"input": "one"}', "model: Field required", "model"),
        (second | {"voice": "eve"}, "no voice 'eve'", "voice"),
        (second | {"input": "one " * 100 + "t"}, "401 characters, but at most 400", None),
        (
            second | {"response_format": "mp3"},
            "response_format = mp3, but a WebSocket sends pcm",
            None,
        ),
    )
    batches = blocks_of(synthesizer, monkeypatch)
    found = asyncio.run(conversation(url, first, *(each for each, *_ in wrong), second))
    assert batches[:2] == [[32], [56]]
    for (events, _), (_, words, param) in zip(found[1:-1], wrong, strict=True):
        [event] = events
        assert event["type"] == "error" and words in event["error"]["message"]
        assert (event["error"]["code"], event["error"]["param"]) == ("invalid_request", param)
    for (events, sound), body in ((found[0], first), (found[-1], second)):
        assert events == [{"type": "audio.start", "sample_rate": 100}, {"type": "audio.done"}]
        assert sound == speech(url, **body | {"response_format": "wav", "stream": True})[2][44:]
    monkeypatch.setattr(synthesizer, "synthesize", None)
    [(events, _)] = asyncio.run(conversation(url, second))
    assert [each.get("error", {}).get("code") for each in events] == [None, "internal_error"]


@pytest.mark.parametrize(
    "on, key, origin, allowed, status",
    [
        ("127.0.0.1", "", None, "", 0),
        ("127.0.0.1", "", "own", "", 0),
        ("127.0.0.1", "", "http://evil.example", "", 403),
        ("127.0.0.1", "", "http://evil.example", "http://good.example", 403),
        ("127.0.0.1", "", "http://good.example", "http://good.example", 0),
        ("127.0.0.1", "", "http://good.example", "*", 0),
        ("0.0.0.0", "", "null", "", 403),
        ("0.0.0.0", "", "own", "", 0),
        ("127.0.0.1", "secret", "http://evil.example", "", 0),
        ("0.0.0.0", "Secret", None, "", 401),
    ],
)
def test_who_may_open_a_websocket(server, on, key, origin, allowed, status):
    """A browser lets any page open one, and tells whose page it is."""
    url, _ = server(api_key="secret" if key else "", max_characters=100, on=on, origin=allowed)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if origin:
        headers["Origin"] = url if origin == "own" else origin
    body = {"model": "tiny", "input": "one", "voice": "ann"}
    if status:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            asyncio.run(conversation(url, body, **headers))
        assert refusal.value.status == status
    else:
        [(events, sound)] = asyncio.run(conversation(url, body, **headers))
        assert sound and events[-1] == {"type": "audio.done"}
        assert asyncio.run(conversation(url, "x" * 66737, **headers)) == 1009  # too big


def test_a_websocket_that_closes_ends_its_speech(server, synthesizer, monkeypatch):
    calls, gate, synthesize = [], threading.Event(), synthesizer.synthesize

    def waits(utterances, **more):
        calls.append(len(utterances))
        assert len(calls) == 1 or gate.wait(60)
        return synthesize(utterances, **more)

    async def leaves():
        address = f"{url}/v1/audio/speech/stream"
        async with aiohttp.ClientSession() as session, session.ws_connect(address) as socket:
            await socket.send_json({"model": "tiny", "input": "One. " * 40, "voice": "ann"})
            while (await socket.receive(timeout=20)).type is not aiohttp.WSMsgType.BINARY:
                pass

    monkeypatch.setattr(synthesizer, "synthesize", waits)
    synthesizer.run.config.data.max_frames = 8
    url, batcher = server()
    asyncio.run(leaves())
    until = time.monotonic() + 10
    while batcher._admitted and time.monotonic() < until:
        time.sleep(0.01)
    ended = not batcher._admitted
    gate.set()
    assert ended and batcher.waiting == 0
    assert speech(url)[0] == 200
    assert len(calls) <= 3  # the first piece, at most what was being said, and the new text


def test_clients_that_do_not_read_hold_up_no_other_and_are_closed(server, synthesizer, monkeypatch):
    sound, synthesize = torch.zeros(3_000_000), synthesizer.synthesize  # more than sockets buffer

    def speak(given, **more):
        return [replace(synthesize(given[:1])[0], waveform=sound)] * len(given)

    def wait_for(unread):
        until = time.monotonic() + 20
        while (batcher._admitted, batcher._unread) != (0, unread):
            assert time.monotonic() < until
            time.sleep(0.01)

    monkeypatch.setattr(synthesizer, "synthesize", speak)
    monkeypatch.setattr(serve_command, "STALL_SECONDS", 2)
    synthesizer.run.config.data.max_frames = 3
    url, batcher = server()
    batcher.max_unread = 4
    body = {"model": "tiny", "input": "Two one. " * 8, "voice": "ann", "response_format": "wav"}
    content, path = json.dumps(body).encode(), "/v1/audio/speech"
    to = f"HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"
    upgrade = f"HTTP/1.1\r\nHost: localhost\r\n{upgrade}\r\nSec-WebSocket-Key: {'A' * 22}=="
    frame = bytes([0x81, 0x80 | 126, 0, len(content), 0, 0, 0, 0])  # a text, its mask 0
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        first.sendall(f"POST {path} {to}\r\n\r\n".encode() + content)
        wait_for(2)
        second.sendall(f"GET {path}/stream {upgrade}\r\n\r\n".encode())
        assert b" 101 " in second.recv(512)
        assert speech(url, input="Two one.", response_format="wav")[0] == 200
        second.sendall(frame + content.replace(b"wav", b"pcm"))
        wait_for(4)
        status, _, refusal = speech(url, response_format="wav")
        assert status == 429 and b"4 pieces of texts" in refusal
        wait_for(0)  # they were closed
    assert speech(url, response_format="wav")[0] == 200


def test_a_stream_that_fails_does_not_end_as_a_complete_one(server, synthesizer, monkeypatch):
    """And /health tells, until a request succeeds."""
    synthesize, calls = synthesizer.synthesize, []

    def breaks(utterances, **more):
        calls.append(utterances)
        if len(calls) == 2:
            raise RuntimeError("no GPU any more")
        return synthesize(utterances, **more)

    def wait_for(status):
        until = time.monotonic() + 20
        while ask(f"{url}/health")[0] != status:
            assert time.monotonic() < until

    monkeypatch.setattr(synthesizer, "synthesize", breaks)
    synthesizer.run.config.data.max_frames = 8
    url, _ = server()
    with pytest.raises(IncompleteRead):
        speech(url, input="One two one two. Two one.", response_format="pcm")
    wait_for(503)
    assert speech(url, input="one")[0] == 200
    wait_for(200)


def test_nothing_is_said_to_who_has_gone(synthesizer):
    from fastapi import Request

    from titan_tts.serving.app import Refusal, SpeechBody, SpeechService

    futures: list[Future] = []

    async def gone():
        return {"type": "http.disconnect"}

    def submit(pieces):
        futures.append(Future())
        return futures[-1:]

    silent = SimpleNamespace(admitted=lambda _: nullcontext(), submit=submit, max_batch=1)
    service = SpeechService(synthesizer, silent, "tiny", {}, 4096)

    async def ask(kind):
        body = SpeechBody(model="tiny", input="one two", voice="ann", response_format=kind)
        with pytest.raises(Refusal, match="disconnected"):
            await service.answer(body, Request({"type": "http"}, gone))
        await asyncio.sleep(0)  # the end of the loop would cancel whatever is left
        return futures[-1].cancelled()

    assert [asyncio.run(ask(kind)) for kind in ("mp3", "wav")] == [True, True]
