"""The teacher of a distillation: what a student has of it, and its frozen network, which is in no checkpoint."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model import ModelProtocol
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.utils import set_default_dtype

from torchtitan.models.dit_tts.config.exported import (
    CONFIG,
    WEIGHTS,
    is_exported,
    kept,
    read_exported,
)
from torchtitan.models.dit_tts.config.job_config import (
    CUDA_GRAPH_MODES,
    DURATION_FLAVOR,
    JobConfig,
    Lora,
    Sampling,
)
from torchtitan.models.dit_tts.config.manager import load_run_config
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling
from torchtitan.models.dit_tts.config.trust import refuse_function_as_codec
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.files import local_path
from torchtitan.models.dit_tts.flow.distillation import Distillation
from torchtitan.models.dit_tts.flow.guidance import branches_of
from torchtitan.models.dit_tts.flow.solvers import schedule_times
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.run.checkpoint_storage import (
    load_checkpoint,
    verify_together,
)
from torchtitan.models.dit_tts.run.manifest import read_manifest
from torchtitan.models.dit_tts.speech.codec.record import check_same_codec
from torchtitan.models.dit_tts.text.build_tokenizer import load_vocabulary
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder
from torchtitan.models.dit_tts.text.vocabulary import Vocabulary

_SINGLE = ("truncation_factor", "rescale_k", "speaker_kv_scale")
"""Keys of [sampling] that must have their defaults: what they do is not learned"""


def with_teacher(config: JobConfig) -> JobConfig:
    """A copy of a student's resolved config with all that follows from its teacher; without a teacher the config
    itself. Raises InputError where they do not fit."""
    if not config.distill.teacher:
        return config
    config = copy.deepcopy(config)
    folder = Path(local_path(config.distill.teacher))
    about = f"[distill] teacher = {str(folder)!r}"
    require(
        is_exported(folder),
        f"{about} is not an exported folder; write one from a trained run: titan-tts export outputs/NAME FOLDER",
    )
    teacher, files = load_run_config(folder), read_manifest(folder)["files"]
    mode = config.compile.mode if config.compile.enable else ""
    require(
        mode not in CUDA_GRAPH_MODES and not config.benchmark.enable,
        f"{about} does not go with [compile] mode = {CUDA_GRAPH_MODES[0]!r} or {CUDA_GRAPH_MODES[1]!r}, nor with "
        f"[benchmark] enable = true; leave them out",
    )
    require(
        teacher.model.flavor != DURATION_FLAVOR,
        f"{about} predicts lengths and generates no speech; give a model that does",
    )
    remedy = "give a teacher of the same codec as [data] path"
    check_same_codec(teacher.data.path, config.data.path, about, remedy)
    needed = {name: getattr(Sampling, name) for name in _SINGLE}
    own = teacher.sampling.guidance
    found = {"guidance": "independent" if own == "alternating" else own, **needed}
    _check(teacher, "objective", {"prediction": "velocity"}, f"{about}: its", "give another one")
    _check(teacher, "sampling", found, f"{about}: its", "change it in its run and export it again")
    scales = {f"{condition}_scale": 0.0 for condition in ("text", "speaker", "caption")}
    plain = {"solver": "euler", **scales, **needed}
    _check(config, "sampling", plain, "a student's", "change it")
    check_sampling(config.sampling)
    config.distill.teacher = str(folder)
    times = schedule_times(config.sampling)[:-1]
    passes = config.distill.teacher_steps * (1 + len(branches_of(teacher.sampling)))
    values = kept(teacher)
    del values["encoder"]["vocab_size"]  # follows from the data, and is compared by `build_teacher`
    taken: dict[str, dict[str, Any]] = {
        **{section: values[section] for section in ("model", "data", "encoder")},
        "distill": {
            "times": times,
            "passes": passes,
            "fingerprint": files[WEIGHTS]["xxh3"] + files[CONFIG]["xxh3"],
        },
        "checkpoint": {"initial_load_path": str(folder)},
        "objective": {
            "prediction": "velocity",
            "loss_on_padding": teacher.objective.loss_on_padding,
        },
        "sampling": {"start_t": teacher.sampling.start_t},
        "validation": {"times": times},
    }
    codec = read_exported(folder)["codec"]["name"] or teacher.sampling.codec
    if config.sampling.codec == Sampling.codec:
        refuse_function_as_codec(codec, str(folder), "--sampling.codec")
        config.sampling.codec = codec
    for section, keys in taken.items():
        for key, value in keys.items():
            default, now = (getattr(getattr(each, section), key) for each in (JobConfig(), config))
            require(
                now in (default, value),
                f"[{section}] {key} = {now!r}, but with {about} it is {value!r}; leave it out",
            )
            setattr(getattr(config, section), key, value)
    return config


def _check(
    config: JobConfig, section: str, needed: dict[str, Any], whose: str, remedy: str
) -> None:
    for key, value in needed.items():
        found = getattr(getattr(config, section), key)
        require(
            found == value,
            f"{whose} [{section}] {key} = {found!r}, but distillation needs {value!r}; {remedy}",
        )


def distillation(config: JobConfig) -> Distillation:
    """Return the student's distillation settings, with the guidance of its teacher."""
    distill = config.distill
    guidance = load_run_config(Path(distill.teacher)).sampling
    return Distillation(tuple(distill.times), distill.teacher_steps, guidance)


def build_teacher(
    spec: TrainSpec,
    args: DiTTTSModelArgs,
    config: JobConfig,
    vocabulary: Vocabulary,
    parallel_dims: ParallelDims,
    device: torch.device,
) -> nn.Module:
    """The teacher's network with its weights, frozen and in parallel as the student's. Called by every rank at once.

    Args:
        args: the student's, whose network is the same.
        vocabulary: of the student's tokenizer.
    """
    folder = Path(config.distill.teacher)
    about = f"[distill] teacher = {config.distill.teacher!r}"
    known = load_vocabulary(folder)
    require(
        known.fingerprint == vocabulary.fingerprint,
        f"{about} has {known.describe()}, but the run {vocabulary.describe()}, and a teacher cannot teach what it "
        f"does not know; take such texts and labels out of [data] path",
    )
    problem = verify_together(folder)
    require(problem is None, f"{problem}; export the teacher again")
    training = config.training
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        model = spec.model_cls(args).requires_grad_(False)
    # Nothing is kept for a backward pass, and low-rank updates are the student's.
    whole = ActivationCheckpoint(mode="none")
    plain = replace(config, activation_checkpoint=whole, lora=Lora())
    model = cast(ModelProtocol, spec.parallelize_fn(model, parallel_dims, plain).eval())
    model.to_empty(device="cpu" if training.enable_cpu_offload else device)
    if isinstance(model.text_encoder, PretrainedTextEncoder):
        model.text_encoder.reset_buffers()
    load_checkpoint(dict(model.named_parameters()), folder)
    return model
