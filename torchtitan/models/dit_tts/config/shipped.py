"""The configs that come with the package."""

from pathlib import Path

from torchtitan.models.dit_tts.errors import InputError

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder() -> Path:
    """Folder of the configs, and of the grids in `ablations/`."""
    in_wheel = _PACKAGE / "train_configs"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parents[2] / "train_configs"


def shipped_configs() -> dict[str, Path]:
    """Path of each config by its name: debug, 800m ..."""
    files = sorted(shipped_folder().glob("*.toml"))
    return {path.stem.removeprefix("dit_tts_"): path for path in files}


def find_config(config: str) -> Path:
    """The TOML file that a path, or else the name of a shipped config, stands for."""
    shipped = shipped_configs()
    if Path(config).expanduser().is_file():
        return Path(config).expanduser()
    if config.lower() in shipped:
        return shipped[config.lower()]
    raise InputError(
        f"there is no config {config!r}; give the path of a TOML file or one of: "
        f"{', '.join(shipped)}"
    )
