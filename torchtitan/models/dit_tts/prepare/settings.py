"""What the user may choose in a preparation, checked, and what of it decides the samples' bytes."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare.recordings import ItemRules


@dataclass(frozen=True)
class AudioSettings:
    """Steps and filters between a recording and its latents. None switches one off."""

    loudness: float | None = -16.0  # LUFS, ITU-R BS.1770
    max_silence: float | None = 0.25  # seconds kept before and after the speech
    min_seconds: float | None = None  # of the sample, after its silence is capped
    max_seconds: float | None = None
    min_chars_per_second: float | None = None
    max_chars_per_second: float | None = None
    max_clipped: float | None = None  # share of the recording's samples at full scale


@dataclass(frozen=True)
class PrepareSettings:
    """Everything that decides the output's bytes, beside the recordings themselves."""

    format: str = "auto"
    codec: str = "mel_dct"
    samples_per_shard: int = 1000
    seed: int = 0
    references: int = 1
    max_reference_frames: int = 384
    chunk_items: int = 64
    audio: AudioSettings = AudioSettings()
    items: ItemRules = ItemRules()

    def check(self) -> None:
        """Raises InputError where a number is out of its range."""
        for name, lowest in (
            ("samples_per_shard", 1),
            ("references", 1),
            ("max_reference_frames", 1),
            ("chunk_items", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < lowest:
                raise InputError(
                    f"{option(name)} is {getattr(self, name)}; it must be at least {lowest}"
                )
        for one in fields(self.audio):
            value = getattr(self.audio, one.name)
            if value is not None and not math.isfinite(value):
                raise InputError(
                    f"{option(one.name)} is {value}; it must be a finite number, or left out"
                )
            if value is not None and one.name != "loudness" and not value >= 0:
                raise InputError(f"{option(one.name)} is {value}; it must not be negative")
        if self.audio.loudness is not None and not -70 < self.audio.loudness <= 0:
            raise InputError(
                f"--loudness is {self.audio.loudness}; it must be above -70 and at most 0 LUFS, or off"
            )
        for low, high in (
            ("min_seconds", "max_seconds"),
            ("min_chars_per_second", "max_chars_per_second"),
        ):
            least, most = getattr(self.audio, low), getattr(self.audio, high)
            if least is not None and most is not None and least > most:
                raise InputError(
                    f"{option(low)} {least} is above {option(high)} {most}: nothing would be kept"
                )
        if not 0 <= self.items.heldout_share < 1:
            raise InputError(
                f"--heldout-share is {self.items.heldout_share}; it must be at least 0 and below 1"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "PrepareSettings":
        nested = {
            "audio": AudioSettings(**values["audio"]),
            "items": ItemRules(**values["items"]),
        }
        return cls(**(values | nested))


def number_or_off(text: str) -> float | None:
    """An option's value on the command line; None where it is off."""
    return None if text == "off" else float(text)


number_or_off.__name__ = "number or off"  # argparse says it in its message


def option(name: str) -> str:
    """A field's option on the command line."""
    return "--" + name.replace("_", "-")


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """One level: {"audio": {"loudness": 1}} -> {"loudness": 1}."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat(value) if isinstance(value, dict) else {name: value}
        assert not out.keys() & inner.keys(), "a field would hide another of its name"
        out |= inner
    return out


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs between two settings, for a sentence: "seed was 0, is 1"; empty where nothing."""
    before, after = flat(old), flat(new)
    return "; ".join(
        f"{name} was {before.get(name)!r}, is {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    )
