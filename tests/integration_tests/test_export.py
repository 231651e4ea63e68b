"""A run on shards as an exported folder, moved away from its run and its data: in processes of
their own it generates the same, is served, and starts a run on shards."""

import io
import json
import os
import shutil
import signal
import urllib.request

import pytest
import soundfile

from tools.harness import runs
from tools.harness.forked import start_titan_tts, titan_tts
from tools.harness.synthetic import make_shards

FSDP = ["--training.local_batch_size=4", "--parallelism.data_parallel_shard_degree=2"]


def command(*arguments):
    done = titan_tts(*arguments)
    assert done.returncode == 0, done.stderr


def generate(folder, out):
    text = ["--text=three one four", "--speaker=s0", "--sampling-steps=2", "--seed=3"]
    command("generate", folder, *text, "--out", out)
    return out.read_bytes()


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """(the moved folder, what its run had said)."""
    folder = tmp_path_factory.mktemp("export")
    make_shards(folder / "data", 24)
    arguments = [*runs.TINY, f"--data.path={folder / 'data'}"]
    arguments += ["--training.steps=2", "--ema.decays=0.9"]
    run = runs.run(folder, "run", [*arguments, *FSDP], 2)
    said = generate(run.folder, folder / "of_run.wav")
    command("export", run.folder, folder / "out", "--voices=s0")
    (folder / "elsewhere").mkdir()
    moved = (folder / "out").rename(folder / "elsewhere" / "voice")
    shutil.rmtree(run.folder)
    shutil.rmtree(folder / "data")
    return moved, said


def test_it_says_the_same_to_the_bit(moved, tmp_path):
    folder, said = moved
    assert generate(folder, tmp_path / "said.wav") == said


def test_it_is_served(moved, tmp_path):
    """A request is answered, and Ctrl-C ends the server."""
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    folder, _ = moved
    out, err = tmp_path / "out", tmp_path / "err"
    server = start_titan_tts("serve", folder, "--port=0", "--sampling-steps=1", log=out, errors=err)
    try:
        runs.wait_until(lambda: out.exists() and "http://" in out.read_text(), 120, err.read_text)
        address = out.read_text().split("http://")[1].split()[0].rstrip(",/")
        body = {"model": "voice", "input": "one two", "voice": "s0", "response_format": "wav"}
        headers = {"Content-Type": "application/json"}
        url = f"http://{address}/audio/speech"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            samples, rate = soundfile.read(io.BytesIO(answer.read()))
        assert rate == 16000 and len(samples) > 0
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(120) in (0, 130)
    finally:
        server.kill()
