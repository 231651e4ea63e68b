"""Our tree over torchtitan: from a checkout, from a wheel, in children, and next to upstream's own."""

import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._utils import _get_available_device_type
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils

from torchtitan import _cpu

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "torchtitan"
SUFFIXES = (".py", ".json", ".jinja", ".html", ".css", ".js", ".md", ".safetensors")
UPSTREAM = Path(distribution("torchtitan").locate_file("torchtitan"))


def run_python(code: str, cwd: Path, *python_path: Path) -> Any:
    """Runs code in a fresh interpreter; its last line of output is JSON."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, python_path))}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_no_file_of_ours_shadows_upstreams():
    upstream = {str(file) for file in distribution("torchtitan").files}
    ours = {str(path.relative_to(ROOT)) for path in OURS.rglob("*.py")}
    assert "torchtitan/train.py" in upstream and "torchtitan/_cpu.py" in ours
    assert ours & upstream == {"torchtitan/__init__.py", "torchtitan/models/__init__.py"}


def test_upstreams_families_are_listed_and_build():
    from torchtitan.models import _supported_models

    tree = (UPSTREAM / "models/__init__.py").read_text()
    assert {"dit_tts", *re.findall(r'"(\w+)"', tree)} == _supported_models
    spec = get_train_spec("llama3")
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args["debugmodel"])
    assert sum(p.numel() for p in model.parameters()) > 1e6


# HF datasets would take seconds. The operator is as in upstream's own test, which fails without it.
FIRST_IMPORT = """
import json, sys
from unittest import mock
import torch

sys.modules["torchtitan.hf_datasets.text_datasets"] = mock.Mock()
from torchtitan.distributed.activation_checkpoint import apply_ac
from transformers.models.t5gemma2 import modeling_t5gemma2
late = [name for name in ("scipy.optimize", "torchao") if name in sys.modules]
print(json.dumps([str(torch.ops.torch_attn._varlen_attn), late]))
"""


def test_a_module_of_upstreams_can_be_the_first_import():
    """And an encoder of transformers brings no library of its losses."""
    assert run_python(FIRST_IMPORT, ROOT) == ["torch_attn._varlen_attn", []]


@pytest.mark.skipif(_get_available_device_type() is not None, reason="there is an accelerator")
def test_the_cpu_stands_in_where_there_is_no_accelerator():
    from torchtitan.components import metrics  # one of the modules that copy the choice

    device = _cpu.CPUDeviceModule
    assert metrics.device_type == utils.device_type == "cpu" and utils.device_module is device
    assert device.get_device_name().startswith("CPU")
    device.reset_peak_memory_stats()
    peak = device.memory_stats().get("active_bytes.all.peak", 1)
    assert 0 < peak < device.get_device_properties().total_memory


@pytest.mark.parametrize("found, taken", [("mps", "cpu"), (None, "cpu"), ("cuda", "cuda")])
def test_the_cpu_is_taken_where_torch_sees_mps_alone(found, taken, monkeypatch):
    monkeypatch.setattr("torch._utils._get_available_device_type", lambda: found)
    seen = SimpleNamespace(device_type=found, device_module=None)
    _cpu.use_cpu_without_accelerator(seen)
    assert seen.device_type == taken


CHILD = """
import inspect, json, multiprocessing, pickle

if __name__ == "__main__":
    from torchtitan.config import JobConfig
    from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs

    args = pickle.loads(pickle.dumps(DiTTTSModelArgs(dim=24)))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        dim = pool.apply(getattr, (args, "dim"))
        print(json.dumps([dim, *pool.map(inspect.getfile, [DiTTTSModelArgs, JobConfig])]))
"""


@pytest.mark.long
def test_a_spawned_child_of_a_checkout_resolves_both():
    files = [OURS / "models/dit_tts/model/args.py", UPSTREAM / "config/job_config.py"]
    assert run_python(CHILD, ROOT) == [24, *map(str, files)]


# The command `titan-tts`

COMMAND = """
import json, sys

{before}
import titan_tts

sys.argv = ["titan-tts", "--help"]
try:
    titan_tts.main()
except SystemExit as stop:
    assert not stop.code, stop.code

import torchtitan
from torchtitan import models
from torchtitan.models.dit_tts import trainer
from torchtitan.models.dit_tts.config.shipped import voices_folder
from torchtitan.protocols.train_spec import get_train_spec

spec = get_train_spec("dit_tts")
print(json.dumps({{
    "flavors": sorted(spec.model_args),
    "ours": trainer.__file__,
    "upstream": trainer.Trainer.train_step.__code__.co_filename,
    "version": torchtitan.__version__,
    "voices": str(voices_folder()),
}}))
"""

# As on a machine that has none; upstream's own `import torchtitan` fails there.
WITHOUT_TRITON = 'sys.modules["triton"] = None'


def check_command(found: dict, ours: Path, voices: str, upstream: Path = UPSTREAM) -> None:
    assert found["flavors"] == ["18M", "300M", "3B", "60M", "800M", "8B", "8M", "debug", "duration"]
    assert found["ours"] == str(ours / "torchtitan/models/dit_tts/trainer.py")
    assert found["upstream"] == str(upstream / "train.py")
    assert found["version"] == "0.2.2"
    assert found["voices"] == str(ours / voices) and Path(found["voices"]).is_dir()


@pytest.mark.long
def test_command_of_a_checkout_from_another_folder(tmp_path):
    """An editable install puts the checkout last on sys.path, behind upstream."""
    code = COMMAND.format(before=f"sys.path.append({str(ROOT)!r})")
    check_command(run_python(code, tmp_path), ROOT, "assets/voices")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("titan_tts-*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_our_files_and_none_of_upstreams(wheel):
    expected = {
        str(path.relative_to(ROOT))
        for folder in (OURS / "models/dit_tts", ROOT / "titan_tts")
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in SUFFIXES
    }
    expected |= {"torchtitan/_cpu.py", "torchtitan/_imports.py"}
    configs = (path.relative_to(ROOT) for path in (ROOT / "train_configs").rglob("*.toml"))
    voices = (ROOT / "assets/voices").rglob("*")
    models = [path.relative_to(ROOT / "assets") for path in voices if path.is_file()]
    assert models
    expected |= {f"torchtitan/models/dit_tts/{name}" for name in (*configs, *models)}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected
    assert not held & {str(file) for file in distribution("torchtitan").files}
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "titan-tts = titan_tts:main" in wheel.read(entry_points).decode()


@pytest.mark.long
def test_command_of_a_wheel_in_upstreams_folder(wheel, tmp_path):
    """As pip installs it: our files lie among upstream's, whose own stay as they are."""
    site = tmp_path / "site"
    for file in distribution("torchtitan").files:
        if file.parts[0] == "torchtitan" and file.suffix == ".py":
            link = site / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.locate())
    wheel.extractall(site)
    found = run_python(COMMAND.format(before=WITHOUT_TRITON), tmp_path, site)
    voices = "torchtitan/models/dit_tts/voices"
    check_command(found, site, voices, upstream=site / "torchtitan")
