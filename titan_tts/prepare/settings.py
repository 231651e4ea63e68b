"""Options of `titan-tts prepare`, their ranges, and which of them decide the shards' bytes."""

import math
import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

from titan_tts.jobs.workspace import WorkerOptions, flat
from titan_tts.records.columns import Columns
from torchtitan.models.dit_tts.errors import InputError, require

OrOff = Annotated[
    float | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT|off",
        instance_from_str=lambda words: None if words[0] == "off" else float(words[0]),
        is_instance=lambda value: value is None or isinstance(value, (int, float)),
        str_from_instance=lambda value: ["off" if value is None else str(value)],
    ),
]


@dataclass(frozen=True)
class AudioSettings:
    """Steps and filters between a recording and its latents; "off" switches one off."""

    loudness: OrOff = -16.0
    """Loudness in LUFS (ITU-R BS.1770) that recordings are brought to, or off."""

    max_silence: OrOff = 0.25
    """Seconds of silence to keep before and after the speech, or off."""

    min_seconds: OrOff = None
    """Leave out recordings that are shorter, measured after the silence is cut."""

    max_seconds: OrOff = None
    """Leave out recordings that are longer."""

    min_chars_per_second: OrOff = None
    """Leave out recordings whose text is shorter for their length."""

    max_chars_per_second: OrOff = None
    """Leave out recordings whose text is longer for their length."""

    max_clipped: OrOff = None
    """Leave out recordings with a larger fraction of their samples at full scale."""


@dataclass(frozen=True)
class Options(Columns, WorkerOptions):
    """Encode audio and text into shards of latents."""

    source: Annotated[Positional[str], arg(metavar="SOURCE")]
    """Recordings: a folder, a list, tables, audio tars or their URL; layouts: docs/prepare.md."""

    output: Annotated[Positional[str], arg(metavar="OUTPUT")]
    """Folder for the shards; train/ and heldout/ come below it."""

    format: str = "auto"
    """Layout of the source: ljspeech, libritts_r, manifest, webdataset or table; auto detects it."""

    codec: str = "mel_dct"
    """mel_dct, a DAC-VAE's weights (.pth, .safetensors or their folder), or their hub name."""

    samples_per_shard: int = 1000
    """Samples per shard."""

    references: Literal[0, 1] = 1
    """Utterances of the speaker in a sample's reference; 0 stores none, for [data] references = "drawn"."""

    max_reference_frames: int = 384
    """Maximum frames of a reference; longer ones are cropped."""

    where: str = ""
    """Take only recordings with these values in their columns: "speaker=anna; quality=high,medium"."""

    audio: AudioSettings = AudioSettings()

    captions: bool = False
    """Describe recordings that have no caption: pitch, melody, speed, with --loudness off also the level."""

    encoder: str = ""
    """The [encoder] model to train with: texts that phones:LANGUAGE cannot read are refused before the audio is encoded."""

    chunk_items: int = 64
    """Recordings that a process encodes at once; a killed run loses at most that many."""

    on_error: Literal["raise", "skip"] = "raise"
    """On a corrupt recording: stop (raise), or skip and count it (skip)."""

    max_corrupt_fraction: float = 0.01
    """With --on-error skip: stop if a larger fraction of the recordings is corrupt."""

    def check(self) -> None:
        """Raises InputError where a number is out of its range or a pattern is not a regular expression."""
        from_one = ("samples_per_shard", "max_reference_frames", "chunk_items")
        for name, value in flat(asdict(self)).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            low, high = float(name in from_one), 1.0 if name.endswith("_fraction") else math.inf
            if name == "loudness":
                low, high = -70.0, 0.0
            if not low <= value <= high or value == math.inf:
                limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
                option = "--" + name.replace("_", "-")
                raise InputError(f"{option} = {value}, but it must be {limit} and finite")
        require(
            re.fullmatch("([A-Za-z]{2,3}([-_][A-Za-z0-9]{1,8})*)?", self.language) is not None,
            f"--language = {self.language!r} is not a language code; give one such as en, de, en-us or zh-Hant",
        )
        require(
            not self.where or all(re.fullmatch("[^=]+=.+", each) for each in self.where.split(";")),
            f"--where = {self.where!r}; give COLUMN=VALUE, such as 'speaker=anna; quality=high,medium'",
        )
        try:
            groups = re.compile(self.speaker_pattern or "()").groups
        except re.error:
            groups = 0
        require(
            groups > 0,
            f"--speaker-pattern = {self.speaker_pattern!r} is not a regular expression with parentheses around the "
            "part that is the speaker; give one such as '^([^_]+)_'",
        )

    def of_shards(self) -> dict[str, Any]:
        """The options that decide the shards' bytes, as prepare.json has them. Earlier outputs have no --where and --captions."""
        left_out = _OF_A_RUN | {name for name in ("where", "captions") if not getattr(self, name)}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Options":
        return cls(**(values | {"audio": AudioSettings(**values["audio"])}))


# Options that change nothing in the shards.
_OF_A_RUN = {
    "source",
    "output",
    "encoder",
    "device",
    "workers",
    "engine",
    "on_error",
    "max_corrupt_fraction",
}
