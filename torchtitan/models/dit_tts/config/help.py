"""Help on the keys of a config: our sections first, then upstream's as far as they are used."""

import copy
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any

import tyro

from torchtitan.config.manager import custom_registry
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.manager import TTSConfigManager
from torchtitan.models.dit_tts.config.options import read_options

_SECTIONS = """job data encoder model attention objective distill optimizer lr_scheduler training ema validation samples
sampling checkpoint resume divergence parallelism megatron activation_checkpoint compile quantize metrics benchmark profiling comm
debug""".split()

# Beginnings of the keys of upstream that this model family does not use, by section.
_UNUSED = {
    "job": ("custom_config_module", "save_config_file"),
    "model": ("name", "hf_assets_path", "tokenizer_path"),
    "optimizer": ("early_step_in_backward",),
    "training": ("dataset", "seq_len", "dataloader"),
    "parallelism": (
        *("context_", "pipeline_", "expert_", "module_fqns"),
        *("disable_loss_parallel", "enable_async_tensor"),
    ),
    "checkpoint": ("enable_ft", "initial_load_in_hf", "last_save_in_hf"),
    "activation_checkpoint": ("per_op_sac",),
    "quantize": ("grouped_mm",),
    "linear": ("mx",),
    "metrics": ("save_tb_folder", "save_for_all_ranks"),
    "debug": ("moe_",),
}

_DESCRIPTION = """Trains a model. Every key of the TOML file is an option here, --section.key value; an
option wins over the file. --dry-run trains nothing: it prints parameters, memory per GPU, downloads and
the arithmetic of a step (--dry-run --nproc N). """


def print_help(every_key: bool) -> int:
    """Prints the keys with their types, defaults and sentences; `every_key`: also the unused ones."""
    TTSConfigManager()  # registers how lists are read and shown
    known: dict[str, Any] = {each.name: each.type for each in fields(JobConfig)}
    kinds = known if every_key else {name: _used_part(name, known[name]) for name in _SECTIONS}
    config = make_dataclass(
        "Config", [(name, kind, field(default_factory=kind)) for name, kind in kinds.items()]
    )
    rest = (
        "" if every_key else "--help-all also lists upstream's keys that this family does not use."
    )
    read_options(config, custom_registry, description=_DESCRIPTION + rest, args=["--help"])
    return 0


def _used_part(section: str, kind: Any) -> Any:
    """`kind` with the unused keys hidden; a subclass, so that tyro finds the fields' docstrings."""
    shown = []
    for each in fields(kind):
        if each.name.startswith(_UNUSED.get(section, ())):
            # A copy: making a dataclass writes the type into the field that it is given.
            shown.append((each.name, Annotated[each.type, tyro.conf.Suppress], copy.copy(each)))
        elif is_dataclass(each.type):
            inner = _used_part(each.name, each.type)
            shown.append((each.name, inner, field(default_factory=inner)))
    return make_dataclass(kind.__name__, shown, bases=(kind,)) if shown else kind
