"""What the figures say of runs whose outcome is known: one that memorises, one that learns what texts
sound like, and one whose texts belong to other recordings."""

import json
from pathlib import Path

import pytest

from tests.helpers.speaking_latents import make_speaking_shards
from tests.helpers.tiny_runs import Folder
from titan_tts.speak.load_run import load_run

pytestmark = pytest.mark.long
OPTIONS = [
    "--validation.samples=48",
    "--validation.batch_size=48",
    "--validation.times=0.95,0.8,0.5",
    "--ema.decays=0.8",
    "--data.num_buckets=1",
    "--training.global_batch_size=16",
    "--training.local_batch_size=16",
    "--metrics.log_freq=1000",
    "--checkpoint.interval=25",
    "--checkpoint.keep_latest_k=2",
]


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]


def test_memorising(tmp_path, train):
    """64 utterances that are mostly noise, hundreds of times over: the training loss falls, the held-out
    loss rises from its minimum on, and the checkpoint of the minimum is there."""
    data = make_speaking_shards(tmp_path / "data/train", 64, 1, noise=1.0)
    make_speaking_shards(tmp_path / "data/heldout", 48, 2, noise=1.0)
    more = ["--optimizer.lr=0.02", "--training.steps=400", "--validation.freq=50"]
    more += ["--training.global_batch_size=32", "--training.local_batch_size=32"]
    assert train("run", f"--data.path={data}", *OPTIONS, *more) == 0
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == list(range(50, 401, 50))
    training = [row["training_loss_raw"] for row in found]
    assert training == sorted(training, reverse=True) and training[-1] < 0.8 * training[0], training
    heldout = [row["best_heldout_loss"] for row in found]
    lowest = heldout.index(min(heldout))
    assert lowest < 5 and heldout[-1] > heldout[lowest] + 0.05, heldout
    gaps = [row["gap"] for row in found]
    assert gaps == sorted(gaps) and gaps[-1] > 1.5 * gaps[lowest]
    best = found[lowest]["step"]
    # The last step's comes on top of the latest two.
    kept = {"step-350", "step-375", "step-400"}
    assert best < 350 and Folder(tmp_path / "run").checkpoints() == kept | {f"step-{best}"}
    loaded = load_run(tmp_path / "run", step="best")
    assert loaded.step == best and loaded.weights == found[lowest]["best_weights"]


def test_texts_of_other_recordings_gain_nothing(tmp_path, train):
    gains = {}
    make_speaking_shards(tmp_path / "heldout", 48, 2)
    for name in ("right", "shuffled"):
        data = make_speaking_shards(tmp_path / name, 800, 1, shuffled=name == "shuffled")
        assert train(f"{name}_run", f"--data.path={data}", *OPTIONS, "--training.steps=200") == 0
        (row,) = rows(tmp_path / f"{name}_run")
        gains[name] = row
    right, shuffled = gains["right"]["text_gain"], gains["shuffled"]["text_gain"]
    assert right > 0.03 and abs(shuffled) < right / 10
    # The voice is of use to both.
    assert min(row["speaker_gain"] for row in gains.values()) > 0.5
