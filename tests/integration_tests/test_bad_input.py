"""A user's mistake ends with one sentence and status 2: no traceback, and no run folder is left."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tools.harness import runs
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.errors import EXIT_INPUT_ERROR


def incomplete_tar(path: Path) -> None:
    """Latents and text of two samples, but no speaker's reference."""
    path.parent.mkdir()
    latents = io.BytesIO()
    np.save(latents, np.ones((20, 128), np.float16))
    with tarfile.open(path, "w") as tar:
        for key in ("a1", "a2"):
            for suffix, content in (("npy", latents.getvalue()), ("json", b'{"text": "one"}')):
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def check(run: runs.Run, words: list[str]) -> None:
    status, output = run.wait(120), run.log.read_text()
    assert status == EXIT_INPUT_ERROR and "Traceback" not in output, output
    sentences = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(set(sentences)) == 1, output  # several ranks may print the same
    for word in words:
        assert word in sentences[0], sentences[0]
    assert not run.folder.exists()


@pytest.mark.parametrize(
    "name, words",
    [
        ("incomplete", ["000.tar", "sample 'a1' is incomplete", "lacks .ref.npy", "data doctor"]),
        ("narrow", ["000000.tar", "64 wide", "latent_channels = 128", "set it to 64"]),
    ],
)
def test_data_that_cannot_be_used(tmp_path, name, words):
    if name == "narrow":
        make_shards(tmp_path / name, 8, shards=1, channels=64)
    else:
        incomplete_tar(tmp_path / name / "000.tar")
    check(runs.start(tmp_path, "run", [*runs.TINY, f"--data.path={tmp_path / name}"]), words)


def test_a_mistake_in_the_config_is_all_that_is_printed(tmp_path):
    """`python train.py` as a user starts it."""
    toml = tmp_path / "misspelt.toml"
    toml.write_text("[modell]\nflavor = 'debug'\n")
    run = runs.start(tmp_path, "own", ["--job.config_file", str(toml)], launcher=True)
    check(run, [str(toml), "[modell]", "model?"])
    assert len(run.log.read_text().splitlines()) == 1


def test_under_the_launcher(tmp_path):
    """Every rank finds the mistake; neither torchrun nor a waiting rank that it ends prints a traceback."""
    nowhere = str(tmp_path / "nowhere")
    arguments = [*runs.TINY, "--training.local_batch_size=4", "--data.path", nowhere]
    run = runs.start(tmp_path, "launched", arguments, processes=2, launcher=True)
    check(run, ["[data] path", nowhere, "names no .tar file"])
