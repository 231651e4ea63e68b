"""A forecast, a grid or a calibration as text and as JSON, each figure with where it comes from."""

import dataclasses
from typing import Any

import numpy as np

from torchtitan.models.dit_tts.config.job_config import CUDA_GRAPH_MODES
from torchtitan.models.dit_tts.plan.calibrate import Calibration
from torchtitan.models.dit_tts.plan.compiled_block import blocks_compiled
from torchtitan.models.dit_tts.plan.constants import CONSTANTS, Constants
from torchtitan.models.dit_tts.plan.devices import Cluster
from torchtitan.models.dit_tts.plan.forecast import BucketForecast, Forecast, StepForecast
from torchtitan.models.dit_tts.plan.grid import Choice, checkpointing_name
from torchtitan.models.dit_tts.plan.memory import CONTEXT_BYTES, FRAGMENTED_SHARE, MemoryNeed
from torchtitan.models.dit_tts.plan.step_time import Interval

_GIB = 2**30


def forecast_lines(plan: Forecast) -> list[str]:
    cluster, step = plan.cluster, plan.longest
    config = plan.config
    mode = "compiled" if blocks_compiled(config) else "eager"
    checkpointing = checkpointing_name(config.activation_checkpoint)
    lines = [
        f"plan of {config.job.config_file}: flavor {config.model.flavor}, {plan.parameters:,} trained "
        f"parameters",
        *_cluster_lines(cluster, plan.constants),
        f"layout: {plan.layout.name}, replicas x shards = {plan.layout.replicas} x {plan.layout.shards}; "
        f"{mode}, activation checkpointing '{checkpointing}'",
    ]
    sections = (
        ("FLOPs of a step, longest bucket (exact, without recomputation)", _flops(step)),
        (
            f"Memory of one GPU in the bucket that needs most, {plan.neediest.lengths.frames} frames",
            _memory(plan, mode),
        ),
        ("Communication of one rank in a step (counted; at full bandwidth)", _exchanges(step)),
        ("Step time, longest bucket (work measured on fake tensors over rates)", _time(plan)),
        (
            "Buckets (lengths estimated by [benchmark] mean_seconds and sigma)",
            _buckets(plan.buckets),
        ),
        ("Mix of the buckets (estimated)", _mix(plan)),
    )
    for title, rows in sections:
        lines += ["", title, *(f"  {row}" for row in rows)]
    if mode == "compiled" and config.compile.mode in CUDA_GRAPH_MODES:
        lines += [
            "",
            f"[compile] mode = '{config.compile.mode}' replays CUDA graphs: gaps between kernels will be "
            f"shorter than planned, and the graphs' own memory is left out",
        ]
    if plan.states.offloaded:
        lines += [
            "",
            "the time leaves out what enable_cpu_offload transfers and the CPU's optimizer",
        ]
    return lines


def _cluster_lines(cluster: Cluster, constants: Constants) -> list[str]:
    device = cluster.device
    return [
        f"GPUs: {cluster.nodes} x {cluster.gpus_per_node} {device.name}: "
        f"{device.peak_flops / 1e12:.0f} dense bf16 TFLOP/s, {device.memory_gib:g} GiB, "
        f"{device.bandwidth / 1e9:.0f} GB/s; {device.link / 1e9:.0f} GB/s to each other in a node, "
        f"{cluster.inter_node / 1e9:.0f} GB/s between nodes",
        f"  {device.source}",
        f"constants: {constants.origin}",
    ]


def _flops(step: StepForecast) -> list[str]:
    split = step.flops
    rows = [(f.name.replace("_", " "), getattr(split, f.name)) for f in dataclasses.fields(split)]
    rows.append(("together", split.total))
    return [f"{name:14} {number:>26,}  {number / split.total:6.1%}" for name, number in rows]


def _memory(plan: Forecast, mode: str) -> list[str]:
    need, step = plan.neediest.memory, plan.neediest
    acts = need.activations
    other = plan.other_mode
    other_name = "eager" if mode == "compiled" else "compiled"
    whatever = acts.saved - step.micro_batch * plan.a_sample
    how = (
        f"{step.micro_batch} samples, {mode}, measured on fake tensors: {plan.a_sample / _GIB:.3f} GiB a "
        f"sample and {whatever / _GIB:.3f} GiB whatever their number"
    )
    rows = [
        (
            "states",
            need.states,
            "weights, gradients, optimizer, EMA, frozen encoder, gathered: counted",
        ),
        ("micro-batch", acts.batch, "counted"),
        ("activations", acts.saved, how),
        ("working memory", acts.working, "most of the backward pass above that, measured"),
        ("together", need.total, "fits" if need.fits else "DOES NOT FIT"),
        (
            "room",
            need.capacity,
            f"less {CONTEXT_BYTES / _GIB:g} GiB of context and {FRAGMENTED_SHARE:.0%} fragmented, guesses",
        ),
        (f"if {other_name}", other.total, f"activations {other.activations.saved / _GIB:.2f} GiB"),
    ]
    lines = [f"{name:16} {size / _GIB:10.3f} GiB  {words}" for name, size, words in rows]
    return [
        *lines,
        f"largest micro-batch that fits: local_batch_size = {plan.largest}, for all buckets below and the "
        f"longest",
    ]


def _exchanges(step: StepForecast) -> list[str]:
    found = step.communication.collectives
    rows = [
        f"{each.name:24} {each.volume / _GIB:9.3f} GiB  {each.seconds * 1e3:9.2f} ms beside the "
        f"{each.beside}"
        for each in found
    ]
    if not rows:
        return ["none"]
    phases = {each.beside for each in found}
    computing = ", ".join(
        f"{name} {seconds * 1e3:.1f} ms"
        for name, seconds in step.time.computing.items()
        if name in phases
    )
    rows.append(
        f"{'hidden' if step.overlaps else 'NOT hidden'} by computation: {computing}, at the constants' share "
        f"of the links and their delay"
    )
    return rows


def _time(plan: Forecast) -> list[str]:
    step = plan.longest
    rows = [f"{name:22} {seconds * 1e3:10.2f} ms" for name, seconds in step.time.parts.items()]
    return [
        *rows,
        f"{'step':22} {_milliseconds(step.seconds)}",
        f"{'MFU':22} {_share(step.mfu)} of the bf16 peak, exact FLOPs",
        f"{'samples/s':22} {step.samples_per_second.middle:.1f} "
        f"({step.samples_per_second.low:.1f} to {step.samples_per_second.high:.1f}), all GPUs",
        "ranges are two standard deviations of what the constants leave open",
    ]


def _buckets(buckets: list[BucketForecast]) -> list[str]:
    rows = ["frames  text  speaker  micro-batch  largest that fits  share of steps  step ms  MFU"]
    for each in buckets:
        lengths, step = each.bucket.lengths, each.step
        fits = "" if step.memory.fits else "  DOES NOT FIT"
        rows.append(
            f"{lengths.frames:6} {lengths.text_tokens:5} {lengths.speaker_frames:8} {step.micro_batch:12} "
            f"{each.largest:18} {each.bucket.share:15.1%} {step.seconds.middle * 1e3:8.1f} "
            f"{step.mfu.middle:5.1%}{fits}"
        )
    return rows


def _mix(plan: Forecast) -> list[str]:
    return [
        f"step {_milliseconds(plan.mix_seconds)}",
        f"MFU  {_share(plan.mix_mfu)} of padded shapes",
    ]


def grid_lines(choices: list[Choice], cluster: Cluster, constants: Constants) -> list[str]:
    rows = [
        *_cluster_lines(cluster, constants),
        "",
        "samples/s and MFU are the longest bucket's, GiB those of the bucket that needs most; * is the "
        "config's own",
        "rank  layout         AC                 mode      micro x acc     samples/s (range)           "
        "MFU    GiB   fits",
    ]
    for rank, each in enumerate(choices, 1):
        mode = "compiled" if each.compiled else "eager"
        layout = f"{each.layout.name} {each.layout.replicas} x {each.layout.shards}"
        number = "-" if each.refused else rank
        head = (
            f"{number:>4}{'*' if each.own else ' '} {layout:14} {each.checkpointing:18} {mode:8}  "
            f"{each.micro_batch:5} x {each.accumulation:<5}"
        )
        if each.refused:
            rows.append(f"{head}  refused: {each.refused}")
            continue
        if each.step is None:
            need, room = each.states / _GIB, each.capacity / _GIB
            rows.append(f"{head}  states alone {need:.1f} GiB of {room:.1f}: no")
            continue
        speed, step = each.step.samples_per_second, each.step
        rows.append(
            f"{head}  {speed.middle:9.1f} ({speed.low:.1f} to {speed.high:.1f})  "
            f"{step.mfu.middle:6.1%}  {each.most / _GIB:6.1f}  {'yes' if each.fits else 'no'}"
        )
    return rows


def calibration_lines(device: str, found: Calibration) -> list[str]:
    constants = found.constants
    deviations = np.sqrt(np.diag(constants.covariance))
    lines = [
        f"{device}: {constants.origin}",
        "constant              guess      fitted   +- 2 deviations",
    ]
    for constant, deviation in zip(CONSTANTS, deviations, strict=True):
        lines.append(
            f"{constant.name:20} {constant.guess:9.3g}  {constants[constant.name]:9.3g}  "
            f"x {np.exp(2 * deviation):.3f}"
        )
    lines.append(f"left open: {constants.unexplained:.1%} of a step's time (standard deviation)")
    for each in found.residuals:
        lines.append(
            f"{each.what}: measured {each.measured:.4f} s, predicted {each.predicted:.4f} s, "
            f"{each.relative:+.1%}"
        )
    for what, measured, predicted in found.memory:
        lines.append(
            f"{what}: peak memory measured {measured:.2f} GiB, predicted {predicted:.2f} GiB, "
            f"{measured / predicted - 1:+.1%}"
        )
    return lines


def _milliseconds(seconds: Interval) -> str:
    return f"{seconds.middle * 1e3:10.2f} ms ({seconds.low * 1e3:.1f} to {seconds.high * 1e3:.1f})"


def _share(mfu: Interval) -> str:
    return f"{mfu.middle:.1%} ({mfu.low:.1%} to {mfu.high:.1%})"


def as_json(value: Any) -> Any:
    """Dataclasses as dictionaries, with the properties that their users read."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        content = {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, MemoryNeed):
            content |= {"total": value.total, "fits": value.fits}
        if isinstance(value, Choice):
            content |= {"fits": value.fits}
        return content
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value
