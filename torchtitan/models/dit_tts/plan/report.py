"""A plan as aligned plain text."""

from dataclasses import dataclass

from torchtitan.models.dit_tts.config.job_config import Optimizer
from torchtitan.models.dit_tts.plan.compiled_block import blocks_compiled
from torchtitan.models.dit_tts.plan.parameters import frozen_total, trained_total
from torchtitan.models.dit_tts.plan.plan import Plan
from torchtitan.models.dit_tts.plan.states import Gathered, StateMemory


@dataclass(frozen=True)
class MemoryLine:
    """A row of the memory table."""

    what: str
    size: int
    """bytes"""

    how: str
    """where the figure comes from"""


def report(plan: Plan, why_gpus: str) -> list[str]:
    """Lines of the whole report; why_gpus says where the number of GPUs comes from."""
    job, layout = plan.config.job, plan.layout
    lines = [
        f"dry run of {job.config_file or 'the default config'}: flavor {plan.config.model.flavor}",
        f"GPUs: {layout.gpus} ({why_gpus})",
        f"layout: {layout.name}, replicas x shards = {layout.replicas} x {layout.shards}",
    ]
    sections = (
        ("Parameters", _parameters(plan)),
        ("Memory of one GPU", _memory(plan)),
        ("Downloads", _downloads(plan)),
        ("One step in the longest bucket", _step(plan)),
    )
    for title, rows in sections:
        lines += ["", title, *(f"  {row}" for row in rows)]
    return lines


def _parameters(plan: Plan) -> list[str]:
    rows = [(p.name, p.parameters, p.note or ("trained" if p.trained else "")) for p in plan.parts]
    rows.append(("trained", trained_total(plan.parts), "optimizer, EMA and checkpoints have these"))
    rows.append(("frozen", frozen_total(plan.parts), ""))
    width = max(len(name) for name, _, _ in rows)
    table = [f"{name:{width}}  {number:>15,}  {note}".rstrip() for name, number, note in rows]
    return [*table, *(f"not known yet: {sentence}" for sentence in plan.sizes.unknown)]


def memory_lines(plan: Plan) -> list[MemoryLine]:
    """What one GPU holds when it holds most, each with its origin."""
    states, acts, training = plan.states, plan.activations, plan.config.training
    lines = _state_lines(plan, states)
    if states.encoder:
        kind = "shard" if states.encoder_sharded else "whole"
        lines.append(
            MemoryLine(
                "frozen text encoder",
                states.encoder,
                f"{plan.config.encoder.dtype}, {kind} ([encoder] fsdp_min_gib = "
                f"{plan.config.encoder.fsdp_min_gib:g})",
            )
        )
        if states.encoder_sharded:
            lines.append(_gathered_line("gathered of the text encoder", states.encoder_gathered))
    if plan.layout.sharded:
        lines.append(_gathered_line("gathered weights", states.gathered))
        lines.append(
            MemoryLine(
                "gradients on their way",
                states.gradients_in_turn,
                f"largest unit, whole: {training.mixed_precision_param}, and the input of its "
                f"reduce-scatter in {training.mixed_precision_reduce}",
            )
        )
    elif states.gathered.total:
        lines.append(
            MemoryLine("second copy of weights", states.gathered.total, "replicate computes on it")
        )
    step, mode = plan.step, plan.config.activation_checkpoint.mode
    lines += [
        MemoryLine("micro-batch", acts.batch, "latents, noise, target, speaker, text"),
        MemoryLine(
            "saved activations",
            acts.saved,
            f"{step.micro_batch} samples, measured on fake tensors, eager, activation checkpointing "
            f"'{mode}'",
        ),
        MemoryLine(
            "working memory", acts.working, "most of the backward pass above that, measured"
        ),
    ]
    return lines


def _state_lines(plan: Plan, states: StateMemory) -> list[MemoryLine]:
    if states.offloaded:
        return []
    dtype = plan.config.training.dtype
    how = f"{dtype}, " + ("shards, padded as FSDP2 pads" if plan.layout.sharded else "whole")
    lines = [
        MemoryLine("weights", states.weights, how),
        MemoryLine("gradients", states.gradients, f"{dtype}, like the weights"),
        MemoryLine("optimizer", states.optimizer, _moments(plan.config.optimizer, dtype)),
    ]
    if states.ema:
        lines.append(MemoryLine("EMA", states.ema, "float32, like the weights"))
    return lines


def _moments(options: Optimizer, dtype: str) -> str:
    """What an optimizer keeps of each parameter; float32 moments are in the weights' precision."""
    if options.name == "Muon":
        return f"Muon: one moment of the blocks' matrices, two of all else, {dtype}"
    if options.state_dtype == "8bit":
        return f"{options.name}: two moments in 8 bits, small parameters' in {dtype}"
    own = options.state_dtype
    return f"{options.name}: two moments, {dtype if own == 'float32' else own}"


def _gathered_line(what: str, gathered: Gathered) -> MemoryLine:
    return MemoryLine(
        what,
        gathered.total,
        f"{_bytes(gathered.kept)} that stay whole, and twice the largest other unit",
    )


def _memory(plan: Plan) -> list[str]:
    lines = memory_lines(plan)
    total = sum(line.size for line in lines)
    lines.append(
        MemoryLine("sum", total, "an upper bound for this bucket: not all are largest at once")
    )
    width = max(len(line.what) for line in lines)
    rows = [f"{line.what:{width}}  {_bytes(line.size):>11}  {line.how}" for line in lines]
    states = plan.states
    if states.offloaded:
        offloaded = states.weights + states.gradients + states.optimizer + states.ema
        rows.append(
            f"in the machine's memory for each GPU: {_bytes(offloaded)} of weights, gradients, "
            f"optimizer and EMA ([training] enable_cpu_offload)"
        )
    rows.append(
        "not in the sum: the device's context, the allocator's unused parts, workspaces of kernels,"
    )
    rows.append("buffers of collectives, a frozen text encoder's own activations")
    rows.append(
        "shorter buckets have more samples and can need more: titan-tts plan has a line for each"
    )
    if blocks_compiled(plan.config):
        rows.append(
            "[compile] enable = true keeps fewer activations; titan-tts plan computes how many fewer"
        )
    if plan.config.activation_checkpoint.mode == "memory_budget":
        rows.append(
            "activation checkpointing 'memory_budget' is the compiler's: counted as 'none' here, and as it "
            "is by titan-tts plan"
        )
    return rows


def _downloads(plan: Plan) -> list[str]:
    rows = []
    for item in plan.downloads:
        rows += [
            f"{item.name} ({item.purpose}): {'on this machine' if item.here else 'MISSING'}",
            f"  files  {item.files}",
            f"  size   {item.size}",
        ]
        if not item.here and item.command:
            rows.append(f"  fetch  {item.command}")
    if any(not item.here and item.command for item in plan.downloads):
        rows.append(
            "For a machine without network: fetch on one that has it, then copy the cache folder "
            "(~/.cache/huggingface/hub, or what HF_HOME says)."
        )
    return rows or ["none"]


def _step(plan: Plan) -> list[str]:
    step = plan.step
    lengths = step.lengths
    rows = [
        f"{step.ranks} ranks x {step.micro_batch} samples x {step.accumulation} accumulation steps = "
        f"{step.samples:,} samples",
        f"at most {lengths.frames} frames ({step.seconds:.2f} s), {lengths.text_tokens} text tokens and "
        f"{lengths.speaker_frames} reference frames each: {step.frames:,} frames, "
        f"{step.samples * step.seconds / 3600:.2f} hours of audio",
        f"{step.flops:,} training FLOPs, without recomputation: "
        f"{step.flops / step.ranks / 1e12:,.4g} TFLOP a GPU",
    ]
    if step.encoder_flops:
        rows.append(f"{step.encoder_flops:,} FLOPs of the text encoder at most")
    return rows


def _bytes(size: int) -> str:
    """GiB, and MiB below a tenth of one."""
    if size >= 0.1 * 2**30:
        return f"{size / 2**30:,.3f} GiB"
    return f"{size / 2**20:,.3f} MiB"
