"""A run that changes its Python: saved by one, verified, continued and exported by another.

The other Python is Debian's or the system's own, of the same minor version as this one, so that both can
use the same packages. Other minor versions run all tests in the workflow's table.
"""

import json
import platform
import subprocess
import sysconfig
from pathlib import Path

import pytest
import soundfile

from tools.harness import forked, runs
from tools.harness.synthetic import make_shards

CANDIDATES = ["/usr/bin/python3", "/usr/local/bin/python3"]


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


COMMANDS = """
import json, sys
from titan_tts.overlay import install_overlay
install_overlay()
from titan_tts.cli import main
for command in json.loads(sys.argv[1]):
    assert main(command) == 0
"""


def test_a_run_changes_its_python(other, tmp_path):
    make_shards(tmp_path / "data", 24)
    run = tmp_path / "run"
    options = [*runs.TINY, f"--data.path={tmp_path / 'data'}", "--ema.decays=0.9"]
    options += ["--checkpoint.interval=2"]

    def commands(*each):
        """Of the other Python, one after another in one process. Returns their output."""
        given = json.dumps([[*map(str, command)] for command in each])
        own = {"cwd": forked.ROOT, "env": forked.environment(PYTHONDONTWRITEBYTECODE="1")}
        ended = subprocess.run(
            [other, "-c", COMMANDS, given], capture_output=True, text=True, **own
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    place = [f"--job.dump_folder={tmp_path}", "--job.experiment=run"]
    config = forked.ROOT / "train_configs/debug.toml"
    commands(["train", config, *options, *place, "--training.steps=2"])
    verified = forked.titan_tts("checkpoint", "verify", run)
    assert verified.returncode == 0 and "step-2: valid" in verified.stdout
    rows = runs.run(tmp_path, "run", [*options, "--training.steps=4"]).metrics()
    assert sorted(rows) == [1, 2, 3, 4]  # continued, not begun again
    export = ["export", run, tmp_path / "voice", "--voices=s0"]
    assert "step-4: valid" in commands(["checkpoint", "verify", run], export)
    text = ["--text=three one", "--speaker=s0", "--sampling-steps=2", "--seed=3"]
    said = forked.titan_tts("generate", tmp_path / "voice", *text, "--out", tmp_path / "said.wav")
    assert said.returncode == 0 and soundfile.info(tmp_path / "said.wav").frames > 0
