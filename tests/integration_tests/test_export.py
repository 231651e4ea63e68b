"""A run on shards as an exported folder, moved away from its run and its data, is served."""

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


def test_it_is_served(tmp_path):
    """A request is answered, and Ctrl-C ends the server."""
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    make_shards(tmp_path / "data", 24)
    arguments = [*runs.TINY, f"--data.path={tmp_path / 'data'}"]
    arguments += ["--training.steps=2", "--ema.decays=0.9"]
    run = runs.run(tmp_path, "run", [*arguments, *FSDP], 2)
    done = titan_tts("export", run.folder, tmp_path / "exported", "--voices=s0")
    assert done.returncode == 0, done.stderr
    folder = (tmp_path / "exported").rename(tmp_path / "voice")
    shutil.rmtree(run.folder)
    shutil.rmtree(tmp_path / "data")
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
