"""Prints a summary or a plan as aligned text, each figure with its origin."""

from dataclasses import asdict

from titan_tts.plan.activations import ActivationMemory
from titan_tts.plan.devices import Cluster
from titan_tts.plan.memory import CONTEXT_BYTES, FRAGMENTED_FRACTION
from titan_tts.plan.parameters import total
from titan_tts.plan.plan import Plan
from titan_tts.plan.planner import Step, Summary
from titan_tts.plan.states import UnshardedWeights
from titan_tts.plan.step_time import Collective, Factor, Interval, scaled
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.data.batch_ramp import batch_ramp
from torchtitan.models.dit_tts.infra.compile import blocks_compiled
from torchtitan.models.dit_tts.run.factors import checkpointing_name

_GIB = 2**30

MemoryLine = tuple[str, int, str]  # what, bytes, origin


def summary_lines(summary: Summary, activations: ActivationMemory, why_gpus: str) -> list[str]:
    """The report of `--dry-run`, with the activations of an eager micro-batch of the longest bucket."""
    config = summary.config
    lines = memory_lines(summary, activations, summary.longest.micro_batch, compiled=False)
    lines.append(("sum", sum(size for _, size, _ in lines), "longest bucket, an upper bound"))
    notes = [
        "not in the sum: the device's context, fragmentation, buffers of kernels and collectives",
        "shorter buckets have more samples and can need more; titan-tts plan lists each of them",
    ]
    if blocks_compiled(config):
        notes.append("[compile] enable = true keeps less; titan-tts plan computes how much")
    volumes = [f"{name:26} {size / _GIB:9.3f} GiB" for name, size in summary.volumes.items()]
    return [
        f"dry run of {config.job.config_file or 'the default config'}: flavor {config.model.flavor}",
        f"GPUs: {summary.layout.gpus} ({why_gpus})",
        _layout(summary),
        *_common(summary, "Memory of one GPU", lines, notes, volumes),
        *_section("All steps", _audio(summary)),
    ]


def plan_lines(plan: Plan, data_hours: float) -> list[str]:
    """The report of `titan-tts plan`; data_hours: of the data that passes are counted over."""
    summary, config, peak = plan.summary, plan.summary.config, plan.peak_bucket
    mode = "compiled" if blocks_compiled(config) else "eager"
    title = "Memory of one GPU in the bucket that needs the most, "
    title += f"{peak.batches.lengths.frames} frames"
    largest = f"largest micro-batch with which all buckets fit: local_batch_size = {plan.largest}"
    packed = config.data.batching == "packed"
    batches = "Packed rows, as samples of the mean length" if packed else "Buckets"
    collectives = list(map(_collective, plan.longest.communication))
    lines = [
        f"plan of {config.job.config_file}: flavor {config.model.flavor}",
        *_cluster(plan.cluster, plan.factor),
        f"{_layout(summary)}; {mode}, activation checkpointing '{_checkpointing(config)}'",
        *_common(summary, title, _memory(summary, peak), [largest], collectives),
        *_section("Time of that step", _time(plan)),
        *_section(f"{batches}, for lengths of [benchmark] mean_seconds and sigma", _buckets(plan)),
        *_section("The whole run, for these lengths", _whole_run(plan, data_hours)),
    ]
    if summary.states.offloaded:
        lines += ["", "the time is without the transfers of enable_cpu_offload and its optimizer"]
    return lines


def _common(
    summary: Summary,
    title: str,
    lines: list[MemoryLine],
    notes: list[str],
    communication: list[str],
) -> list[str]:
    """The sections of both reports."""
    width = max(len(what) for what, _, _ in lines)
    table = [f"{what:{width}}  {_bytes(size):>11}  {how}" for what, size, how in lines]
    if summary.states.offloaded:
        lasting = f"{_bytes(summary.states.lasting)} of weights, gradients, optimizer and EMA"
        why = "([training] enable_cpu_offload)"
        table.append(f"in the machine's memory for each GPU: {lasting} {why}")
    return [
        *_section("Parameters", _parameters(summary)),
        *_section(title, [*table, *notes]),
        *_section("Downloads", _downloads(summary)),
        *_section("One step in the longest bucket", _arithmetic(summary)),
        *_section("Communication of one rank in that step", communication or ["none"]),
    ]


def _section(title: str, rows: list[str]) -> list[str]:
    return ["", title, *(f"  {row}" for row in rows)]


def _layout(summary: Summary) -> str:
    layout = summary.layout
    degrees = f"replicas x shards = {layout.replicas} x {layout.shards}"
    if layout.tensor > 1:
        degrees += f", each of {layout.tensor} GPUs that share its samples"
    return f"layout: {layout.name}, {degrees}"


def _checkpointing(config: JobConfig) -> str:
    return checkpointing_name(asdict(config.activation_checkpoint))


def _cluster(cluster: Cluster, factor: Factor) -> list[str]:
    device = cluster.device
    return [
        f"GPUs: {cluster.nodes} x {cluster.gpus_per_node} {device.name} ({device.source}): "
        f"{device.peak_flops / 1e12:.0f} dense bf16 TFLOP/s, {device.memory_gib:g} GiB, "
        f"{device.bandwidth / 1e9:.0f} GB/s; links {device.link / 1e9:.0f} GB/s in a node, "
        f"{cluster.inter_node / 1e9:.0f} GB/s between nodes",
        f"factor over the roofline: {factor.value:.2f}, {factor.origin}",
    ]


def _parameters(summary: Summary) -> list[str]:
    parts = summary.parts
    rows = [(p.name, p.parameters, p.note or ("trained" if p.trained else "")) for p in parts]
    rows.append(
        ("trained", total(parts, trained=True), "optimizer, EMA and checkpoints have these")
    )
    rows.append(("frozen", total(parts, trained=False), ""))
    width = max(len(name) for name, _, _ in rows)
    table = [f"{name:{width}}  {number:>15,}  {note}".rstrip() for name, number, note in rows]
    return [*table, *(f"not known yet: {sentence}" for sentence in summary.unknown)]


def memory_lines(
    summary: Summary, activations: ActivationMemory, samples: int, *, compiled: bool
) -> list[MemoryLine]:
    """What one GPU holds at its peak; all lines are counted in its total."""
    config, states = summary.config, summary.states
    dtype, sharded = config.training.dtype, summary.layout.sharded
    lines: list[MemoryLine] = []
    if not states.offloaded:
        moments = config.optimizer.state_dtype.replace("float32", dtype)
        how = f"{dtype}, " + ("shards, padded as FSDP2 pads" if sharded else "complete")
        lines += [
            ("weights", states.weights, how),
            ("gradients", states.gradients, f"{dtype}, like the weights"),
            ("optimizer", states.optimizer, f"{config.optimizer.name}, moments in {moments}"),
        ]
        if states.ema:
            lines.append(("EMA", states.ema, "float32, like the weights"))
    if states.encoder:
        kind = "a shard" if states.encoder_units else "complete"
        how = f"{config.encoder.dtype}, {kind} ([encoder] fsdp_min_gib)"
        lines.append(("frozen text encoder", states.encoder, how))
        if states.encoder_units:
            lines.append(_gathered("gathered of the text encoder", states.encoder_gathered))
    if states.teacher:
        lines.append(("teacher", states.teacher, f"{dtype}, frozen, sharded like the weights"))
    if sharded:
        lines.append(_gathered("gathered weights", states.gathered))
        how = "largest unit, complete, and the input of its reduce-scatter"
        lines.append(("gradients in flight", states.unsharded_gradients, how))
    elif states.gathered.total:
        how = "replicate computes on it"
        lines.append(("second copy of weights", states.gathered.total, how))
    how = f"{samples} samples, {'compiled' if compiled else 'eager'}, activation checkpointing "
    how += f"'{_checkpointing(config)}', on fake tensors"
    return [
        *lines,
        ("micro-batch", activations.batch, "latents, noise, target, speaker, text"),
        ("saved activations", activations.saved, how),
        ("working memory", activations.working, "maximum of the backward pass above that"),
    ]


def _gathered(what: str, gathered: UnshardedWeights) -> MemoryLine:
    how = f"{_bytes(gathered.kept)} that stay gathered; others in use and fetched ahead"
    return what, gathered.total, how


def _memory(summary: Summary, step: Step) -> list[MemoryLine]:
    need, compiled = step.memory, blocks_compiled(summary.config)
    context = f"less {_bytes(CONTEXT_BYTES)} of context"
    return [
        *memory_lines(summary, need.activations, step.batches.micro_batch, compiled=compiled),
        ("sum", need.total, "fits" if need.fits else "DOES NOT FIT"),
        ("capacity", need.capacity, f"{context} and {FRAGMENTED_FRACTION:.0%} fragmented, guesses"),
    ]


def _downloads(summary: Summary) -> list[str]:
    rows = []
    for item in summary.downloads:
        fetch = f"; fetch it with: {item.command}" if item.command else ""
        state = "on this machine" if item.here else f"MISSING{fetch}"
        rows.append(f"{item.name} ({item.purpose}): {state}")
    return rows or ["none"]


def _arithmetic(summary: Summary) -> list[str]:
    longest, samples = summary.longest, summary.samples
    lengths = longest.lengths
    seconds = lengths.frames / summary.config.data.frames_per_second
    rows = [
        f"{summary.layout.replicas * summary.layout.shards} ranks x {longest.micro_batch} samples x {longest.accumulation} "
        f"accumulation steps = {samples:,} samples",
        f"up to {lengths.frames} frames ({seconds:.2f} s), {lengths.text_tokens} text tokens and "
        f"{lengths.speaker_frames} reference frames each: {samples * lengths.frames:,} frames, "
        f"{samples * seconds / 3600:.2f} hours of audio",
        f"{summary.flops:,} training FLOPs, without recomputation",
    ]
    training = summary.config.training
    if training.batch_ramp:
        complete = batch_ramp(training).global_batches(training.steps)
        rows.append(f"with the batch ramp {training.steps:,} steps are {complete:,.1f} such steps")
    if summary.teacher_flops:
        rows.append(f"{summary.teacher_flops:,} FLOPs of the teacher ([distill] teacher_steps)")
    if summary.encoder_flops:
        rows.append(f"{summary.encoder_flops:,} FLOPs of the text encoder at the longest texts")
    return rows


def _audio(summary: Summary) -> list[str]:
    """What the run hears of its data, or else if every batch is of the longest bucket and without padding."""
    data, lengths = summary.config.data, summary.longest.lengths
    hours, most, source = summary.data_hours_per_step, "", " at the lengths of [data] path"
    if hours is None:
        hours = summary.samples * lengths.frames / data.frames_per_second / 3600
        most, source = "up to ", ""
    steps, warmup = summary.config.training.steps, summary.config.lr_scheduler.warmup_steps
    ramp = batch_ramp(summary.config.training)
    heard, heard_in_warmup = (hours * ramp.global_batches(each) for each in (steps, warmup))
    return [
        f"{steps:,} steps: {most}{heard:,.1f} hours of audio{source}, {heard_in_warmup:,.1f} of them in "
        f"the {warmup:,} of warm-up; titan-tts plan has the mean, GPU hours and cost"
    ]


def _collective(each: Collective) -> str:
    took = f"{each.volume / _GIB:9.3f} GiB  {each.seconds * 1e3:9.2f} ms"
    return f"{each.name:26} {took} during the {each.beside}"


def _time(plan: Plan) -> list[str]:
    step = plan.longest
    rows = [f"{name:22} {seconds * 1e3:10.2f} ms" for name, seconds in step.time.items()]
    return [
        *rows,
        f"{'step':22} {_range(scaled(step.seconds, 1e3), '.1f')} ms",
        f"{'MFU':22} {_range(step.mfu, '.1%')} of the bf16 peak, exact FLOPs",
        f"{'samples/s':22} {_range(step.samples_per_second, '.1f')}, all GPUs",
        f"ranges: the time divided and multiplied by {1 + plan.factor.error:.2f}",
    ]


def _buckets(plan: Plan) -> list[str]:
    title = "frames  text  speaker  micro-batch  largest that fits  fraction of steps  step ms  MFU"
    rows = [title]
    for step in plan.buckets:
        lengths, fits = step.batches.lengths, "" if step.memory.fits else "  DOES NOT FIT"
        rows.append(
            f"{lengths.frames:6} {lengths.text_tokens:5} {lengths.speaker_frames:8} "
            f"{step.batches.micro_batch:12} {step.largest:18} {step.fraction:18.1%} "
            f"{step.seconds.estimate * 1e3:8.1f} {step.mfu.estimate:5.1%}{fits}"
        )
    return [
        *rows,
        f"mean step {_range(scaled(plan.mean_seconds, 1e3), '.1f')} ms",
        f"mean MFU  {_range(plan.mean_mfu, '.1%')} of padded shapes",
    ]


def _whole_run(plan: Plan, data_hours: float) -> list[str]:
    config, gpus = plan.summary.config, plan.cluster.gpus
    hours = plan.global_batches * plan.hours_per_step
    warmup_hours = plan.warmup_batches * plan.hours_per_step
    time = f"{plan.gpu_hours.estimate / gpus:,.1f} hours on {gpus}"
    passes = f"{hours / data_hours:,.1f} passes over {data_hours:,g} hours"
    rows = {
        "audio per step": f"{plan.hours_per_step:,.3g} hours in the mean, without padding",
        "warm-up": f"{config.lr_scheduler.warmup_steps:,} steps, {warmup_hours:,.0f} hours of audio",
        "all": f"{config.training.steps:,} steps, {hours:,.0f} hours of audio: {passes}",
        "GPU hours": f"{_range(plan.gpu_hours, ',.1f')}, {time}; without validation and restarts",
    }
    if plan.cost is not None:
        rows["cost"] = _range(plan.cost, ",.2f")
    return [f"{name:15} {text}" for name, text in rows.items()]


def _range(interval: Interval, form: str) -> str:
    return f"{interval.estimate:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def _bytes(size: int) -> str:
    """GiB, and MiB below a tenth of one."""
    if size >= 0.1 * 2**30:
        return f"{size / 2**30:,.3f} GiB"
    return f"{size / 2**20:,.3f} MiB"
