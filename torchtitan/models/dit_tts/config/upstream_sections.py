"""Sections that add keys to upstream's, or change its defaults."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torchtitan.config.job_config as titan
from torchtitan.models.dit_tts.config.marks import (
    EXPORTED,
    RECIPE,
    TRAINING,
    UNUSED,
    WEIGHTS,
    WORKLOAD,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)


@dataclass
class Job(titan.Job):
    experiment: str = ""
    """Name of the run's folder in dump_folder; empty: the config file's name without .toml"""


@dataclass
class Model(titan.Model):
    name: Annotated[Literal["dit_tts"], EXPORTED, UNUSED] = "dit_tts"
    """Model family to train"""

    flavor: Annotated[str, WEIGHTS, EXPORTED] = "debug"
    """Size of the model: debug, 8M, 18M, 60M, 300M, 800M, 3B or 8B; or duration, which predicts
    durations instead of synthesizing speech"""

    sizes: Annotated[list[str], WEIGHTS, WORKLOAD, EXPORTED] = field(default_factory=list)
    """Sizes that differ from the flavor's, such as dim=1536,n_layers=28: FIELD=NUMBER, true or false, with the
    fields of model/args.py that no other key sets"""

    text_positions: Annotated[Literal["none", "aligned"], WEIGHTS, WORKLOAD, EXPORTED] = "none"
    """Positions of the text's keys in the attention's rotated heads: none, or each token at its
    frame, by an alignment in training and as expected from its letters in generation (aligned)"""

    hf_assets_path: Annotated[str, UNUSED] = "."
    """Not used by this family"""


@dataclass
class Metrics(titan.Metrics):
    enable_tensorboard: bool = True
    """Writes TensorBoard events to the run's tb/ folder"""

    enable_wandb: bool = False
    """Logs to Weights & Biases too, with the key in WANDB_API_KEY (from the environment or a file .env);
    not in a benchmark. Needs the extra wandb"""

    wandb_project: str = ""
    """Project at Weights & Biases; empty: WANDB_PROJECT, else titan-tts"""

    peak_tflops: float = 0.0
    """Dense bf16 peak of one device in TFLOP/s, the denominator of MFU; 0: the datasheet's value of a
    known device, and no MFU on an unknown one"""


@dataclass
class Checkpoint(titan.Checkpoint):
    enable: bool = True
    """Saves checkpoints and resumes from them; without them only a run's metrics are kept"""

    last_save_model_only: bool = False
    """True drops optimizer, EMA and data position from the last checkpoint, which then cannot be
    resumed"""


InductorOption = Literal[
    "max_autotune_pointwise", "coordinate_descent_tuning", "triton.multi_kernel"
]


@dataclass
class Compile(titan.Compile):
    components: Annotated[list[Literal["model", "encoders", "loss", "text_encoder"]], WORKLOAD] = (
        field(
            default_factory=lambda: ["model", "encoders"]  # type: ignore[assignment]
        )
    )
    """Parts to compile: each block of the decoder (model), each block of the speaker encoder and of a
    trained text encoder (encoders), the noising and the loss (loss), a frozen text encoder (text_encoder)"""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "default"
    )
    """Mode of torch.compile; reduce-overhead and max-autotune replay CUDA graphs, on one GPU
    only"""

    inductor: list[InductorOption] = field(default_factory=list)
    """Options of Inductor that are on for the blocks, for faster kernels beside the products: more block sizes tried
    (max_autotune_pointwise), and their neighbours (coordinate_descent_tuning); reductions also with the whole row in
    registers (triton.multi_kernel)"""


@dataclass
class Parallelism(titan.Parallelism):
    backend: Literal["torchtitan", "megatron"] = "torchtitan"
    """Parallelization backend: data parallelism only (torchtitan), or also tensor
    parallelism by Megatron-Core's layers (megatron), which needs the extra megatron"""

    tensor_parallel_degree: PositiveInt = 1
    """GPUs that share each block's heads and MLP units, with backend = "megatron"; must divide the flavor's
    heads: 1, 2 or 4 of 3B's 20 and 8B's 32, 1 or 2 of 800M's 10"""


@dataclass
class Megatron:
    transformer_impl: Annotated[Literal["local", "transformer_engine"], WORKLOAD] = "local"
    """Layers of [parallelism] backend = "megatron": Megatron-Core's PyTorch layers (local), or
    TransformerEngine's, which need a GPU and the extra transformer-engine and do not compile"""

    sequence_parallel: Annotated[bool, WORKLOAD] = False
    """The GPUs of a tensor-parallel group also share the frames between a block's products: norms, gates and
    what they keep; sums become a gather and a reduce-scatter (Megatron's sequence parallelism)"""

    use_te_attn: Annotated[bool, WORKLOAD] = False
    """TransformerEngine's attention over packed keys, instead of flash attention ([attention]
    backend = "varlen")"""

    fp8: Annotated[bool, TRAINING] = False
    """TransformerEngine's layers multiply in fp8, with current scaling per tensor; the sizes of a GPU's
    part must be multiples of 16, to which rows are padded"""


@dataclass
class Optimizer(titan.Optimizer):
    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """Muon updates the large matrices of the decoder's blocks, and AdamW the rest"""

    state_dtype: Literal["float32", "8bit"] = "float32"
    """Precision of AdamW's two moments; 8bit needs torchao and leaves embeddings in float32"""

    muon_lr: NonNegativeFloat = 0.0
    """Learning rate of Muon, whose updates are scaled to AdamW's RMS; 0: lr"""

    base_dim: NonNegativeInt = 0
    """Decoder width of the flavor with which lr and muon_lr were tuned: the learning rate of each matrix is divided by
    the growth of its inputs since (Muon's: by its square root), at constant rate times decay; 0: unscaled"""

    encoder_lr: NonNegativeFloat = 1e-5
    """Learning rate of a pretrained text encoder that is trained ([encoder] frozen = false)"""


@dataclass
class Training(titan.Training):
    local_batch_size: NonNegativeInt = 0
    """Samples of the longest bucket in one rank's micro-batch; 0: the global batch divided by the ranks,
    in as few micro-batches as max_local_batch_size allows"""

    max_local_batch_size: NonNegativeInt = 0
    """Largest micro-batch with local_batch_size = 0, so that one config suits few and many GPUs; 0: no
    limit, and no accumulation"""

    global_batch_size: Annotated[int, RECIPE] = 32
    """Samples of the longest bucket in a global batch; shorter buckets have more, up to as many frames"""

    mixed_precision_reduce: Annotated[Literal["float32", "bfloat16"], WORKLOAD, RECIPE] = "float32"  # type: ignore[assignment]
    """Precision in which gradients are summed over ranks (FSDP2, HSDP, DDP) and, where there are replicas, over
    micro-batches; bfloat16 halves the bytes"""
