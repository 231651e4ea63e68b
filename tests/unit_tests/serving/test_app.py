"""The web server through a socket: speech, its formats, what is refused."""

import asyncio
import base64
import io
import json
import os
from http.client import HTTPConnection
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
import tyro

from tests.helpers.browser import tab
from tests.helpers.hosts import status_of
from tests.helpers.sentences import refused
from tests.helpers.web_server import ask, said, speech
from titan_tts.speak.utterance import Utterance

pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("websockets", reason="the extra serve is not installed")
aiohttp = pytest.importorskip("aiohttp", reason="the extra remote is not installed")


@pytest.mark.long
def test_it_says_what_generate_says(server, synthesizer, monkeypatch):
    from titan_tts.serving import app

    monkeypatch.setattr(app, "OPENAI_VOICES", [*app.OPENAI_VOICES, "ann"])  # the model has it
    url, _ = server()
    status, headers, content = speech(url, response_format="wav")
    assert status == 200 and headers["Content-Type"] == "audio/wav"
    samples, rate = soundfile.read(io.BytesIO(content), dtype="float32")
    wanted = said(synthesizer)
    assert rate == 100 and len(samples) == len(wanted)
    assert abs(torch.from_numpy(samples) - wanted).max() < 1e-4
    fast = said(synthesizer, speed=2.0)
    assert len(speech(url, speed=2.0, response_format="pcm")[2]) == 2 * 240 * len(fast)
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
    for voice in (None, "", "alloy", "cedar"):
        assert speech(url, voice=voice, response_format="wav")[2] == spoken["bob"]
    assert speech(url, model="tts-1", instructions="")[0] == 200
    nulls = dict.fromkeys(("voice", "response_format", "speed", "stream", "stream_format"))
    assert speech(url, **nulls)[1]["Content-Type"] == "audio/mpeg"


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
    answer = json.loads(ask(address, body | {"response_format": "pcm"}, "secret")[2])
    assert len(base64.b64decode(answer["audio"])) == 2 * 240 * len(samples)
    assert ask(address, body | {"model": "x"}, "secret")[0] == 404


def test_refusals_have_openais_form(server, synthesizer, monkeypatch):
    def breaks(*args, **more):
        raise RuntimeError("no GPU any more")

    url, batcher = server(max_characters=100, max_seconds=1.5)
    for body, words in (
        ({"voice": "eve"}, "no voice 'eve'; there are: ann, bob, mine"),
        ({"input": " "}, "the text is empty"),
        ({"input": "one " * 25 + "t"}, "101 characters, but at most 100"),
        ({"input": "one " * 25, "speed": 0.25}, "takes about 2 s, but at most 1.5 s are allowed"),
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
        named = words.endswith(": ") or "model" in words or "voice" in body
        assert error["param"] == (next(iter(body)) if named else None)
    json_text = json.dumps({"model": "tiny", "input": "one"}).encode()
    for given, kind in (
        (b"not json", "application/json"),
        (json_text, "text/plain"),
        ([], "application/json"),
    ):
        status, _, content = ask(f"{url}/v1/audio/speech", given, kind=kind)
        error = json.loads(content)["error"]
        assert (status, error["param"]) == (400, None)
        assert "the body must be a JSON object, with the header Content-Type: " in error["message"]
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
    from titan_tts.serving import app

    url, _ = server(api_key="secret")
    for path in ("/v1/models", "/v1/nothing"):
        assert ask(url + path)[0] == 401 and ask(url + path, key="Secret")[0] == 401
    assert speech(url)[0] == 401
    status, _, content = ask(f"{url}/v1/models", key="secret")
    [model] = json.loads(content)["data"]
    assert status == 200 and model["id"] == "tiny" and model["voices"] == ["ann", "bob", "mine"]
    assert model["instructions"] is False
    for name in ("tiny", "tts-1"):  # as OpenAI's client.models.retrieve asks
        status, _, content = ask(f"{url}/v1/models/{name}", key="secret")
        assert status == 200 and json.loads(content) == model | {"id": name}
    for name in ("base", "titan_tts:base"):  # started without a name
        app.SpeechService(None, None, "titan_tts:base", {}, 1).check_model(name)
    for name in ("other", "some%2Fother"):
        status, _, content = ask(f"{url}/v1/models/{name}", key="secret")
        error = json.loads(content)["error"]
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    said = json.loads(ask(f"{url}/v1/audio/voices", key="secret")[2])["voices"]
    assert said == [{"id": name, "name": name} for name in ("ann", "bob", "mine")]
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
            await page.value("load().then(() => true)")
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


@pytest.mark.parametrize("origin, key", [("", ""), ("http://a.test", "secret"), ("*", "")])
def test_pages_of_an_allowed_origin_may_call(server, origin, key):
    """A browser asks first, without the key, and shows the page an answer that names its origin."""
    url, _ = server(api_key=key, origin=origin)
    for page in ("http://a.test", "https://a.test"):
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
        answers = []
        for method, more in (("OPTIONS", asked), ("GET", {"Authorization": f"Bearer {key}"})):
            connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
            connection.request(method, "/v1/models", headers={"Origin": page} | more)
            answers.append(connection.getresponse())
        allowed = [answer.headers["Access-Control-Allow-Origin"] for answer in answers]
        may = origin in ("*", page)
        assert allowed == [origin or None if may else None] * 2
        assert (answers[0].status == 200) is may and answers[1].status == 200
        assert answers[0].headers["Access-Control-Allow-Headers"] == ("x-a" if origin else None)


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
    assert serve_command.Options(run="r").allow_origin == ""
    assert serve_command.Options(run="r").max_seconds == 1200.0
    arrived = []

    def build_app(service, key, host, origin):
        batcher, voices = service.batcher, service.voices
        batcher.close()
        arrived.append([batcher.max_batch, batcher.seed, service.model, key, host, origin])
        arrived.append((service.max_characters, service.max_seconds))
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
    monkeypatch.setattr("os.environ", os.environ.copy())
    given = (
        "--host localhost --port 0 --allow-origin http://a.test:1 --max-batch 3 --max-characters 60"
    )
    given += " --max-seconds 9.5 --seed 7"
    given += " --voice d=c.npy --voice e=a=b.npy --voice f=c.npy,a=b.npy"
    options = tyro.cli(serve_command.Options, args=["outputs/voice/", *given.split()])
    assert serve_command.run(options) == 0 and os.environ["LRU_CACHE_CAPACITY"] == "64"
    service = [3, 7, "voice", "secret", "localhost", "http://a.test:1"]
    assert arrived == [service, (60, 9.5), {"d": 3, "e": 2, "f": 5}, 2**16 + 12 * 60]
    assert capsys.readouterr().out.startswith("voice at http://localhost:")
    for given, words in (
        ({"voice": ["d=c.npy", "e"]}, "--voice = e, but it must be NAME=FILE"),
        ({"voice": ["d=c.npy", "d=c.npy"]}, "--voice = d=c.npy, but d is given twice"),
        ({"voice": ["d=gone"]}, "--voice = d=gone, but there is no such file"),
        ({"port": 2**16}, "--port = 65536, but"),
        ({"allow_origin": "http://a.test/"}, "--allow-origin = http://a.test/, but"),
        ({"max_batch": 0}, "--max-batch = 0, but"),
        ({"max_characters": 0}, "--max-characters = 0, but"),
        ({"max_seconds": 0.9}, "--max-seconds = 0.9, but"),
    ):
        wrong = serve_command.Options(run="r", **given)
        refused(lambda wrong=wrong: serve_command.run(wrong), words)
    with serve_command.listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        refused(lambda: serve_command.listen("127.0.0.1", port), f"--port = {port}", "--port 0")
