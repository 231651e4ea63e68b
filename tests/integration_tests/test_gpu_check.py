"""scripts/gpu_check.sh at tiny size on the CPU: what its parts find, and what they survive."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.faulty_items import faulty_items
from tests.helpers.small_models import small_args
from tools.gpu_check import kernels, measuring, models, numerics
from tools.gpu_check.__main__ import pack, unpack
from tools.gpu_check.supervisor import ROOT, Supervisor
from torchtitan.models.dit_tts.model import model as model_module

TINY = small_args(dim=64, n_layers=1, mlp_dim=96, speaker_n_heads=1)


def test_a_crash_an_error_and_an_endless_item_cost_only_themselves(tmp_path, capsys):
    order, kept = tmp_path / "order", []
    items = faulty_items(order)

    def keep() -> None:
        kept.append([item.name for item in items if item.row is not None])
        if "within its bar" in kept[-1] and supervisor.end > time.time() + 2:
            supervisor.end = time.time() + 2

    supervisor = Supervisor(items, tmp_path, 3, 8.5, time.time() + 90, keep)
    supervisor.run()
    rows = {item.name: item.row for item in items}
    failed, unmeasured = ("dies", "raises", "over its bar"), ("absent", "never ends")
    behind = rows.pop("behind it")  # a fast machine still has time for it
    assert behind.status == "measured" or behind.why.startswith("time:")
    assert {name: row.status for name, row in rows.items()} == {
        **{"good": "measured", "too large": "oom", "within its bar": "passed"},
        **dict.fromkeys(failed, "failed"),
        **dict.fromkeys(unmeasured, "not measured"),
    }
    assert "status -9" in rows["dies"].why
    assert rows["raises"].why == "ValueError: no such thing"
    assert rows["over its bar"].why == "2 is over 1" and rows["good"].values == {"tflops": 1.5}
    assert set(kept[-1]) == {*rows, "behind it"}
    said = [line.rpartition(" ")[0] for line in order.read_text().splitlines()]
    assert said[::2][:7] == said[1::2][:7]
    assert sorted({*said[::2]} - {"behind it"}) == sorted(rows)
    assert "] within its bar: passed: error 0.5" in capsys.readouterr().out


def test_numerics_pass_and_see_a_nan_and_one_key_too_many(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(numerics, "SIZES", TINY)
    monkeypatch.setattr(numerics, "SHAPE", (5, 24, 8, 8))
    settings = SimpleNamespace(device="cpu")
    for mode in (("eager", "float32"), ("varlen", "float32"), ("varlen", "bfloat16")):
        values = numerics.check(*mode, settings)
        assert values["passed"] and values["gradient_error"] > 0, (mode, values)
    outcome, nan = numerics.outcome, float("nan")

    def faulty(model, batch, precision, device):
        output, gradients = outcome(model, batch, precision, device)
        if precision == "float32":
            gradients["input.weight"] *= nan
        return output, gradients

    monkeypatch.setattr(numerics, "outcome", faulty)
    values = numerics.check("varlen", "float32", settings)
    assert not values["passed"] and values["gradient_error"] == float("inf")
    prepare_keys = model_module.prepare_keys

    def without_one_hole(backend, valid, *rest):
        if next(with_faults):
            valid = valid.clone()
            valid[1, torch.nonzero(~valid[1])[0]] = True
        return prepare_keys(backend, valid, *rest)

    with_faults = iter([False, True])  # the reference's and the mode's
    monkeypatch.setattr(model_module, "prepare_keys", without_one_hole)
    values = numerics.check("eager", "float32", settings)
    assert not values["passed"] and values["output_error"] > 10 * values["output_bar"]


def test_a_measured_block_is_given_what_the_model_gives_it():
    with models.built(TINY, "eager", "cpu", models.random_weights(TINY)) as model:
        given = []
        model.layers[0].register_forward_pre_hook(lambda _, inputs: given.extend(inputs))
        full = {k: torch.ones_like(x) for k, x in numerics.make_batch().items() if "mask" in k}
        batch = {k: x for k, x in numerics.make_batch().items() if "keep" not in k} | full
        batch["text_features"] = batch["text_features"][..., : TINY.text_dim]
        for name in ("latents", "speaker"):
            batch[name] = batch[name][..., : TINY.latent_channels]
        with torch.autocast("cpu", torch.bfloat16):
            model(**batch)
        samples, frames, text, speaker = numerics.SHAPE
        shape = samples, frames, text, speaker // TINY.speaker_patch_size
        inputs = kernels.block_inputs(model, shape)
        plain = kernels.block_inputs(model, shape, masked=False, dtype=torch.float32)
        masked = (*plain[:3], inputs[3]._replace(mask=torch.zeros(5, 1, 1, 1)), *plain[4:])
        found = (model.layers[0](*each) for each in (plain, masked))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    for mine, its in zip(inputs, given, strict=False):
        if isinstance(its, torch.Tensor):
            assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
            assert mine.requires_grad == its.requires_grad
    torch.testing.assert_close(inputs[2:4], tuple(given[2:4]))
    assert plain[3].mask is None


def test_time_without_a_kernel_is_idle_and_groups_add_up():
    assert measuring.covered([(5, 7), (0, 2), (1, 4), (6, 6.5)]) == (7, 6)
    assert measuring.covered([]) == (0, 0)
    groups = {
        "nvjet_tst_128x256_NTN": "matmul",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention",
        "triton_per_fused_native_layer_norm_3": "triton",
        "multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "softmax": "other",
    }
    assert {name: measuring.group_of(name) for name in groups} == groups
    found = measuring.profiled(lambda: torch.ones(64, 64) @ torch.ones(64, 64), "cpu", 2)
    assert found["ms_of_kernels"] == pytest.approx(sum(found["ms_by_group"].values()))
    assert found["ms_by_group"]["matmul"] > 0 and {calls for *_, calls in found["kernels"]} >= {1}


def test_clocks_are_those_of_the_timed_section(tmp_path):
    def line(second: float, mhz: int) -> str:
        moment = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(1e9 + int(second)))
        return f"{moment}.{round(second % 1 * 1000):03d}, {mhz}, 2619, 500.5, 61\n"

    file = tmp_path / "telemetry.csv"
    file.write_text(line(1, 100) + line(2.2, 200) + line(2.4, 300) + "[N/A]\n" + "2001/09/09 01")
    found = measuring.clocks(file, 1e9 + 2, 1)
    assert found["sm_mhz"] == {"median": 250, "min": 200, "max": 300}
    assert found["watts"]["max"] == 500.5 and measuring.clocks(file, 0, 1) == {}


def test_compiled_kernels_are_packed_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.gpu_check.__main__.PART_BYTES", 1000)
    kernels = tmp_path / "inductor"
    (kernels / "a").mkdir(parents=True)
    (kernels / "a/kernel.so").write_bytes(os.urandom(3000))
    parts = pack(kernels, tmp_path / "out.json")
    assert len(parts) > 3 and all(part.stat().st_size <= 1000 for part in parts)
    (tmp_path / "again").mkdir()
    unpack(parts, tmp_path / "again")
    assert (tmp_path / "again/a/kernel.so").read_bytes() == (kernels / "a/kernel.so").read_bytes()


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(ROOT / "scripts/gpu_check.sh"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu(tmp_path):
    out = tmp_path / "result.json"
    stub = tmp_path / "bin/nvidia-smi"
    stub.parent.mkdir()
    line = 'date "+%Y/%m/%d %H:%M:%S.%3N, 1980, 2619, 650.5, 61"'
    stub.write_text(f"#!/bin/bash\nwhile sleep 0.05; do {line}; done\n")
    stub.chmod(0o755)
    order = ["ceilings", "numerics", "block", "goodput", "sampling", "step"]
    path = f"{stub.parent}:{os.environ['PATH']}"
    done = script("--tiny", "--groups", *order, "--minutes=60", f"--out={out}", PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ROOT}/" not in out.read_text()
    report = json.loads(out.read_text())
    assert report["passed"] and report["complete"]
    assert [stage["name"] for stage in report["stages"]] == order
    rows = {row["item"]: row for stage in report["stages"] for row in stage["rows"]}
    assert rows["debug products bf16"]["values"]["tflops"] > 0
    assert "need a GPU" in rows["debug products fp8"]["why"]
    block_of_own_norm = rows["debug block, compiled, own norm"]["values"]["kernels"]
    own = {"dit_tts::gated_norm", "dit_tts::gated_norm_backward"}
    assert own <= {name for name, *_ in block_of_own_norm}
    step = rows["debug step, as shipped"]["values"]
    assert step["ms_by_group"]["matmul"] > 0
    assert set(step["ms_of_ranges"]) >= {"forward", "noising", "speaker encoder", "optimizer"}
    assert step["clocks"]["watts"]["median"] == 650.5
    [part] = tmp_path.glob("result.json.cache.*")
    assert part.stat().st_size > 1000


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
    assert "--no-index --no-deps" in install and wanted == {w for w in install.split() if "==" in w}
    site = install.split("--target ")[1].split()[0]
    assert check.startswith(f"{ROOT}:{site}") and check.endswith("-m tools.gpu_check --tiny")
    assert not Path(site).exists()
