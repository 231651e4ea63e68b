"""scripts/gpu_check.sh at tiny size on the CPU: what its parts find, and what they survive."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools.gpu_check import numerics, supervisor
from tools.gpu_check.items import Row
from tools.gpu_check.models import Mode
from tools.gpu_check.settings import ROOT, Settings, Stage
from tools.gpu_check.supervisor import StageResult, Supervisor
from tools.gpu_check.table import passed, table
from torchtitan.models.dit_tts.model import model as model_module

FAULTY = """
import os, signal, time
from tools.gpu_check.items import Item, NotMeasured

class OutOfMemoryError(RuntimeError):
    pass

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def raised(error):
    raise error

def items(settings):
    return [
        Item("good", lambda: {"tflops": 1.5}),
        Item("dies", die),
        Item("raises", lambda: raised(ValueError("no such thing"))),
        Item("too large", lambda: raised(OutOfMemoryError("2 GiB more"))),
        Item("absent", lambda: raised(NotMeasured("not in this version"))),
        Item("over its bar", lambda: {"error": 2.0, "passed": False, "why": "2 is over 1"}),
        Item("within its bar", lambda: {"error": 0.5, "passed": True}),
        Item("too long", lambda: {}, seconds=1e6),
        Item("never ends", lambda: time.sleep(1e6)),
        Item("behind it", lambda: {}),
    ]
"""


def settings(folder: Path) -> Settings:
    return Settings("cpu", True, str(folder), ("debug",), ())


FINE = """
from tools.gpu_check.items import Item

def items(settings):
    return [Item("good", lambda: {"tflops": 1.5})]
"""


def test_a_crash_an_error_and_an_endless_item_cost_only_themselves(tmp_path, monkeypatch):
    sources = {"faulty": FAULTY, "broken": "import no_such_module", "fine": FINE}
    package = tmp_path / "more" / "tools" / "gpu_check"
    package.mkdir(parents=True)
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "more"))
    monkeypatch.setattr(supervisor, "STAGES", tuple(Stage(n, 1, "a test's") for n in sources))
    monkeypatch.setattr(supervisor, "_GRACE_SECONDS", 1.0)
    printed, kept = [], []

    def keep(results: list[StageResult]) -> None:
        kept.append([(result.name, result.state, len(result.rows)) for result in results])

    results = Supervisor(settings(tmp_path), 9.0, printed.append, keep).run([*sources])
    faulty, broken, fine = results
    rows = {row.item: row for row in faulty.rows}
    failed, unmeasured = ("dies", "raises", "over its bar"), ("absent", "too long", "never ends")
    assert {name: row.status for name, row in rows.items()} == {
        **{"good": "measured", "too large": "oom", "within its bar": "passed"},
        **dict.fromkeys(failed, "failed"),
        **dict.fromkeys((*unmeasured, "behind it"), "not measured"),
    }
    assert "status -9" in rows["dies"].why
    assert rows["raises"].why == "ValueError: no such thing"
    assert rows["behind it"].why.startswith("time:") and faulty.state == "timeout"
    assert broken.state == "failed" and "no_such_module" in broken.rows[0].why
    assert [row.status for row in fine.rows] == ["measured"]
    assert not passed(results) and passed([fine])
    for status, fine_too in (("oom", True), ("not measured", True), ("failed", False)):
        assert passed([StageResult("steps", "completed", rows=[Row("b", status)])]) == fine_too
    shown = table(results)
    assert all(row.item in shown for result in results for row in result.rows)
    assert [("faulty", "running", 8)] in kept  # while the ninth item does not end
    ends = [("faulty", "timeout", 10), ("broken", "failed", 1), ("fine", "completed", 1)]
    assert kept[-1] == ends
    assert any("faulty 7/10 within its bar: passed" in line and "to go" in line for line in printed)


@pytest.fixture
def no_memory_of_errors():
    numerics.measured_errors.cache_clear()
    yield
    numerics.measured_errors.cache_clear()


def test_a_nan_in_any_bucket_is_no_pass(tmp_path, monkeypatch, no_memory_of_errors):
    torch.set_num_threads(1)
    buckets = [(2, 16, 8, 8), (2, 24, 8, 8)]
    monkeypatch.setattr(numerics, "_BUCKETS", tuple(buckets))
    expected_rows = len(numerics.reference(buckets[1]).output)  # before the fault
    numerics.reference(buckets[0])
    outcome, nan = numerics.outcome, float("nan")

    def faulty(model, batch, mode, device):
        found = outcome(model, batch, mode, device)
        if mode.attention == "flex" and found.output.shape[0] == expected_rows:
            gradients = {name: gradient * nan for name, gradient in found.gradients.items()}
            return numerics.Found(found.output * nan, gradients)
        return found

    monkeypatch.setattr(numerics, "outcome", faulty)
    values = numerics.check(Mode("flex", "bfloat16"), settings(tmp_path))
    assert not values["passed"] and values["gradient_error"] == float("inf")
    assert values.get("times_eager_sdpa", float("inf")) == float("inf")


def test_numerics_pass_and_see_one_key_too_many(tmp_path, monkeypatch, no_memory_of_errors):
    torch.set_num_threads(1)
    modes = [Mode(), Mode(precision="bfloat16"), Mode("varlen", "bfloat16", checkpointing="full")]
    for mode in modes:
        values = numerics.check(mode, settings(tmp_path))
        assert values["passed"], (mode.name, values)
    prepare_keys = model_module.prepare_keys

    def without_one_hole(backend, valid, *rest):
        valid = valid.clone()
        valid[1, torch.nonzero(~valid[1])[0]] = True
        return prepare_keys(backend, valid, *rest)

    monkeypatch.setattr(model_module, "prepare_keys", without_one_hole)
    numerics.measured_errors.cache_clear()
    values = numerics.check(Mode(), settings(tmp_path))
    assert not values["passed"] and values["output_error"] > 10 * values["output_bar"]


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(ROOT / "scripts/gpu_check.sh"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_command_writes_its_json_and_table(tmp_path):
    out = tmp_path / "result.json"
    began = time.time()
    done = script("--tiny", "--stages", "environment,ceilings", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ROOT}/" not in out.read_text()
    report = json.loads(out.read_text())
    assert report["passed"] and report["complete"] and report["tiny"]
    assert 0 < report["seconds"] <= time.time() - began
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert report["command"][0] == "scripts/gpu_check.sh" and "--tiny" in report["command"]
    assert [stage["name"] for stage in report["stages"]] == ["environment", "ceilings"]
    rows = {row["item"]: row for row in report["stages"][1]["rows"]}
    products = rows["debug products bf16"]
    assert products["status"] == "measured" and products["values"]["tflops"] > 0
    assert rows["debug products fp8"]["why"] == "fp8 products need a GPU"
    assert "debug products bf16" in done.stdout and str(out) in done.stdout


def test_wheels_are_pinned_and_installed_without_network_or_dependencies(tmp_path):
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\necho "$PYTHONPATH|$*" >>{tmp_path}/calls\n')
    stub.chmod(0o755)
    wheels = str(tmp_path / "w")
    for arguments in (["--collect-wheels", wheels], ["--wheels", wheels, "--tiny"]):
        done = script(*arguments, PYTHON=str(stub))
        assert done.returncode == 0, done.stderr
    download, install, check = (tmp_path / "calls").read_text().splitlines()
    wanted = {word for word in download.split() if "==" in word}
    assert {"torchtitan==0.2.2", "tyro==1.0.17"} <= wanted
    assert not any(word.startswith(("torch==", "numpy==")) for word in wanted)
    assert "pip download --no-deps --only-binary=:all:" in download
    assert "--python-version 3.12" in download
    assert "--no-index --no-deps" in install and wanted == {w for w in install.split() if "==" in w}
    site = install.split("--target ")[1].split()[0]
    assert check.startswith(f"{ROOT}:{site}") and check.endswith("-m tools.gpu_check --tiny")
    assert not Path(site).exists()
