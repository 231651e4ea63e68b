"""The commands of the documents that make a voice of a run and let it speak, as they stand there: for a run on
shards (FSDP 2 × 2) in the place of the main job's, each in a process of its own."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import soundfile

from tools.harness import runs
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.data.shard_writer import write_shard

ROOT = runs.ROOT
SPEAKERS = {"s0": "slt", "s1": "rms", "s2": "awb", "s3": "kal16"}
HSDP = [
    "--training.local_batch_size=2",
    "--parallelism.data_parallel_shard_degree=2",
    "--parallelism.data_parallel_replicate_degree=2",
]


def blocks(name: str, heading: str = "") -> list[str]:
    """The shell blocks of a document, from a heading on."""
    text = (ROOT / "docs" / name).read_text()
    return re.findall(r"```bash\n(.*?)```", text[text.index(heading) :], re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what the repository has after its main job, as far as the commands name it."""
    folder = tmp_path_factory.mktemp("work")
    data = folder / "outputs/data/spoken_digits"
    samples = [
        replace(each, metadata=each.metadata | {"speaker": SPEAKERS[each.metadata["speaker"]]})
        for each in make_samples(28, 0)
    ]
    for name, chosen in (("train", samples[:24]), ("heldout", samples[24:])):
        (data / name).mkdir(parents=True)
        write_shard(data / name / "000000.tar", chosen)
    arguments = [*runs.TINY, *HSDP, f"--data.path={data / 'train'}", "--training.steps=2"]
    arguments += ["--ema.decays=0.9", "--sampling.steps=2"]
    runs.run(folder / "outputs", "debug", arguments, 4)
    shutil.copytree(ROOT / "docs/clips", folder / "docs/clips")
    (folder / "bin").mkdir()
    program = folder / "bin/titan-tts"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m titan_tts "$@"\n')
    program.chmod(0o755)
    return folder


def shell(folder, script: str, **more) -> subprocess.Popen:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["bash", "-ec", script], cwd=folder, env=variables, start_new_session=True, **more
    )


def run(folder, script: str) -> None:
    done = shell(folder, script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = done.communicate(timeout=400)
    assert done.returncode == 0, output


@pytest.mark.slow
def test_it_is_exported_generates_is_evaluated_and_serves(folder):
    run(folder, blocks("export.md")[0])
    shutil.rmtree(folder / "outputs/debug")
    assert list(folder.glob("voice/evaluation/*/evaluation.html"))
    (folder / "speech.wav").unlink()
    run(folder, blocks("generate.md")[0])
    for name in ("speech.wav", "speech.flac", "story.ogg", "speech/greeting.wav"):
        assert soundfile.info(folder / name).duration > 0, name
    (folder / "speech.wav").unlink()

    serve, ask = blocks("serve.md", "## For programs")[0].strip().split("\n", 1)
    serve = serve.replace("--port 8000", "--port 0")  # 8000 may be taken
    server = shell(folder, f"exec {serve}", stdout=subprocess.PIPE, text=True)
    try:
        [port] = re.findall(r"http://127\.0\.0\.1:(\d+)/v1", server.stdout.readline())
        run(folder, ask.replace(":8000", f":{port}"))
    finally:
        server.kill()
    assert soundfile.info(folder / "speech.wav").duration > 0
