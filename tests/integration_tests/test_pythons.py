"""A run that changes its Python: saved by one, verified, continued and exported by another.

The other Python is Debian's or the system's own, of the same minor version as this one, so that both can
use the same packages. Other minor versions run all tests in the workflow's table.
"""

import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import soundfile

from tools.harness import forked, runs
from tools.harness.synthetic import make_shards

CANDIDATES = ["/usr/bin/python3", "/usr/local/bin/python3"]
CHECKPOINTS = "tests/unit_tests/run/test_checkpoint_storage.py"


def version_of(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Another Python that sees this one's packages."""
    mine = platform.python_version()
    found = {version_of(each): each for each in CANDIDATES if Path(each).exists()}
    usable = {
        version: each
        for version, each in found.items()
        if version != mine and version.rsplit(".", 1)[0] == mine.rsplit(".", 1)[0]
    }
    if not usable:
        pytest.skip(f"Python {mine}; of the same minor version no other, only {[*found]}")
    folder = tmp_path_factory.mktemp("other")
    [python, *_] = usable.values()
    subprocess.run([python, "-m", "venv", "--without-pip", "--symlinks", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    shared = sysconfig.get_path("purelib")
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    return folder / "bin/python"


def call(python: str | Path, *arguments: object) -> str:
    ended = subprocess.run(
        [python, *map(str, arguments)],
        cwd=forked.ROOT,
        env=forked.environment(PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_run_changes_its_python(other, tmp_path):
    def command(python, *arguments):
        return call(python, "-m", "titan_tts", *arguments)

    def train(python, steps):
        place = [f"--job.dump_folder={tmp_path}", "--job.experiment=run"]
        data = [f"--data.path={tmp_path / 'data'}", "--ema.decays=0.9"]
        command(
            python,
            "train",
            forked.ROOT / "train_configs/debug.toml",
            *runs.TINY,
            *place,
            *data,
            "--checkpoint.interval=2",
            f"--training.steps={steps}",
        )

    make_shards(tmp_path / "data", 24)
    run = tmp_path / "run"
    train(other, 2)
    assert "step-2: valid" in command(sys.executable, "checkpoint", "verify", run)
    train(sys.executable, 4)
    assert "step-4: valid" in command(other, "checkpoint", "verify", run)
    rows = runs.JsonLines(run / "metrics.jsonl").read()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]  # continued, not begun again
    command(other, "export", run, tmp_path / "voice", "--voices=s0")
    text = ["--text=three one", "--speaker=s0", "--sampling-steps=2", "--seed=3"]
    command(sys.executable, "generate", tmp_path / "voice", *text, "--out", tmp_path / "said.wav")
    assert soundfile.info(tmp_path / "said.wav").frames > 0


def test_checkpoints_under_the_other_python(other):
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    output = call(other, "-m", "pytest", *options, CHECKPOINTS)
    assert " passed" in output and " failed" not in output
