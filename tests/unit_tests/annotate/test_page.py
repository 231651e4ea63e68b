"""The server: what it refuses; the page, driven by keys in a browser; the command's end."""

import asyncio
import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
import soundfile

from tests.helpers.browser import tab
from tests.helpers.collected import segment_id, write_collected, write_list
from tests.helpers.hosts import status_of
from titan_tts.annotate.segments import Desk, read_segments
from titan_tts.annotate.store import annotations, database_path
from titan_tts.cli import main
from tools.harness.forked import start_titan_tts

pytest.importorskip("uvicorn", reason="the extra serve is not installed")


@contextmanager
def served(target):
    """(address, token) of a server in this process."""
    from titan_tts.annotate.app import build_app
    from titan_tts.serving.serve_command import listen, server

    desk = Desk(database_path(target), read_segments(target))
    settings = {"title": "<b>out", "tokens": ("[S1]", "(laugh)")}
    listening = listen("127.0.0.1", 0)
    listening.listen()
    running = server(build_app(target, desk, settings))
    thread = threading.Thread(target=running.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", desk.token
    finally:
        running.should_exit = True
        thread.join(20)


def ask(address, token, body=None):
    """(status, body) of an answer."""
    request = urllib.request.Request(address, body and json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_only_who_has_the_token_and_only_by_id(tmp_path):
    folder = write_collected(tmp_path / "out", [0.5, 0.4])
    (tmp_path / "out/secret.wav").write_bytes(b"RIFF")
    body = {"segment": segment_id(0), "action": "accept", "text": "x"}
    with served(folder) as (address, token):
        assert status_of(address, "evil.example", "/") == 403
        status, page = ask(f"{address}/", None)
        assert b'<meta name="viewport"' in page
        assert status == 200 and token.encode() not in page and b"Text 0" not in page
        for path, sent in (("settings", None), ("next", {}), ("judge", body)):
            for wrong in (None, token[:-1] + "!"):
                assert ask(f"{address}/v1/{path}", wrong, sent)[0] == 401
        assert annotations(folder) == {}
        for name in ("secret.wav", "../out/secret.wav", "", str(tmp_path / "out/secret.wav")):
            assert ask(f"{address}/v1/audio?segment={name}", token)[0] == 404
            assert ask(f"{address}/v1/judge", token, body | {"segment": name})[0] == 404
        half = "a\ud800"  # of a surrogate pair
        for change in (
            *({"action": "delete"}, {"text": 3}, {"text": " "}, {"text": half}),
            *({"text_verbatim": half}, {"segment": half}),
        ):
            status, said = ask(f"{address}/v1/judge", token, body | change)
            assert status == 400 and (" " in change.values() or f"{min(change)}: ".encode() in said)
        assert ask(f"{address}/v1/undo", token, {})[0] == 400
        assert annotations(folder) == {}
        status, sound = ask(f"{address}/v1/audio?segment={segment_id(1)}", token)
        (tmp_path / "a.wav").write_bytes(sound)
        samples, rate = soundfile.read(tmp_path / "a.wav")
        spectrum = np.abs(np.fft.rfft(samples))
        assert rate == 16_000 and len(samples) == 8_000 and spectrum.argmax() * 2 == 400
    with served(folder) as (_, again):
        assert again == token  # a link stays good


def test_the_page_by_keys(tmp_path):
    """Tokens where the caret is, the differences, undo, a refusal that keeps the text, and a segment without audio."""
    folder = write_collected(tmp_path / "out", [0.5, 0.1, 0.9])
    next(folder.glob(f"files/*/{segment_id(2)}.flac")).unlink()

    async def drive(address):
        async with tab(address, tmp_path / "profile") as page:
            await page.until(f"segment?.id == '{segment_id(1)}' && samples?.length == 8000")
            assert await page.value("document.title") == "<b>out"
            marked = "[...document.querySelectorAll('mark')].map(m => m.textContent).join()"
            assert await page.value(marked) == "uh"
            await page.press("e")
            await page.value("fields[0].setSelectionRange(4, 4)")  # between "Text" and " 1."
            await page.press("2", alt=True)
            await page.press("Escape")
            await page.press("v")
            await page.type(" yes")
            await page.press("Escape")
            await page.press("1")
            await page.press("Enter")
            await page.until(f"segment.id == '{segment_id(0)}' && !busy")
            texts = {"text": "Text (laugh) 1.", "text_verbatim": "uh text 1 yes [S1]"}
            assert annotations(folder) == {segment_id(1): {"annotated": True, **texts}}
            await page.press("u")
            await page.until(f"segment.id == '{segment_id(1)}' && !busy")
            shown = await page.value("fields[0].value + '|' + fields[1].value")
            assert shown == "|".join(texts.values())
            await page.press("x")
            await page.until(f"segment.id == '{segment_id(0)}' && samples && !busy")
            await page.press("e")
            await page.value("fields[0].select()")
            await page.type(" ")
            await page.press("Enter")
            await page.until("!at('notice').hidden && !busy")
            assert "needs a text" in await page.value("at('notice').textContent")
            await page.press("Escape")
            await page.press("x")
            await page.until(f"segment.id == '{segment_id(2)}' && !at('notice').hidden && !busy")
            pixels = "getContext('2d').getImageData(0, 0, 999, 99).data.some(Boolean)"
            assert not await page.value(f"document.querySelector('canvas').{pixels}")
            await page.press(" ")
            assert await page.value("audio.paused && !audio.src && !audio.duration")
            await page.press("Enter")
            await page.until("at('notice').textContent.includes('not loaded') && !busy")
            assert annotations(folder) == {segment_id(1): None, segment_id(0): None}
            await page.press("x")
            await page.until("segment === null && !busy")

    with served(folder) as (address, token):
        asyncio.run(drive(f"{address}/#{token}"))


def test_a_stopped_server_writes_the_list(tmp_path, capsys):
    path, log = write_list(tmp_path, 3), tmp_path / "log"
    log.touch()
    process = start_titan_tts("annotate", path, "--port=0", log=log)
    while not (found := re.search(r"(http://127.0.0.1:[1-9]\d*/)#(\S+)\n", log.read_text())):
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    for segment, action in (("k1", "reject"), ("k2", "accept")):
        body = {"segment": segment, "action": action, "text": "heard"}
        assert ask(f"{found[1]}v1/judge", found[2], body)[0] == 200
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == 0
    made, lines = tmp_path / "list.annotated.jsonl", path.read_text().splitlines()
    first, last = made.read_text().splitlines()
    assert first == lines[0]
    assert json.loads(last) == json.loads(lines[2]) | {"text": "heard", "annotated": True}
    made.unlink()
    assert main(["annotate", str(path), "--export"]) == 0
    assert "2 of 3 segments annotated, 1 rejected" in capsys.readouterr().out and made.exists()
