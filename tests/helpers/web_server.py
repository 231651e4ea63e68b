"""A web server of the sampled run's speech, and what clients ask of it."""

import json
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager

import pytest
import torch

from titan_tts.speak.utterance import Utterance, Voice, join


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

        def start(max_characters=4096, api_key="", on="127.0.0.1", origin="", max_seconds=1200.0):
            batcher = Batcher(synthesizer, max_waiting=8)
            stack.callback(batcher.close)
            voices = {"mine": Voice(torch.ones(2, 8))}
            limits = max_characters, max_seconds
            service = SpeechService(synthesizer, batcher, "tiny", voices, *limits)
            app = build_app(service, api_key, on, origin)
            host, port = stack.enter_context(listening_with(app))
            return f"http://{host}:{port}", batcher

        yield start


def ask(url, body=None, key="", kind="application/json"):
    """(status, headers, content). `body`: bytes as they are, others as JSON."""
    headers = {"Content-Type": kind, "Authorization": f"Bearer {key}"}
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
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
