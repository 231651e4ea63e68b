"""Loads a trained model: from a run's folder, by its resolved config and a checkpoint, or from an exported folder."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.utils import device_type

from titan_tts.speak.adapters import Values, add_adapter_to, read_adapter, read_tensors
from titan_tts.speak.open_run import OpenRun, open_run
from torchtitan.models.dit_tts import model_flavors
from torchtitan.models.dit_tts.bounded import open_weights
from torchtitan.models.dit_tts.config.exported import CONFIG, WEIGHTS, is_exported
from torchtitan.models.dit_tts.config.job_config import JobConfig, is_pretrained
from torchtitan.models.dit_tts.config.keys import check_numbers
from torchtitan.models.dit_tts.config.manager import config_from_dict
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling
from torchtitan.models.dit_tts.errors import InputError, reading, require
from torchtitan.models.dit_tts.flow.objective import FlowMatching, build_objective
from torchtitan.models.dit_tts.infra.cpu_kernels import multiplies_bfloat16
from torchtitan.models.dit_tts.infra.kernels import build_model
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model_config import read_sizes
from torchtitan.models.dit_tts.run.manifest import (
    MANIFEST,
    checkpoint_steps,
    read_manifest,
    verify_files,
)
from torchtitan.models.dit_tts.run.resume_rules import BASE, adapter_base
from torchtitan.models.dit_tts.text.build_tokenizer import load_tokenizer
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder, load_run_encoder
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer

_TRAINED = ("model", "objective", "lora")
"""Sections whose values, as the weights were trained with them, are in a manifest"""

_AGAIN = "export the run again"


@dataclass(frozen=True)
class LoadedRun(OpenRun):
    """A run to speak with, whose weights are known by name. The model is in eval mode."""

    model: DiTTTSModel
    """a `DurationModel` for the flavor duration"""

    text_encoder: PretrainedTextEncoder | None
    """frozen, outside the model"""

    tokenizer: ConditionedTokenizer
    objective: FlowMatching
    device: torch.device
    adapter: Values | None = None
    """what an adapter's run has trained; low-rank updates are in the model's weights already"""


def _empty_model(config: JobConfig, folder: Path, device: torch.device) -> DiTTTSModel:
    """The run's model in eval mode, its weights arbitrary. Of an exported folder nothing is allocated before
    its weights are seen to fit."""
    args = model_flavors()[config.model.flavor]
    args.update_from_config(config, folder=folder)
    # The run's own may need what sampling is without: varlen bfloat16.
    args.attention = "sdpa"
    with torch.device("meta"):
        model: Any = build_model(args)
    if is_exported(folder):
        _check_fits(model, folder)
    # As `to_empty`, whose `empty_like` of a tensor without values imports sympy, a quarter of a start.
    model._apply(lambda value: torch.empty(value.shape, dtype=value.dtype, device=device))
    if isinstance(model.text_encoder, PretrainedTextEncoder):
        model.text_encoder.reset_buffers()
    return model.eval()


def _trained_config(config: JobConfig, path: Path) -> JobConfig:
    """The config with the values that the weights were trained with, where a later start changed them; checked
    as a run's, since the folder may be a stranger's."""
    where = str(path / MANIFEST)
    sections = {name: asdict(getattr(config, name)) for name in _TRAINED}
    for key, value in read_manifest(path)["trained_with"].items():
        section, _, name = key.partition(".")
        if section in sections and key != BASE:
            sections[section][name] = value
    merged = config_from_dict(sections, where)
    found = replace(config, **{name: getattr(merged, name) for name in _TRAINED})
    check_numbers(found)
    check_sampling(found.sampling)
    if found.model.flavor not in model_flavors():
        raise InputError(f"{where}: [model] flavor = {found.model.flavor!r} is not known")
    return found


def load_run(
    run: OpenRun | str | Path,
    step: int | str | None = None,
    weights: str = "",
    encoder: str = "",
    dtype: str = "float32",
) -> LoadedRun:
    """Loads the model of a run or an exported folder.

    Args:
        run: what `open_run` gave, or a folder to open with `step` and `weights`.
        encoder: present path of the frozen text encoder, or the phones:LANGUAGE to read texts in; empty: the config's.
        dtype: float32, bfloat16, or auto, see `multiplies_bfloat16`.
    """
    if not isinstance(run, OpenRun):
        run = open_run(run, step, weights)
    folder, path = run.folder, run.path
    if problem := _problem_of(path):
        if path == folder:
            raise InputError(f"{problem}; copy the exported folder again, or export the run again")
        steps = ", ".join(map(str, checkpoint_steps(path.parent)))
        raise InputError(f"{problem}; give another --step, of: {steps}")
    config = _trained_config(run.config, path)
    if path == folder:
        _check_bounds(config, path)
    device = torch.device(device_type)
    tokenizer = load_tokenizer(folder, config, encoder)
    config.encoder.vocab_size = tokenizer.vocab_size
    model = _empty_model(config, folder, device)
    weights, entry = run.find_weights()
    adapter = None
    if config.lora.rank == 0 or path == folder:
        _load_weights(model, path, entry)
    else:
        _load_weights(model, adapted_base(config, path))
        adapter = read_adapter(path, entry)
        add_adapter_to(model, config.lora, adapter)
    if dtype == "bfloat16" or (dtype == "auto" and multiplies_bfloat16(device)):
        for parameter in model.parameters():  # tables of angles stay in float32
            parameter.data = parameter.data.to(torch.bfloat16)
    text_encoder = None
    if is_pretrained(config.encoder.model) and config.encoder.frozen:
        there = replace(config.encoder, model=encoder or config.encoder.model)
        text_encoder = load_run_encoder(folder, there, device)
    speaks = model, text_encoder, tokenizer, build_objective(config), device, adapter
    return LoadedRun(folder, config, run.step, weights, *speaks)


def _problem_of(path: Path) -> str | None:
    """Return the first difference of a checkpoint or an exported folder from its manifest; None if it is valid."""
    if is_exported(path):
        return verify_files(path)
    from torchtitan.models.dit_tts.run.checkpoint_storage import verify

    return verify(path)


def _load_weights(model: DiTTTSModel, path: Path, entry: str = "") -> None:
    """Loads the weights of a checkpoint or an exported folder; `entry` stands before their names there."""
    if is_exported(path):
        with reading(path / WEIGHTS), open_weights(path / WEIGHTS) as file, torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(file.get_tensor(name))
        return
    values = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    read_tensors({f"{entry}{name}": value for name, value in values.items()}, path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def adapted_base(config: JobConfig, path: Path) -> Path:
    """The weights that the adapter in a checkpoint is for."""
    base, what = Path(str(config.checkpoint.initial_load_path)), f"{path} is an adapter of"
    require(
        base.is_dir(),
        f"{what} {base}, which is not there; put it back, or correct [checkpoint] initial_load_path in config.toml",
    )
    recorded = read_manifest(path)["trained_with"]
    same = all(recorded.get(key) == value for key, value in adapter_base(base).items())
    require(same, f"{what} other weights than {base} has; restore these")
    if problem := _problem_of(base):
        raise InputError(f"{problem}; restore it, as {what} it")
    return base


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of an exported folder's weights by name."""
    with reading(folder / WEIGHTS), open_weights(folder / WEIGHTS) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def _check_bounds(config: JobConfig, folder: Path) -> None:
    """Raises InputError where an exported folder's config asks for more than its weights have, before a
    model is built by it, or its weights are no floating-point numbers."""
    shapes = _stored_shapes(folder)
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    encoder, data, sizes = config.encoder, config.data, read_sizes(config.model.sizes)
    values = {f"[model] sizes: {key}": sizes[key] for key in sizes if key.endswith("n_layers")}
    values |= {f"[encoder] {key}": getattr(encoder, key) for key in ("n_layers", "n_heads", "dim")}
    values |= {
        f"[data] {key}": getattr(data, key) for key in ("latent_channels", "speaker_patch_size")
    }
    for name, value in values.items():
        require(
            value <= (len(shapes) if name.endswith("n_layers") else widest),
            f"{folder / CONFIG}: {name} = {value} is of another model than {WEIGHTS}; {_AGAIN}",
        )


def _check_fits(model: DiTTTSModel, folder: Path) -> None:
    """Raises InputError where an exported folder's weights are of another model."""
    found = _stored_shapes(folder)
    wanted = {name: tuple(value.shape) for name, value in model.named_parameters()}
    if found != wanted:
        name = sorted(wanted.items() ^ found.items())[0][0]
        raise InputError(
            f"{folder / WEIGHTS} is of another model than {CONFIG} says (first of all {name}); {_AGAIN}"
        )
