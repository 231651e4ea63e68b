"""The configs and the trained models that come with the package."""

from pathlib import Path

from torchtitan.models.dit_tts.config.exported import is_exported
from torchtitan.models.dit_tts.errors import InputError

_PACKAGE = Path(__file__).resolve().parents[1]

_PREFIX = "titan_tts:"

BASE = "titan_tts:base"
"""The model that speaks where none is named"""


def _folder(in_wheel: str, in_checkout: str) -> Path:
    packed = _PACKAGE / in_wheel
    return packed if packed.is_dir() else _PACKAGE.parents[2] / in_checkout


def shipped_folder() -> Path:
    """Folder of the configs, and of the grids in `ablations/`."""
    return _folder("train_configs", "train_configs")


def voices_folder() -> Path:
    """Folder of the models, each as `titan-tts export` writes it."""
    return _folder("voices", "assets/voices")


def shipped_path(name: str) -> str:
    """The folder of titan_tts:NAME; any other name as it is.

    Raises:
        InputError: the package has no model NAME; the sentence lists those that it has.
    """
    if not name.startswith(_PREFIX):
        return name
    folders = sorted(voices_folder().glob("*/"))
    models = {f"{_PREFIX}{path.name}": str(path) for path in folders if is_exported(path)}
    if name not in models:
        known = ", ".join(models) or "none"
        raise InputError(f"the package has no model {name!r}; it has: {known}")
    return models[name]


def shipped_configs(folder: str = "") -> dict[str, Path]:
    """Path of each config by its name: debug, 800m ... `folder`: of the grids, "ablations"."""
    files = sorted((shipped_folder() / folder).glob("*.toml"))
    return {path.stem.removeprefix("dit_tts_"): path for path in files}


def find_config(config: str, folder: str = "", what: str = "config") -> Path:
    """The TOML file that a path, or else the name of a shipped config, stands for; `folder`: as of `shipped_configs`,
    `what`: for the message."""
    shipped = shipped_configs(folder)
    if Path(config).expanduser().is_file():
        return Path(config).expanduser()
    if config.lower() in shipped:
        return shipped[config.lower()]
    raise InputError(
        f"there is no {what} {config!r}; give the path of a TOML file or one of: "
        f"{', '.join(shipped)}"
    )
