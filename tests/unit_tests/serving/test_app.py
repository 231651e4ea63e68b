"""The web server through a socket: speech, its formats, what is refused."""

import asyncio
import io
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from http.client import IncompleteRead

import pytest
import soundfile
import torch

from tests.helpers.sampled_run import HOP
from torchtitan.models.dit_tts.inference.joining import join
from torchtitan.models.dit_tts.inference.synthesizer import Utterance, Voice

uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")


@pytest.fixture
def server(synthesizer):
    from torchtitan.models.dit_tts.serving.app import Settings, build_app
    from torchtitan.models.dit_tts.serving.batcher import Batcher
    from torchtitan.models.dit_tts.serving.serve_command import listen

    running = []

    def start(**settings):
        batcher = Batcher(synthesizer, window_seconds=0.2, max_waiting=8)
        settings = {"voices": {"mine": Voice(torch.ones(2, 8))}} | settings
        app = build_app(synthesizer, batcher, Settings("tiny", **settings))
        listening = listen("127.0.0.1", 0)
        listening.listen()
        one = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=one.run, args=([listening],))
        thread.start()
        running.append((one, thread, batcher))
        return f"http://127.0.0.1:{listening.getsockname()[1]}", batcher

    yield start
    for one, thread, batcher in running:
        one.should_exit = True
        thread.join(20)
        batcher.close()


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
    body = {"model": "tiny", "input": "one two", "voice": "ann", "response_format": "wav"} | body
    return ask(f"{url}/v1/audio/speech", body)


def said(synthesizer, text="one two", voice="ann", **more):
    chosen = synthesizer.speaker(voice)
    whole = Utterance(text, chosen, synthesizer.conditions(chosen), **more)
    pieces = synthesizer.pieces(whole, soon=True)
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

    from torchtitan.models.dit_tts.serving.app import Refusal, Settings, SpeechBody, SpeechService

    class Silent:
        futures: list[Future] = []

        def submit(self, pieces, begun=False):
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
    ],
)
def test_what_is_refused(server, body, status, code):
    url, batcher = server(max_characters=100)
    found, _, content = speech(url, **body)
    error = json.loads(content)["error"]
    assert (found, error["code"]) == (status, code) and error["message"]
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
    assert ask(f"{url}/health")[0] == 503


def test_an_address_that_is_taken():
    from tests.helpers.sentences import refused
    from torchtitan.models.dit_tts.serving.serve_command import listen

    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        refused(lambda: listen("127.0.0.1", port), f"--port = {port}", "--port 0")
