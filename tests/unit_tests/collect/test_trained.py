"""A collected set to the end: trained, balanced by speakers, from tars, from Parquet and from the hub."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.helpers import speech_corpora as corpora
from tests.helpers.collecting import read_rows
from titan_tts.cli import main
from tools.harness.stand_in_analyzer import RATE

STEPS, BATCH = 40, 8


def write_recordings(folder: Path) -> None:
    """Five of five seconds by a quiet voice, one of four by a loud one."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number, (level, seconds) in enumerate([(0.1, 5)] * 5 + [(0.9, 4)]):
        noise = level * rng.uniform(-1, 1, RATE * seconds)
        soundfile.write(folder / f"{number}.wav", noise, RATE)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_collected_set_trains_alike_from_wherever_it_lies(collect, hub, train, tmp_path):
    write_recordings(tmp_path / "recordings")
    assert collect(tmp_path / "recordings", tmp_path / "collected") == 0
    speakers = {row["id"]: row["speaker"] for row in read_rows(tmp_path / "collected")}
    assert sorted(Counter(speakers.values()).values()) == [4, 25]
    corpora.prepare(
        tmp_path / "collected/collection.jsonl", tmp_path / "data", samples_per_shard=10
    )
    data = str(tmp_path / "data")
    assert main(["data", "push", data, "me/tars", "--license=cc0-1.0"]) == 0
    heard = {}
    for name, path in {"tars": f"{data}/train", "pushed": "hf://me/tars/train"}.items():
        keys = f"steps={STEPS} global_batch_size={BATCH} local_batch_size={BATCH}".split()
        keys = [f"--training.{key}" for key in keys] + ["--data.latent-channels=128"]
        keys += ["--data.audit", "--data.use-sample-weights", "--data.verbatim-fraction=0.5"]
        assert train(name, f"--data.path={path}", *keys) == 0
        [audit] = (tmp_path / name / "audit").iterdir()
        heard[name] = [json.loads(line)["ids"] for line in audit.read_text().splitlines()]
    assert all(ids == heard["tars"] for ids in heard.values())
    drawn = Counter(speakers[name.split(":")[-1]] for ids in heard["tars"] for name in ids)
    # As the square roots of what there is of each: 5 to 2, where 25 to 4 would be without weights.
    assert drawn.total() == STEPS * BATCH
    assert min(drawn.values()) / drawn.total() == pytest.approx(2 / 7, abs=0.04)
