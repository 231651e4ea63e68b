"""`Utterance`: one recording, or one text to say, whichever format it comes from."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

TRAIN, HELDOUT = SPLITS = ("train", "heldout")


class Unusable(NamedTuple):
    """A recording that cannot be used."""

    id: str
    sentence: str  # why, without the source's path


class Reference(NamedTuple):
    """Recordings of the speaker that are given with an utterance; of a dialogue one of each speaker."""

    files: tuple[str, ...]
    text: str = ""  # what is said in them; empty: not known


@dataclass(frozen=True)
class Utterance:
    """Somebody says something.

    Attributes:
        id: unique within its source; of one that `prepare` encodes, without a dot.
        text: what is said, or to be said.
        speaker: empty: not known.
        labels: the JSON of its sample: all columns of the source, text and speaker included.
        audio: where the audio is, see `prepare.audio_reader`; paths are relative to the source's folder. Empty: there is
            none.
        reference: None: the source names none.
        split: "train" or "heldout".
    """

    id: str
    text: str
    speaker: str
    labels: dict[str, Any]
    audio: dict[str, Any]
    reference: Reference | None = None
    split: str = TRAIN

    def to_json(self) -> str:
        """A line of JSON, which a work folder keeps and of which a source's digest is made: it never changes."""
        audio = dict(self.audio)
        if self.reference is not None:
            audio["references"] = self.reference.files
            if self.reference.text != reference_text(self.labels):
                audio["reference_text"] = self.reference.text
        return json.dumps([self.id, self.text, self.speaker, self.split, self.labels, audio])

    @classmethod
    def from_json(cls, line: str | bytes) -> "Utterance":
        id, text, speaker, split, labels, audio = json.loads(line)
        files = audio.pop("references", None)
        said = audio.pop("reference_text", reference_text(labels))
        reference = Reference(tuple(files), said) if files else None
        return cls(id, text, speaker, labels, audio, reference, split)


def reference_text(labels: dict[str, Any]) -> str:
    """The text of the reference, as the column of that name has it."""
    text = labels.get("reference_text")
    return text if isinstance(text, str) else ""
