"""What a run reaches of its hardware's peaks: guesses with ranges, or figures fitted to measured runs.

Each constant is known as the logarithm of a normal variable: a guess stands for its median, and the
range from low to high for two standard deviations on either side. A prediction's error bar comes from
these, and a calibration narrows them.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.files import write_atomic


@dataclass(frozen=True)
class Constant:
    """One number of the model of time."""

    name: str
    guess: float
    low: float
    high: float
    meaning: str


CONSTANTS = (
    Constant(
        "gemm_efficiency",
        0.70,
        0.55,
        0.82,
        "share of the bf16 peak that large products reach; 790 of 989 TFLOP/s at best on an H200",
    ),
    Constant(
        "attention_efficiency",
        0.42,
        0.25,
        0.65,
        "share of the bf16 peak that attention reaches, forward and backward together",
    ),
    Constant(
        "memory_efficiency",
        0.80,
        0.65,
        0.92,
        "share of the memory's bandwidth that kernels reach which only move data",
    ),
    Constant(
        "fused_traffic",
        1.4,
        1.0,
        2.2,
        "bytes that compiled pointwise kernels move, over those if all between two products were one",
    ),
    Constant(
        "kernel_seconds",
        2e-6,
        1e-6,
        5e-6,
        "seconds between the end of a kernel and the start of the next",
    ),
    Constant(
        "encoder_slowdown",
        1.6,
        1.1,
        3.0,
        "time of a frozen text encoder over that of its products at gemm_efficiency",
    ),
    Constant(
        "fp8_gain",
        1.6,
        1.2,
        1.9,
        "rate of the blocks' products in fp8, with their casts, over that in bf16",
    ),
    Constant(
        "network_efficiency",
        0.75,
        0.5,
        0.92,
        "share of the links' bandwidth that collectives reach beside the computation",
    ),
    Constant(
        "ring_step_seconds",
        3e-6,
        1e-6,
        9e-6,
        "seconds that each step of a ring takes beside its bytes, inside and between nodes; an assumption",
    ),
)

NAMES = tuple(constant.name for constant in CONSTANTS)
UNEXPLAINED = 0.06
"""relative error of a predicted step with right constants, as a standard deviation; a guess. It is taken
to be the same in all shapes of a run"""


@dataclass(frozen=True)
class Constants:
    """Values, and how well they are known."""

    values: dict[str, float]
    covariance: np.ndarray
    """of their logarithms, in the order of CONSTANTS"""

    unexplained: float
    """relative standard deviation of a step's time that the constants leave open"""

    origin: str
    """in words"""

    @property
    def finite(self) -> bool:
        """Whether a prediction can be made with them."""
        numbers = np.array([*self.values.values(), self.unexplained])
        return bool(
            np.isfinite(self.covariance).all()
            and np.isfinite(numbers).all()
            and (numbers > 0).all()
        )

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def moved(self, number: int, log_step: float) -> "Constants":
        """With one value multiplied by exp(log_step)."""
        name = NAMES[number]
        values = {**self.values, name: self.values[name] * float(np.exp(log_step))}
        return Constants(values, self.covariance, self.unexplained, self.origin)


def guesses() -> Constants:
    """The table's, uncalibrated."""
    deviations = np.array([np.log(c.high / c.low) / 4 for c in CONSTANTS])
    values = {c.name: c.guess for c in CONSTANTS}
    return Constants(values, np.diag(deviations**2), UNEXPLAINED, "guesses, not calibrated")


def user_file() -> Path:
    """Where a calibration is kept when nothing else is said."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.path.expanduser(home)) / "titan-tts" / "plan_constants.json"


def save(path: Path, device: str, constants: Constants) -> None:
    """Writes one device's constants, beside those of others that the file has."""
    assert constants.finite
    content = _read(path) if path.exists() else {}
    content[device] = {
        "values": constants.values,
        "covariance_of_logarithms": constants.covariance.tolist(),
        "unexplained": constants.unexplained,
        "origin": constants.origin,
    }
    write_atomic(path, json.dumps(content, indent=1) + "\n")


def load(path: Path | None, device: str) -> Constants:
    """Constants of a device from a file; None takes the user's, and guesses where it has none.

    Raises:
        InputError: a file that was named and does not have them.
    """
    named, path = path is not None, path or user_file()
    content = _read(path) if named or path.exists() else {}
    if device not in content:
        if named:
            raise InputError(
                f"--constants {path} has no constants of {device}, only of {', '.join(content)}; calibrate "
                f"with runs on it, or leave --constants out"
            )
        return guesses()
    row = content[device]
    try:
        values = {name: float(row["values"][name]) for name in NAMES}
        covariance = np.array(row["covariance_of_logarithms"], float)
        if covariance.shape != (len(NAMES), len(NAMES)):
            raise ValueError(f"covariance {covariance.shape}")
        origin = f"{path}: {row['origin']}"
        constants = Constants(values, covariance, float(row["unexplained"]), origin)
        if not constants.finite:
            raise ValueError("some are not finite or not greater than 0")
        return constants
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: the constants of {device} are not those that this version has ({error}); calibrate "
            f"again"
        ) from error


def _read(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read as constants ({error}); give a file that --calibrate wrote"
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no constants; give a file that --calibrate wrote")
    return content
