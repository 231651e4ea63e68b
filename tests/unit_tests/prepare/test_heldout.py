"""An honest held-out split, and references that share nothing with their sample."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.helpers import speech_corpora as corpora
from tests.helpers.sentences import refused
from titan_tts.records.columns import drawn
from torchtitan.models.dit_tts.data.dataset import open_dataset

AS_IS = {"audio": corpora.AS_IS}


def by_key(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray, dict]]:
    dataset = open_dataset(str(folder))
    return {dataset.key(n): (*dataset.read(n), dataset.metadata(n)) for n in range(len(dataset))}


def test_overlapping_segments_are_no_references_of_each_other(tmp_path):
    """A file of six seconds: four segments overlap their neighbours, and a fifth overlaps all."""
    sound = np.concatenate([one.samples for one in corpora.speech(3, ("slt",))])
    soundfile.write(tmp_path / "long.wav", sound[: 6 * corpora.RATE], corpora.RATE)
    row = {"audio": "long.wav", "text": "x", "speaker": "s"}
    rows = [
        row | {"key": f"{start}-{start + length}", "offset": start, "duration": length}
        for start, length in [*((start, 2) for start in range(4)), (0, 6)]
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "out"
    record = corpora.prepare(tmp_path / "list.jsonl", output, **AS_IS)
    assert record["summary"]["train"]["without_reference"] == 1
    others = {"0-2": {"2-4", "3-5"}, "1-3": {"3-5"}, "2-4": {"0-2"}, "3-5": {"0-2", "1-3"}}
    for key, (_, reference, metadata) in by_key(output / "train").items():
        name = metadata.get("reference_key")
        assert name in others[key] if key in others else name is None
        assert len(reference) == 50 * (key in others)


@pytest.mark.parametrize("by", ["speaker", "utterance"])
def test_held_out_by(tmp_path, by):
    """Speakers are read from the keys; a fraction that holds nothing out is refused before encoding."""
    keys = [speaker + number for speaker in "bcde" for number in "01"]
    source, output = corpora.write_tones(tmp_path, keys), tmp_path / "out"

    def prepare(fraction: float) -> dict:
        options = {"speaker_pattern": "^(.)", "heldout_by": by, "seed": 3}
        return corpora.prepare(source, output, **AS_IS, **options, heldout_fraction=fraction)

    fraction, name = min((drawn(one, 3), one) for one in ("bcde" if by == "speaker" else keys))
    refused(lambda: prepare(fraction), str(source), "holds nothing out", "another --seed")
    if by == "speaker":
        refused(lambda: prepare(0.0), "--heldout-fraction = 0 holds nothing out")
    assert not output.exists()
    prepare(fraction + 1e-6)
    train, held = by_key(output / "train"), by_key(output / "heldout")
    assert {key[: len(name)] for key in held} == {name} and len(held) == 3 - len(name)
    for split in (train, held) if by == "speaker" else ():
        for key, (_, reference, metadata) in split.items():
            other = key[0] + str(1 - int(key[1]))
            assert metadata["reference_key"] == other and other in split and len(reference)
