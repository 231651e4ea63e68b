"""The web server through a socket: speech, its formats, what is refused."""

import asyncio
import io
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, nullcontext
from http.client import IncompleteRead

import pytest
import soundfile
import torch
import tyro

from tests.helpers.sampled_run import HOP
from titan_tts.speak.joining import join
from titan_tts.speak.utterance import Utterance, Voice
from torchtitan.models.dit_tts.errors import InputError

pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")


@contextmanager
def listening_with(app, patience):
    """(host, port) of an application that is served."""
    from titan_tts.serving import connections
    from titan_tts.serving.serve_command import listen

    listening = listen("127.0.0.1", 0)
    listening.listen()
    server = connections.server(app, patience)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield listening.getsockname()
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def server(synthesizer):
    from titan_tts.serving.app import Settings, build_app
    from titan_tts.serving.batcher import Batcher

    with ExitStack() as stack:

        def start(**settings):
            batcher = Batcher(synthesizer, window_seconds=0.2, max_waiting=8)
            stack.callback(batcher.close)
            settings = {"voices": {"mine": Voice(torch.ones(2, 8))}} | settings
            app = build_app(synthesizer, batcher, Settings("tiny", **settings))
            host, port = stack.enter_context(listening_with(app, settings.get("patience", 60)))
            return f"http://{host}:{port}", batcher

        yield start


def ask(url, body=None, key="", client="127.0.0.1"):
    """(status, headers, content)."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    headers["X-Forwarded-For"] = client  # which a proxy on this machine is believed
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as got:
            return got.status, got.headers, got.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def speech(url, **body):
    body = {"model": "tiny", "input": "one two", "voice": "ann", "response_format": "wav"} | body
    return ask(f"{url}/v1/audio/speech", body)


def said(synthesizer, text="one two", voice="ann", **more):
    chosen = synthesizer.speaker(voice)
    whole = Utterance(text, chosen, synthesizer.conditions(chosen), **more)
    pieces = synthesizer.pieces(whole, low_latency=True)
    return join([each.waveform for each in synthesizer.synthesize(pieces)], 100)


def test_it_says_what_generate_says(server, synthesizer):
    url, _ = server()
    status, headers, content = speech(url)
    assert status == 200 and headers["Content-Type"] == "audio/wav"
    samples, rate = soundfile.read(io.BytesIO(content), dtype="float32")
    wanted = said(synthesizer).clamp(-1, 1)
    assert rate == 100 and len(samples) == len(wanted)
    assert abs(torch.from_numpy(samples) - wanted).max() < 1e-4
    assert len(speech(url, speed=2.0, response_format="pcm")[2]) == 2 * len(
        said(synthesizer, speed=2.0)
    )
    flac, rate = soundfile.read(io.BytesIO(speech(url, response_format="flac")[2]))
    assert rate == 100 and len(flac) == len(wanted)
    for kind in ("mp3", "opus"):
        sound, rate = soundfile.read(io.BytesIO(speech(url, response_format=kind)[2]))
        assert len(sound) / rate == pytest.approx(len(wanted) / 100, abs=0.2)
    for voice in ("mine", None):  # of a recording; nobody's in particular
        assert speech(url, voice=voice)[0] == 200
    for model in ("tts-1", "tts-1-hd", "gpt-4o-mini-tts"):  # which clients have built in
        assert speech(url, model=model, instructions="")[0] == 200


@pytest.fixture
def batches(synthesizer, monkeypatch):
    """Sizes of what was said together."""
    found, synthesize = [], synthesizer.synthesize

    def noted(utterances, **more):
        found.append(len(utterances))
        return synthesize(utterances, **more)

    monkeypatch.setattr(synthesizer, "synthesize", noted)
    return found


def test_long_texts_are_streamed_in_pieces(server, synthesizer, batches):
    synthesizer.run.config.data.max_frames = 8
    url, _ = server()
    text = "One two one two. Two one. One two."
    status, headers, content = speech(url, input=text)
    assert status == 200 and headers["Transfer-Encoding"] == "chunked"
    assert len(batches) == 2 and batches[0] == 1  # the first alone, the others together
    samples, _ = soundfile.read(io.BytesIO(content), dtype="float32")
    wanted = said(synthesizer, text).clamp(-1, 1)
    assert len(samples) == len(wanted) > 2 * HOP
    assert abs(torch.from_numpy(samples) - wanted).max() < 1e-4


def test_who_hears_half_hears_of_it(server, synthesizer, monkeypatch):
    """A stream that fails is not ended as a complete one is; and /health tells, until something is said."""
    synthesize, broken = synthesizer.synthesize, []

    def breaks(utterances, **more):
        if broken:
            raise RuntimeError("no GPU any more")
        broken.append(True)
        return synthesize(utterances, **more)

    monkeypatch.setattr(synthesizer, "synthesize", breaks)
    synthesizer.run.config.data.max_frames = 8
    url, batcher = server(api_key="secret")
    body = {"model": "tiny", "input": "One two one two. Two one.", "response_format": "pcm"}
    with pytest.raises(IncompleteRead):
        ask(f"{url}/v1/audio/speech", body, "secret")
    until = time.monotonic() + 20
    while ask(f"{url}/health")[0] != 503:
        assert time.monotonic() < until
    broken.clear()
    assert ask(f"{url}/v1/audio/speech", body | {"input": "one"}, "secret")[0] == 200
    while ask(f"{url}/health")[0] != 200:
        assert time.monotonic() < until


def test_nothing_is_said_to_who_has_gone(synthesizer):
    from fastapi import Request

    from titan_tts.serving.app import Refusal, Settings, SpeechBody, SpeechService

    class Silent:
        futures: list[Future] = []

        def admitted(self, client, pieces):
            return nullcontext()

        def submit(self, pieces, client):
            self.futures.append(Future())
            return self.futures[-1:]

    async def gone():
        return {"type": "http.disconnect"}

    service = SpeechService(synthesizer, Silent(), Settings("tiny"))
    for kind in ("mp3", "wav"):
        body = SpeechBody(model="tiny", input="one two", voice="ann", response_format=kind)
        with pytest.raises(Refusal, match="has gone"):
            asyncio.run(service.answer(body, Request({"type": "http"}, gone)))
    assert [future.cancelled() for future in Silent.futures] == [True, True]


def test_requests_are_said_together(server, batches):
    url, _ = server()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda number: speech(url, speed=1 + number / 10), range(6)))
    assert [status for status, *_ in answers] == [200] * 6
    assert sum(batches) == 6 and len(batches) < 6


@pytest.mark.parametrize(
    "body, status, code",
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"voice": "eve"}, 400, "voice_not_found"),
        ({"input": " "}, 400, "empty_input"),
        ({"input": "one " * 30}, 400, "input_too_long"),
        ({"response_format": "aac"}, 400, "invalid_request"),
        ({"speed": 9}, 400, "invalid_request"),
        ({"speed": "nan"}, 400, "invalid_request"),
        ({"input": 3}, 400, "invalid_request"),
        ({"input": "\ud800"}, 400, "cannot_be_said"),
        ({"instructions": "Whisper."}, 400, "instructions_not_supported"),
        ({"stream_format": "sse"}, 400, "invalid_request"),
    ],
)
def test_what_is_refused(server, body, status, code):
    url, batcher = server(max_characters=100)
    found, _, content = speech(url, **body)
    error = json.loads(content)["error"]
    assert (found, error["code"]) == (status, code) and error["message"]
    assert (error["param"], error["type"]) == (next(iter(body)), "invalid_request_error")
    assert batcher.alive and ask(f"{url}/health")[0] == 200


def test_no_more_than_may_wait(server, synthesizer, monkeypatch):
    go = threading.Event()
    synthesize = synthesizer.synthesize
    monkeypatch.setattr(
        synthesizer,
        "synthesize",
        lambda *args, **kwargs: go.wait(20) and synthesize(*args, **kwargs),
    )
    url, batcher = server()
    with ThreadPoolExecutor(40) as pool:
        waiting = [pool.submit(speech, url) for _ in range(40)]
        status, headers, content = next(as_completed(waiting, timeout=60)).result()
        go.set()
    assert status == 429 and headers["Retry-After"] == "1"
    assert json.loads(content)["error"]["code"] == "queue_full"
    assert {future.result()[0] for future in waiting} == {200, 429}


def test_models_health_and_the_key(server):
    url, batcher = server(api_key="secret")
    for path in ("/v1/models", "/v1/nothing"):
        assert ask(url + path)[0] == 401 and ask(url + path, key="Secret")[0] == 401
    assert speech(url)[0] == 401
    status, _, content = ask(f"{url}/v1/models", key="secret")
    [model] = json.loads(content)["data"]
    assert status == 200 and model["id"] == "tiny" and model["voices"] == ["ann", "bob", "mine"]
    assert json.loads(ask(f"{url}/health")[2]) == {"status": "ok", "waiting": 0}
    batcher.close()
    status, _, content = ask(f"{url}/health")
    assert status == 503 and json.loads(content)["error"]["type"] == "server_error"


def test_every_status_has_openais_form(server, synthesizer, monkeypatch):
    def breaks(*args, **more):
        raise RuntimeError("no GPU any more")

    url, batcher = server()
    monkeypatch.setattr(synthesizer, "synthesize", breaks)
    answers = [ask(f"{url}/v1/nothing"), ask(f"{url}/v1/audio/speech"), speech(url)]
    batcher.close()
    answers.append(speech(url))
    assert [status for status, *_ in answers] == [404, 405, 500, 503]
    for status, _, content in answers:
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert (error["type"] == "server_error") == (status >= 500)


def exchange(url, *sent):
    """What the server answers, and it ends the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        for each in sent:
            connection.sendall(each)
        content = b""
        while got := connection.recv(2**16):
            content += got
    return content


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/health", "/nothing"])
@pytest.mark.parametrize("sent", ["announced", "chunked"])
def test_a_body_has_a_limit(server, path, sent):
    url, _ = server(max_characters=100)
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\n"
    if sent == "announced":  # and nothing of it is waited for
        answer = exchange(url, f"{head}Content-Length: 100000\r\n\r\n".encode())
    else:
        chunk = b"8000\r\n" + b"x" * 2**15 + b"\r\n"
        answer = exchange(url, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode(), *[chunk] * 3)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413") and b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "request_too_large"


def test_connections_on_which_nothing_comes_end(server):
    url, _ = server(patience=0.2)
    assert exchange(url) == exchange(url, b"GET /health HTTP/1.1\r\nHo") == b""
    again = exchange(url, b"GET /health HTTP/1.1\r\nHost: here\r\n\r\nGET /hea")
    assert again.count(b"200 OK") == 1
    head = b"POST /v1/audio/speech HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\n12"
    answer = exchange(url, head)
    assert answer.startswith(b"HTTP/1.1 408") and b'"code":"request_timeout"' in answer


def test_who_does_not_read_is_dropped():
    gone = threading.Event()

    async def app(scope, receive, send):
        async def endless():
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})

        if scope["type"] == "http":
            sending = asyncio.create_task(endless())
            while (await receive())["type"] != "http.disconnect":
                pass
            sending.cancel()
            gone.set()

    with listening_with(app, 0.2) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        until = time.monotonic() + 0.6
        while time.monotonic() < until:  # who reads slowly is not
            assert connection.recv(2**20) and not gone.wait(0.01)
        assert gone.wait(20)


def test_others_are_answered_while_long_texts_wait(server, synthesizer, monkeypatch):
    """And who has asked for a long one hears all of it."""
    synthesize, first = synthesizer.synthesize, threading.Event()

    def slow(utterances, **more):
        first.set()
        time.sleep(0.03)
        return synthesize(utterances, **more)

    synthesizer.run.config.data.max_frames = 4
    url, batcher = server()
    batcher.max_batch, batcher.window_seconds = 1, 0.0
    text = "One two one. Two one two. One one. Two two." + " One two one. Two one." * 8
    wanted = said(synthesizer, text)
    monkeypatch.setattr(synthesizer, "synthesize", slow)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(speech, url, input=text)
        assert first.wait(20)
        status, _, content = speech(url)
        assert status == 429 and json.loads(content)["error"]["code"] == "queue_full"
        short = {"model": "tiny", "input": "one"}
        other = ask(f"{url}/v1/audio/speech", short, client="10.0.0.2")
        assert other[0] == 200 and not long.done()
        samples, _ = soundfile.read(io.BytesIO(long.result(20)[2]))
    assert len(samples) == len(wanted)


def test_defaults_keep_the_server_to_this_machine():
    from titan_tts.serving import demo_command, serve_command

    for command in (demo_command, serve_command):
        assert tyro.cli(command.Options, args=["run"]).host == "127.0.0.1"


def test_options_of_serve_arrive(synthesizer, monkeypatch):
    from titan_tts.serving import app, serve_command
    from titan_tts.speak import sampling_options

    arrived = []

    def build_app(_, batcher, settings):
        batcher.close()
        arrived.extend([batcher.max_batch, batcher.window_seconds, batcher.max_waiting])
        arrived.extend([batcher.seed, settings.model, settings.max_characters, settings.api_key])
        raise InputError("enough")

    monkeypatch.setattr(sampling_options, "load_synthesizer", lambda *_: synthesizer)
    monkeypatch.setattr(app, "build_app", build_app)
    monkeypatch.setenv(serve_command.KEY_VARIABLE, "secret")
    numbers = "--port 0 --max-batch 3 --window-ms 40 --max-waiting 5 --max-characters 60 --seed 7"
    options = tyro.cli(serve_command.Options, args=["run", "--model-name=it", *numbers.split()])
    with pytest.raises(InputError, match="enough"):
        serve_command.run(options)
    assert arrived == [3, 0.04, 5, 7, "it", 60, "secret"]


def test_an_address_that_is_taken():
    from tests.helpers.sentences import refused
    from titan_tts.serving.serve_command import listen

    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        refused(lambda: listen("127.0.0.1", port), f"--port = {port}", "--port 0")
