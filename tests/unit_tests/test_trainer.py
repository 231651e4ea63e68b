"""The step of the trainer: what it computes, that the host does not wait for the device, and that replicas exchange
gradients once a step."""

import copy
import json
import math
from contextlib import ExitStack
from itertools import count, islice
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.train import Trainer

from tests.helpers.calls import Calls
from tests.helpers.fake_ranks import fake_process_group
from tests.helpers.packed_batches import packed_batch
from tests.helpers.small_models import one_rank
from tests.helpers.steps import ARGS, MICRO_BATCHES, loaded, problem, step_data, trainer_on
from titan_tts.plan.step import Layout
from torchtitan.models.dit_tts import metrics
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.forward_pass import measure
from torchtitan.models.dit_tts.infra import optimizer
from torchtitan.models.dit_tts.infra.compile import compiled_graphs
from torchtitan.models.dit_tts.infra.divergence import StepStats
from torchtitan.models.dit_tts.infra.ema import EMA
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.run.run_folder import RunFolder
from torchtitan.models.dit_tts.trainer import DiTTTSTrainer

NEVER = "--parallelism.fsdp_reshard_after_forward=never"


class NoWaiting(TorchDispatchMode):
    """Raises where a tensor goes from the CPU to the device and the host would wait for it. The other
    way, and reading a value, fails by itself: the device "meta" has none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if func._schema.name == "aten::copy_" else args[0]
            waits = not (kwargs or {}).get("non_blocking") and not args[2:]
            assert not (waits and source.is_cpu and out.is_meta), f"the host waits: {func}"
        return out


LR, BETA1, BETA2, EPS, WEIGHT_DECAY, WARMUP, MAX_NORM = 0.01, 0.8, 0.95, 1e-4, 0.1, 4, 0.05
BY_HAND = [f"--optimizer.lr={LR}", f"--optimizer.beta1={BETA1}", f"--optimizer.beta2={BETA2}"]
BY_HAND += [f"--optimizer.eps={EPS}", f"--optimizer.weight_decay={WEIGHT_DECAY}", "--data.audit"]
BY_HAND += [f"--lr_scheduler.warmup_steps={WARMUP}", f"--training.max_norm={MAX_NORM}"]
BY_HAND += ["--metrics.log_freq=1", "--activation_checkpoint.mode=none"]


def loss_and_gradients(model: DiTTTSModel, step: int, on_padding: bool):
    """One mean over the frames of all micro-batches, and not a mean of means."""
    errors = []
    for batch, labels in step_data(step):
        mask = torch.ones_like(labels, dtype=torch.bool) if on_padding else labels != IGNORE_INDEX
        place = (batch[key] for key in ("global_batch", "row", "global_batch_size"))
        draw = problem(batch["latents"], *place)
        prediction = model(
            latents=draw.latents,
            t=draw.t,
            frame_mask=mask,
            text_ids=batch["text_ids"],
            text_mask=torch.arange(4) < batch["text_tokens"][:, None],
            text_positions=batch["text_positions"],
            speaker=batch["speaker"],
            speaker_mask=torch.arange(8) < batch["speaker_frames"][:, None],
            keep_text=draw.keep_text,
            keep_speaker=draw.keep_speaker,
        )
        errors.append((prediction.double() - draw.target.double()).square().mean(-1)[mask])
    loss = torch.cat(errors).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), [gradient.double() for gradient in gradients]


@register_backend
def replays(module, inputs):
    """A backend of torch.compile: the n-th call in a pass returns the memory that it has returned in the last pass, as a CUDA
    graph does."""

    def compiler(module, inputs):
        calls, own = count(), {}

        def run(*given):
            outputs, place = module(*given), next(calls) % ARGS.n_layers
            if place not in own:
                own[place] = [None if each is None else each.clone() for each in outputs]
            for mine, each in zip(own[place], outputs, strict=True):
                if each is not None:
                    mine.copy_(each)
            return [None if mine is None else mine.detach() for mine in own[place]]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(module, inputs)


GRAPHS = ["--compile.enable", "--compile.components=model", "--compile.backend=replays"]
GRAPHS += ["--compile.mode=reduce-overhead"]
ON_PADDING = ["--objective.loss_on_padding", "--data.num_buckets=1"]


@pytest.mark.long
@pytest.mark.parametrize("given", [[], ON_PADDING, GRAPHS], ids=["", "on padding", "graphs"])
def test_two_steps_by_hand(tmp_path, one_process_group, given):
    """The mean loss, clipping, AdamW, the schedule and the moving average; AdamW's first step does
    not depend on its betas."""
    on_padding = given == ON_PADDING
    trainer = trainer_on("cpu", one_rank(), *BY_HAND, *given)
    [model] = trainer.model_parts
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    trainer.ema = EMA(model, [0.999])
    trainer.forward_pass.add_noise = problem
    trainer.run_folder = RunFolder(tmp_path, 0)
    logged = []
    trainer.metrics_processor.metrics_file = SimpleNamespace(append=logged.append)
    trainer.metrics_processor.compiles = -1

    reference = copy.deepcopy(model)
    parameters = dict(reference.named_parameters())
    weights = [parameter.detach().double() for parameter in parameters.values()]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for step in (1, 2):
        trainer.step = step
        trainer.train_step(trainer.batch_generator(step_data(step)))

        loss, gradients = loss_and_gradients(reference, step, on_padding)
        norm = sum(gradient.square().sum() for gradient in gradients).sqrt().item()
        assert norm > 2 * MAX_NORM
        lr = LR * step / WARMUP
        before = weights
        weights = []
        for i, (name, gradient) in enumerate(zip(parameters, gradients)):
            gradient = gradient * MAX_NORM / norm
            first[i] = BETA1 * first[i] + (1 - BETA1) * gradient
            second[i] = BETA2 * second[i] + (1 - BETA2) * gradient**2
            update = first[i] / (1 - BETA1**step) / ((second[i] / (1 - BETA2**step)).sqrt() + EPS)
            plain = name.endswith((".bias", "norm.weight", "embedding.weight"))
            decay = 0.0 if plain else WEIGHT_DECAY
            weights.append(before[i] * (1 - lr * decay) - lr * update)
        # The average has the first weights and then a tenth of its own: min(0.999, n / (9 + n)).
        average = weights if step == 1 else [0.1 * b + 0.9 * w for b, w in zip(before, weights)]

        row = logged[-1]
        assert row["loss"] == pytest.approx(loss, rel=1e-5) and row["compiles"] == compiled_graphs()
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert row["lr"] == pytest.approx(lr)
        moved = max((new - old).abs().max().item() for new, old in zip(weights, before))
        assert moved > 0.5 * lr
        found = dict(model.named_parameters())
        for name, value, mean in zip(parameters, weights, average):
            assert (found[name].detach() - value).abs().max() < 5e-6, name
            assert (trainer.ema.averages[0.999][name] - mean).abs().max() < 5e-6, name
        with torch.no_grad():
            for parameter, value in zip(parameters.values(), weights):
                parameter.copy_(value)
    ids = [f"{number}-{row}" for number in range(MICRO_BATCHES) for row in range(2)]
    audited = trainer.run_folder.audit.read()
    assert audited == [{"step": n, "ids": [f"{n}-{each}" for each in ids]} for n in (1, 2)]
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["state"], state["step"]) == ("running", 2)


def test_the_measures_of_a_packed_batch():
    """The figures of its samples, or none where all were corrupt; two of the six slots are empty."""
    [(batch, _), *_] = loaded(rows=4)
    packed = packed_batch(batch, 6, 64)
    found = measure(packed, None)
    assert found.shape == (1, 64, 64, 64) and found.packed_slots == 6
    assert [each[0] for each in found.lengths] == batch["frames"].tolist()
    names = ("frames", "text_tokens", "speaker_frames")
    nothing = {name: torch.zeros(6, dtype=int) for name in names}
    assert measure(packed | nothing, None).lengths == [(0, 0, 0)]


@pytest.mark.long
@pytest.mark.parametrize("logged", [False, True])
def test_no_step_waits_for_the_device(monkeypatch, one_process_group, logged):
    monkeypatch.setattr(metrics, "device_type", "meta")
    clip = dist_utils.clip_grad_norm_
    monkeypatch.setattr(  # the device "meta" has no foreach for it
        dist_utils, "clip_grad_norm_", lambda parameters, norm, foreach: clip(parameters, norm)
    )
    monkeypatch.setattr(optimizer, "get_total_norm", lambda g, foreach: get_total_norm(g))
    trainer = trainer_on("meta", one_rank())
    # It has no fused optimizer either, which reads the flag by itself.
    trainer.optimizers.step_unless = lambda *_: trainer.optimizers.step()
    trainer.metrics_processor.should_log = lambda step: logged
    trainer.run_folder = SimpleNamespace(set_state=lambda state, step: None)
    with NoWaiting():
        trainer.train_step(trainer.batch_generator(loaded()))
        log = trainer.metrics_processor.log
        trainer.metrics_processor.log = lambda stats: None if logged else log(stats)
        assert not trainer._settle(StepStats(2, 1, 1.0, 1.0, math.inf, math.inf, bad=False))
        with pytest.raises(AssertionError, match="the host waits"):  # in upstream's step
            Trainer.train_step(trainer, Trainer.batch_generator(trainer, loaded()))
    assert trainer.ema.num_updates == 1 and trainer.lr_schedulers.schedulers[0].last_epoch == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "layout, keys",
    [(Layout(2, 1), []), (Layout(2, 2), []), (Layout(1, 2), [NEVER])],
    ids=("ddp", "hsdp", "fsdp, whole weights stay"),
)
def test_no_step_on_ranks_reads_a_value(layout, keys):
    """A fake tensor has no value to read. Replicas reduce gradients in the last pass of a step; where whole weights
    stay, they are gathered in the first one, and gradients are reduced in the last."""
    with ExitStack() as modes:
        dims = modes.enter_context(fake_process_group(layout))
        trainer = trainer_on("cpu", dims, "--optimizer.implementation=fused", *keys)
        batches = list(islice(trainer.batch_generator(loaded()), MICRO_BATCHES))
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        counted = modes.enter_context(Calls())
        passes = []
        step = trainer.forward_backward_step

        def watched(**arguments):
            before = counted.of.copy()
            loss = step(**arguments)
            passes.append(counted.of - before)
            return loss

        trainer.forward_backward_step = watched
        trainer.train_step(iter(batches))
    units = 2 + ARGS.n_layers + (layout.shards > 1) + 1
    reduced = [0, 0, units if layout.replicas > 1 else 0]
    assert [each["c10d::allreduce_"] for each in passes] == reduced
    scattered = units if layout.shards > 1 else 0
    each_pass = [0, 0, scattered] if keys else [scattered] * MICRO_BATCHES
    assert [each["c10d::_reduce_scatter_base_"] for each in passes] == each_pass
    # The backward pass gathers again all but the root, the last block and the head.
    again = 2 * units - 3 if layout.shards > 1 else 0
    gathers = [each["c10d::_allgather_base_"] for each in passes]
    assert gathers == ([units, 0, 0] if keys else [again] * MICRO_BATCHES)


@pytest.mark.parametrize("shards, computed", [(1, torch.bfloat16), (2, torch.float32)])
def test_tensor_parallelism_alone_computes_in_the_chosen_dtype(
    monkeypatch, tmp_path, shards, computed
):
    """FSDP gathers weights in that dtype by itself; where nothing does, autocast must."""
    dims = one_rank(dp_shard=shards, tp=2, world_size=2 * shards)
    monkeypatch.setenv("WORLD_SIZE", str(2 * shards))

    def upstream(trainer, view):
        trainer.device, trainer.parallel_dims = torch.device("cpu"), dims
        trainer.dataloader = SimpleNamespace(features=None)
        param = view.training.mixed_precision_param
        trainer.maybe_enable_amp = dist_utils.maybe_enable_amp(dims, param, "cpu")

    def first_use(trainer, text_encoder):
        with trainer.maybe_enable_amp:
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == computed
        raise InterruptedError

    monkeypatch.setattr(Trainer, "__init__", upstream)
    monkeypatch.setattr(DiTTTSTrainer, "build_forward_pass", first_use)
    tensor = ["--parallelism.tensor_parallel_degree=2", "--parallelism.backend=megatron"]
    with pytest.raises(InterruptedError):
        DiTTTSTrainer(load_config(tensor), RunFolder(tmp_path / "run", 0), SimpleNamespace())
