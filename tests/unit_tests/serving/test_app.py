"""The web server through a socket: speech, its formats, what is refused."""

import asyncio
import base64
import io
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from http.client import HTTPConnection, IncompleteRead
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
import tyro

from tests.helpers.browser import tab
from tests.helpers.hosts import status_of
from tests.helpers.sampled_run import HOP
from tests.helpers.sentences import refused
from titan_tts.speak.joining import join
from titan_tts.speak.utterance import Utterance, Voice

pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("websockets", reason="the extra serve is not installed")
aiohttp = pytest.importorskip("aiohttp", reason="the extra remote is not installed")


@contextmanager
def listening_with(app):
    """(host, port) of an application that is served."""
    from titan_tts.serving import serve_command

    listening = serve_command.listen("127.0.0.1", 0)
    listening.listen()
    server = serve_command.server(app, 66736)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield listening.getsockname()
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def server(synthesizer):
    from titan_tts.serving.app import SpeechService, build_app
    from titan_tts.serving.batcher import Batcher

    with ExitStack() as stack:

        def start(max_characters=4096, api_key="", on="127.0.0.1"):
            batcher = Batcher(synthesizer, max_waiting=8)
            stack.callback(batcher.close)
            voices = {"mine": Voice(torch.ones(2, 8))}
            service = SpeechService(synthesizer, batcher, "tiny", voices, max_characters)
            app = build_app(service, api_key, on)
            host, port = stack.enter_context(listening_with(app))
            return f"http://{host}:{port}", batcher

        yield start


def ask(url, body=None, key=""):
    """(status, headers, content)."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as got:
            return got.status, got.headers, got.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def speech(url, **body):
    body = {"model": "tiny", "input": "one two", "voice": "ann"} | body
    return ask(f"{url}/v1/audio/speech", body)


def said(synthesizer, text="one two", voice="ann", **more):
    chosen = synthesizer.speaker(voice)
    whole = Utterance(text, chosen, synthesizer.conditions(chosen), **more)
    pieces = synthesizer.pieces(whole, low_latency=True)
    return join(synthesizer.synthesize(pieces)).waveform.clamp(-1, 1)


@pytest.mark.long
def test_it_says_what_generate_says(server, synthesizer):
    url, _ = server()
    status, headers, content = speech(url, response_format="wav")
    assert status == 200 and headers["Content-Type"] == "audio/wav"
    samples, rate = soundfile.read(io.BytesIO(content), dtype="float32")
    wanted = said(synthesizer)
    assert rate == 100 and len(samples) == len(wanted)
    assert abs(torch.from_numpy(samples) - wanted).max() < 1e-4
    fast = said(synthesizer, speed=2.0)
    assert len(speech(url, speed=2.0, response_format="pcm")[2]) == 2 * len(fast)
    for kind, media in (("flac", "audio/flac"), (None, "audio/mpeg"), ("opus", "audio/ogg")):
        _, headers, content = speech(url, **({"response_format": kind} if kind else {}))
        sound, rate = soundfile.read(io.BytesIO(content))
        assert headers["Content-Type"] == media
        assert len(sound) / rate == pytest.approx(len(wanted) / 100, abs=0.2)
    # A stream starts with a short piece.
    text = "One two one two one. Two."
    whole = Utterance(text, synthesizer.speaker("ann"))
    split, one = (synthesizer.pieces(whole, low_latency) for low_latency in (True, False))
    assert (len(split), len(one)) == (2, 1)
    for kind, pieces in (("wav", split), ("flac", one)):
        sound, _ = soundfile.read(io.BytesIO(speech(url, input=text, response_format=kind)[2]))
        assert len(sound) == synthesizer.samples(pieces)
    assert speech(url, voice="mine")[0] == 200  # of a recording
    synthesizer.speech_data.default_voice = "bob"
    vars(synthesizer).pop("default_voice", None)  # it is read once
    spoken = {name: speech(url, voice=name, response_format="wav")[2] for name in ("ann", "bob")}
    assert spoken["ann"] != spoken["bob"]
    for voice in (None, ""):
        assert speech(url, voice=voice, response_format="wav")[2] == spoken["bob"]
    assert speech(url, model="tts-1", instructions="")[0] == 200


def test_speech_comes_with_the_times_of_its_words(server, synthesizer):
    """In the form of Kokoro-FastAPI, whose clients also expect a line for each part of a stream."""
    url, _ = server(api_key="secret")
    address, text = f"{url}/dev/captioned_speech", "One two one two. Two one."
    synthesizer.run.config.data.max_frames = 8
    body = {"model": "tiny", "input": text, "voice": "ann", "response_format": "wav"}
    assert ask(address, body)[0] == 401
    status, headers, content = ask(address, body | {"stream": True}, "secret")
    assert status == 200 and headers["Content-Type"] == "application/json"
    answer = json.loads(content)
    assert {*answer} == {"audio", "audio_format", "timestamps"} and answer["audio_format"] == "wav"
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(answer["audio"])), dtype="float32")
    assert rate == 100 and abs(torch.from_numpy(samples) - said(synthesizer, text)).max() < 1e-4
    assert [each["word"] for each in answer["timestamps"]] == text.split()
    times = [each[key] for each in answer["timestamps"] for key in ("start_time", "end_time")]
    assert times == sorted(times) and 0 <= times[0] < times[-1] <= len(samples) / rate
    assert b"\n" not in content
    assert ask(address, body | {"model": "x"}, "secret")[0] == 404


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
        for kind in ("wav", "pcm"):
            _, _, content = speech(url, response_format=kind, **ask_for, **more)
            samples[kind] = np.frombuffer(content[44 if kind == "wav" else 0 :], "<i2") / 32767
        assert batches == 2 * wanted
        whole = said(synthesizer, LONG, speed=0.25).numpy()
        assert np.array_equal(*samples.values()) and len(samples["wav"]) == len(whole)
        assert abs(samples["wav"] - whole).max() < 1e-4
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
        ("{", "the body: Invalid JSON", None),
        ('{"input": "one"}', "model: Field required", "model"),
        (second | {"voice": "eve"}, "no voice 'eve'", None),
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
        assert sound == speech(url, **body | {"response_format": "pcm", "stream": True})[2]
    monkeypatch.setattr(synthesizer, "synthesize", None)
    [(events, _)] = asyncio.run(conversation(url, second))
    assert [each.get("error", {}).get("code") for each in events] == [None, "internal_error"]


@pytest.mark.parametrize(
    "on, key, origin, status",
    [
        ("127.0.0.1", "", None, 0),
        ("127.0.0.1", "", "own", 0),
        ("127.0.0.1", "", "http://evil.example", 403),
        ("0.0.0.0", "", "null", 403),
        ("0.0.0.0", "", "own", 0),
        ("127.0.0.1", "secret", "http://evil.example", 0),
        ("0.0.0.0", "Secret", None, 401),
    ],
)
def test_who_may_open_a_websocket(server, on, key, origin, status):
    """A browser lets any page open one, and tells whose page it is."""
    url, _ = server(api_key="secret" if key else "", max_characters=100, on=on)
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

    silent = SimpleNamespace(admitted=lambda _: nullcontext(), submit=submit)
    service = SpeechService(synthesizer, silent, "tiny", {}, 4096)
    for kind in ("mp3", "wav"):
        body = SpeechBody(model="tiny", input="one two", voice="ann", response_format=kind)
        with pytest.raises(Refusal, match="disconnected"):
            asyncio.run(service.answer(body, Request({"type": "http"}, gone)))
    assert [future.cancelled() for future in futures] == [True, True]


def test_refusals_have_openais_form(server, synthesizer, monkeypatch):
    def breaks(*args, **more):
        raise RuntimeError("no GPU any more")

    url, batcher = server(max_characters=100)
    for body, words in (
        ({"voice": "eve"}, "no voice 'eve'; there are: ann, bob, mine"),
        ({"input": " "}, "the text is empty"),
        ({"input": "one " * 25 + "t"}, "101 characters, but at most 100"),
        ({"input": "\ud800"}, "surrogate"),
        ({"response_format": "aac"}, "response_format: "),
        ({"speed": 0.24}, "speed: "),
        ({"speed": 4.01}, "speed: "),
        ({"model": "other"}, "there is no model 'other'"),
        (
            {"instructions": "Whisper."},
            "model follows no instructions on how to speak; leave them out",
        ),
    ):
        status, _, content = speech(url, **body)
        error = json.loads(content)["error"]
        expected = (404, "model_not_found") if "model" in body else (400, "invalid_request")
        assert (status, error["code"]) == expected and words in error["message"]
        named = words.endswith(": ") or "model" in words
        assert error["param"] == (next(iter(body)) if named else None)
    assert speech(url, input="one " * 25, speed=4.0)[0] == speech(url, speed=0.25)[0] == 200
    assert ask(f"{url}/health")[0] == 200
    monkeypatch.setattr(synthesizer, "synthesize", breaks)
    answers = [ask(f"{url}/v1/nothing"), ask(f"{url}/v1/audio/speech"), speech(url)]
    batcher.close()
    answers += [speech(url), ask(f"{url}/health")]
    assert [status for status, *_ in answers] == [404, 405, 500, 503, 503]
    for status, _, content in answers:
        error = json.loads(content)["error"]
        assert {*error} == {"message", "type", "param", "code"} and error["message"]
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")


def test_models_health_and_the_key(server):
    url, _ = server(api_key="secret")
    for path in ("/v1/models", "/v1/nothing"):
        assert ask(url + path)[0] == 401 and ask(url + path, key="Secret")[0] == 401
    assert speech(url)[0] == 401
    status, _, content = ask(f"{url}/v1/models", key="secret")
    [model] = json.loads(content)["data"]
    assert status == 200 and model["id"] == "tiny" and model["voices"] == ["ann", "bob", "mine"]
    assert model["instructions"] is False
    assert json.loads(ask(f"{url}/health")[2]) == {"status": "ok", "waiting": 0}


@pytest.mark.long
@pytest.mark.parametrize("key", ["secret", ""])
def test_the_page_says_a_text_and_asks_for_a_key_if_there_is_one(
    server, synthesizer, tmp_path, key
):
    """And how it sounds, if the model takes captions: here the one without a key."""

    async def driven(url):
        async with tab(f"{url}/", tmp_path) as page:
            seen = "(document.getElementById('key').offsetParent !== null)"
            if key:
                await page.until(seen)
                await page.value("document.getElementById('key').value = 'secret'")
            await page.value("document.getElementById('text').value = 'one two'")
            await page.value("document.querySelector('button').click()")
            await page.until("document.querySelector('audio').src.startsWith('blob:')")
            await page.until("document.getElementById('notice').textContent == ''")
            assert await page.value(seen) is bool(key)
            asked = "document.getElementById('instructions_part').offsetParent !== null"
            assert await page.value(asked) is not bool(key)
            return await page.value("[...document.querySelectorAll('option')].map(o => o.text)")

    url, _ = server(api_key=key)
    synthesizer.run.config.data.max_caption_tokens = 0 if key else 20
    assert asyncio.run(driven(url)) == ["(the default voice)", "ann", "bob", "mine"]


OURS = ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.8.9.1", "[::1]:8000")
OTHERS = ("evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "[::1", "10.0.0.9")  # fmt: skip


@pytest.mark.parametrize(
    "on, key, others",
    [("127.0.0.1", "", 403), ("localhost", "", 403), ("127.0.0.1", "a", 401), ("0.0.0.0", "", 200)],
)
def test_a_name_that_was_made_to_mean_this_machine_is_refused(server, on, key, others):
    """A stranger's page could else speak and read what is served here, as of the same origin as its own server."""
    url, _ = server(api_key=key, on=on)
    wanted = dict.fromkeys(OURS, 401 if key else 200) | dict.fromkeys(OTHERS, others)
    assert {name: status_of(url, name) for name in wanted} == wanted


def test_a_body_has_a_limit(server):
    """Also one that does not announce its length."""
    url, _ = server(max_characters=100)
    host, port = url.removeprefix("http://").split(":")
    for size, refused_as in ((66736, None), (66737, "request_too_large")):
        connection = HTTPConnection(host, int(port), timeout=10)
        parts = iter([b"x" * 2**15, b"x" * (size - 2**15)])
        connection.request("POST", "/v1/audio/speech", parts, encode_chunked=True)
        answer = connection.getresponse()
        code = json.loads(answer.read())["error"]["code"]
        assert (code == "request_too_large") == (answer.status == 413) == bool(refused_as)
        assert (answer.headers["Connection"] == "close") == bool(refused_as)


def test_options_of_serve_arrive(synthesizer, monkeypatch, tmp_path, capsys):
    from titan_tts.serving import app, serve_command

    assert serve_command.Options(run="r").host == "127.0.0.1"  # by default no other machine may ask
    arrived = []

    def build_app(service, key, host):
        batcher, voices = service.batcher, service.voices
        batcher.close()
        arrived.append([batcher.max_batch, batcher.seed, service.model, key, host])
        arrived.append(service.max_characters)
        arrived.append({name: len(voice.reference) for name, voice in voices.items()})
        return "app"

    monkeypatch.chdir(tmp_path)
    for name, frames in (("a=b", 2), ("c", 3)):
        np.save(f"{name}.npy", np.ones((frames, 8), np.float32))
    runs_nothing = SimpleNamespace(run=lambda sockets: None)
    monkeypatch.setattr(
        serve_command, "server", lambda app, limit: arrived.append(limit) or runs_nothing
    )
    monkeypatch.setattr(serve_command, "load_synthesizer", lambda *_: synthesizer)
    monkeypatch.setattr(app, "build_app", build_app)
    monkeypatch.setenv(serve_command.KEY_VARIABLE, "secret")
    given = "--host localhost --port 0 --max-batch 3 --max-characters 60 --seed 7"
    given += " --voice d=c.npy --voice e=a=b.npy --voice f=c.npy,a=b.npy"
    options = tyro.cli(serve_command.Options, args=["outputs/voice/", *given.split()])
    assert serve_command.run(options) == 0
    service = [3, 7, "voice", "secret", "localhost"]
    assert arrived == [service, 60, {"d": 3, "e": 2, "f": 5}, 2**16 + 12 * 60]
    assert capsys.readouterr().out.startswith("voice at http://localhost:")
    for given, words in (
        ({"voice": ["d=c.npy", "e"]}, "--voice = e, but it must be NAME=FILE"),
        ({"voice": ["d=c.npy", "d=c.npy"]}, "--voice = d=c.npy, but d is given twice"),
        ({"voice": ["d=gone"]}, "--voice = d=gone, but there is no such file"),
        ({"port": 2**16}, "--port = 65536, but"),
        ({"max_batch": 0}, "--max-batch = 0, but"),
        ({"max_characters": 0}, "--max-characters = 0, but"),
    ):
        wrong = serve_command.Options(run="r", **given)
        refused(lambda wrong=wrong: serve_command.run(wrong), words)
    with serve_command.listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        refused(lambda: serve_command.listen("127.0.0.1", port), f"--port = {port}", "--port 0")
