"""A forecast as aligned text."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
from torchtitan.tools import utils

from titan_tts.plan import measured
from titan_tts.plan.devices import ACCELERATOR, Cluster, check_device, device_of, find_device
from titan_tts.plan.forecast import Planner, Settings, compare_layouts
from titan_tts.plan.parameters import Model
from titan_tts.plan.step import WAITS, Step
from titan_tts.report.words import aligned
from torchtitan.models.dit_tts.config.checks import validate_config
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import load_config, parse_config, resolve
from torchtitan.models.dit_tts.errors import quiet_known_warnings
from torchtitan.models.dit_tts.infra.compile import blocks_compiled
from torchtitan.models.dit_tts.model_config import model_flavors
from torchtitan.models.dit_tts.run.factors import checkpointing_name
from torchtitan.models.dit_tts.run.teacher import with_teacher

_GIB = 2**30


def print_plan(path: Path, options: Any) -> None:
    """Prints the forecast of a config's file by the Options of `plan_command`, with other layouts of several GPUs."""
    quiet_known_warnings()
    device = find_device(options.gpu)
    given = parse_config([f"--job.config_file={path}", *options.config_args])
    config = with_teacher(resolve(given))
    in_node = options.gpus_per_node or device.gpus_per_node
    cluster = Cluster.of(device, options.gpus or in_node, in_node, options.inter_node_gbps)
    validate_config(config, cluster.gpus, list(model_flavors()), ACCELERATOR)
    check_device(config, device)
    planner = Planner(config, cluster)
    lines = _report_lines("plan", planner)
    if cluster.gpus > 1 and config.training.global_batch_size > 0:
        lines += _layout_lines(compare_layouts(planner, config))
    print("\n".join(lines))


def print_dry_run(config_args: list[str], gpus: int) -> None:
    """Prints the forecast of a training command, on this machine's GPUs or on those that were measured; `gpus`: 1 for
    as many as its degrees make."""
    quiet_known_warnings()
    config = with_teacher(load_config(config_args))
    title = "dry run (GPUs: --nproc times --nodes)"
    if gpus == 1:
        degrees = config.parallelism
        gpus = max(1, degrees.data_parallel_replicate_degree)
        gpus *= max(1, degrees.data_parallel_shard_degree) * max(1, degrees.tensor_parallel_degree)
        title = "dry run (GPUs: the degrees in [parallelism] that are set; --nproc N for others)"
    device = device_of(utils.device_module.get_device_name()) or find_device(measured.DEVICE)
    in_node = device.gpus_per_node if gpus % device.gpus_per_node == 0 else gpus
    validate_config(config, gpus, list(model_flavors()))
    planner = Planner(config, Cluster.of(device, gpus, in_node))
    print("\n".join(_report_lines(title, planner)))


def _report_lines(title: str, planner: Planner) -> list[str]:
    """The report of `titan-tts plan` and of a dry run."""
    config, model = planner.config, planner.model
    step, peak = planner.step(planner.longest()), planner.peak
    mode = "compiled" if blocks_compiled(config) else "eager"
    kind = checkpointing_name(asdict(config.activation_checkpoint))
    shape = f"replicas x shards = {step.layout.replicas} x {step.layout.shards}"
    return [
        f"{title} of {config.job.config_file or 'the default config'}: flavor {config.model.flavor}",
        _cluster(step.cluster),
        f"layout: {step.layout.name}, {shape}; {mode}, activation checkpointing '{kind}'",
        *_section("Parameters", _parameters(model, config.encoder.model)),
        *_section(
            f"Memory of one GPU, {_shape(peak)} (the bucket that needs the most)", _memory(peak)
        ),
        f"  largest micro-batch with which all buckets fit: local_batch_size = {planner.largest_of_all}",
        *_section(f"One step of the longest bucket, {_shape(step)}", _step(config, step)),
        *_section("The whole run, for lengths of [benchmark]", _run(planner)),
    ]


def _layout_lines(choices: list[tuple[Step, Settings]]) -> list[str]:
    """A table of layouts, each in its fastest way that fits, and the keys of the best. "kept": complete weights and
    gradients through a step; "sequence": sequence parallelism."""
    if not choices:
        return _section("Layouts: none fits these GPUs", [])
    names = "layout,ways,checkpointing,micro-batch x steps,MFU,step ms,exposed ms,GiB"
    rows = [
        [
            f"{step.layout.name} {step.layout.replicas} x {step.layout.shards}",
            _ways(settings),
            " ".join(map(str, settings["activation_checkpoint"].values())),
            f"{step.batches.micro_batch} x {step.batches.accumulation}",
            f"{step.mfu(step.seconds):.1%}",
            f"{1e3 * step.seconds:,.0f}",
            f"{1e3 * step.time['exposed communication']:,.1f}",
            f"{step.bytes / _GIB:.1f}",
        ]
        for step, settings in choices
    ]
    lines = aligned([names.split(","), *rows])
    lines[1] += "  best"
    return [*_section("Layouts that fit", lines), "", *tomli_w.dumps(choices[0][1]).splitlines()]


def _ways(settings: Settings) -> str:
    words = ["sequence"] if settings["megatron"]["sequence_parallel"] else []
    words += ["kept"] if settings["parallelism"]["fsdp_reshard_after_forward"] == "never" else []
    return " ".join(words) or "-"


def _section(title: str, rows: list[str]) -> list[str]:
    return ["", title, *(f"  {row}" for row in rows)]


def _shape(step: Step) -> str:
    return f"{step.batches.micro_batch} samples of {step.batches.lengths.frames} frames"


def _cluster(cluster: Cluster) -> str:
    device = cluster.device
    return (
        f"GPUs: {cluster.gpus} ({cluster.nodes} x {cluster.gpus_per_node} {device.name}): {device.peak_flops / 1e12:.0f} dense "
        f"bf16 TFLOP/s, {device.memory_gib:g} GiB, {device.bandwidth / 1e9:.0f} GB/s; links {device.link / 1e9:.0f} "
        f"GB/s in a node, {cluster.inter_node / 1e9:.0f} GB/s between nodes"
    )


def _parameters(model: Model, encoder: str) -> list[str]:
    rows = [[name, f"{count:,}"] for name, count in model.parts().items()]
    if model.encoder_parameters:
        rows.append([f"text encoder {encoder}", f"{model.encoder_parameters:,}"])
    rows += [["trained", f"{model.trained:,}"], ["frozen", f"{model.frozen:,}"]]
    unknown = f"not counted, because they depend on the data: {model.unknown}"
    return [*aligned(rows), *([unknown] if model.unknown else [])]


def _memory(step: Step) -> list[str]:
    room = step.cluster.device.capacity
    rows = [[name, f"{size / _GIB:,.3f} GiB"] for name, size in step.memory.items()]
    rows += [["sum", f"{step.bytes / _GIB:,.3f} GiB"], ["capacity", f"{room / _GIB:,.3f} GiB"]]
    *lines, total, last = aligned(rows)
    found = [*lines, f"{total}  {'fits' if step.fits else 'DOES NOT FIT'}", last]
    if step.offloaded:
        found.append(f"in the machine's memory for each GPU: {step.offloaded / _GIB:,.3f} GiB")
    return found


def _step(config: JobConfig, step: Step) -> list[str]:
    layout, batches, lengths = step.layout, step.batches, step.batches.lengths
    hours = step.samples * lengths.frames / config.data.frames_per_second / 3600
    found = [
        f"{layout.ranks} ranks x {batches.micro_batch} samples x {batches.accumulation} accumulation steps = "
        f"{step.samples:,} samples, {hours:,.2f} hours of audio",
        f"{step.flops:,} training FLOPs, without recomputation",
    ]
    for each in step.transfers:
        found.append(f"{each.name}: {each.volume / _GIB:,.3f} GiB, {1e3 * each.seconds:,.1f} ms")
    if config.training.mixed_precision_param != "bfloat16":
        return [*found, "no time: only bfloat16 was measured"]
    rows = [[name, f"{1e3 * seconds:,.2f} ms"] for name, seconds in step.time.items()]
    rows.append(["step", f"{1e3 * step.seconds:,.1f} ms"])
    rows.append(["MFU", f"{step.mfu(step.seconds):.1%}"])
    rows.append(["MFU without waits", f"{step.mfu(step.seconds - step.time[WAITS]):.1%}"])
    rows.append(["samples/s", f"{step.samples / step.seconds:,.1f}"])
    origin = f"measured on an {measured.DEVICE}, {measured.DATE}"
    if step.cluster.device.name != measured.DEVICE:
        origin += f", and scaled to the {step.cluster.device.name} by its peak FLOP/s and bandwidth"
    return [*found, *aligned(rows), f"MFU: exact FLOPs over the bf16 peak; rates were {origin}"]


def _run(planner: Planner) -> list[str]:
    training, gpus = planner.config.training, planner.cluster.gpus
    hours, warmup = planner.hours_per_step, planner.config.lr_scheduler.warmup_steps
    found = [
        f"{training.steps:,} steps, {training.steps * hours:,.1f} hours of audio ({hours:,.3g} per step, "
        f"{warmup * hours:,.1f} in {warmup:,} steps of warm-up)"
    ]
    if training.mixed_precision_param != "bfloat16":
        return found
    wall_hours = training.steps * planner.seconds / 3600
    return [
        *found,
        f"mean step {1e3 * planner.seconds:,.1f} ms, MFU {planner.mfu:.1%} of padded shapes",
        f"{wall_hours * gpus:,.1f} GPU hours, {wall_hours / 24:,.2f} days on {gpus}; without validation and restarts",
    ]
