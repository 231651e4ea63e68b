"""The members of a sample: the one place that knows them.

A sample of key utt0001 is these members of a tar:

    utt0001.npy       float16 (T, C)   latents of the utterance
    utt0001.ref.npy   float16 (R, C)   latents of a reference by the same speaker; R may be 0
    utt0001.json      utf-8 JSON       {"text": ..., "target_duration": seconds, ...}

Writer, index, reader and batches are made from `ARRAYS`, so another array is one more line, for example
`ArrayMember("f0", "f0.npy", length="frames", entry="f0", width=1)` for a value per latent frame in `utt0001.f0.npy`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from torchtitan.models.dit_tts.files import nfc


@dataclass(frozen=True)
class ArrayMember:
    """An array of every sample, (rows, width): written as float16, and read as float16 or float32 of other writers.

    Attributes:
        name, suffix: of its index columns, and of its tar member, `KEY.SUFFIX`.
        length: index column with its number of rows: "frames", as many as the latents, padded to T of the batch; or "reference_frames", padded to R, or cropped to R consecutive ones from any start.
        entry: name in the batch, where it is (B, T or R, width) float32, zero at padding.
        width: None: as the latents.
    """

    name: str
    suffix: str
    length: str
    entry: str
    width: int | None = None


# The latents come first: they set the number of frames and the width of the others.
ARRAYS: tuple[ArrayMember, ...] = (
    ArrayMember("latents", "npy", length="frames", entry="latents"),
    ArrayMember("reference", "ref.npy", length="reference_frames", entry="speaker"),
)
METADATA_SUFFIX = "json"
HASHES_KEY = "xxh3_64"
"""in the JSON: suffix of a member -> XXH3 hash, 16 hex digits, of an array's data behind its npy header, or `metadata_hash`"""
REFERENCE_PARTS = "reference_parts"
"""in the JSON of a reference that joins recordings, as of the speakers of several turns: frames of each"""
VERBATIM = "text_verbatim"
"""in the JSON: the text with every hesitation and repetition, which may stand in for "text" in training"""
CAPTION = "caption"
"""in the JSON: the voice and its manner in words, such as "a calm old woman, close to the microphone" """
WEIGHT = "weight"
"""in the JSON: how often the sample is drawn, relative to others of its dataset; 1 where there is none"""
LABELS = ("speaker", "language", "quality", "class")
"""keys of the JSON whose values the index keeps"""
KEY_RULE = "use a relative name whose last component is not empty and has no dot (the member's suffix begins at it)"


def is_key(key: str) -> bool:
    """True if it is as `KEY_RULE` says."""
    *folders, name = key.split("/")
    return bool(name) and "." not in name and "\0" not in key and not {"", ".", ".."} & {*folders}


def suffixes() -> list[str]:
    """Return the suffixes of all members of a sample."""
    return [*(array.suffix for array in ARRAYS), METADATA_SUFFIX]


def length_columns() -> list[str]:
    """Index columns that count rows of arrays."""
    return list(dict.fromkeys(array.length for array in ARRAYS))


def index_dtype() -> np.dtype:
    """One row of an index, a sample.

    Offsets are of array data (behind the npy header) or of the JSON, in bytes from the start of the tar; hashes are
    the XXH3 of these bytes; verbatim lengths are of `text_of(metadata, True)`; `key_end` is where the key ends in the
    joined utf-8 of all keys; codes are indices in the label's list of values, -1 for none.
    """
    columns = [(name, "<i4") for name in length_columns()]
    for name in [*(array.name for array in ARRAYS), "metadata"]:
        columns += [(f"{name}_offset", "<i8"), (f"{name}_hash", "<u8")]
    columns += [(f"{array.name}_item_bytes", "<u1") for array in ARRAYS]
    columns += [("metadata_bytes", "<i4"), ("text_bytes", "<i4"), ("text_chars", "<i4")]
    columns += [("verbatim_bytes", "<i4"), ("verbatim_chars", "<i4"), ("weight", "<f8")]
    columns += [("key_end", "<i8"), *((f"{name}_code", "<i4") for name in LABELS)]
    return np.dtype(columns)


def canonical_json(metadata: dict[str, Any]) -> bytes:
    """The JSON of all but the hashes, keys sorted, utf-8. Raises ValueError or TypeError where a value has none, as
    NaN."""
    rest = {name: value for name, value in metadata.items() if name != HASHES_KEY}
    return json.dumps(rest, ensure_ascii=False, sort_keys=True, allow_nan=False).encode("utf-8")


def metadata_hash(metadata: dict[str, Any]) -> str | None:
    """Hash of `canonical_json`; None where it has none."""
    try:
        return xxhash.xxh3_64_hexdigest(canonical_json(metadata))
    except (TypeError, ValueError, RecursionError):
        return None


def label_of(metadata: Mapping[str, Any], name: str) -> str | None:
    """A sample's value of a label as text; None where it has none. An integer counts as a name."""
    value = metadata.get(name)
    if isinstance(value, str):
        return value or None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def text_of(metadata: Mapping[str, Any], verbatim: bool) -> str:
    """A sample's text, or its verbatim text where that is asked for and there is one."""
    found = metadata.get(VERBATIM) if verbatim else None
    return found if found and isinstance(found, str) else metadata["text"]


def caption_of(metadata: Mapping[str, Any]) -> str:
    """A sample's caption in composed characters; empty where it has none."""
    value = metadata.get(CAPTION)
    return nfc(value).strip() if isinstance(value, str) else ""


def weight_of(metadata: Mapping[str, Any]) -> float:
    """A sample's weight, from 1e-6 to 1e6; 1 where it has none, NaN where that is not such a number."""
    value = metadata.get(WEIGHT)
    if value is None:
        return 1.0
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 1e-6 <= value <= 1e6 else math.nan
