"""The figures of a validation against their definition, with networks of one line."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.helpers.fixed_sets import CHANNELS, HELDOUT, fixed_set, write_rows
from torchtitan.models.dit_tts.config.job_config import Validation
from torchtitan.models.dit_tts.flow.counter_rng import normal, stream_keys
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.model.conditions import Conditions
from torchtitan.models.dit_tts.validation.heldout_loss import HeldoutLoss, figures

TIMES = [1.0, 0.9, 0.25]
CONDITIONS = ("text_ids", "text_tokens", "speaker", "speaker_frames")
TRAINING = [("seven", "ann", 5, 4), ("eight", "bob", 17, 3)]


@pytest.fixture
def folders(tmp_path):
    return write_rows(tmp_path / "heldout", HELDOUT), write_rows(tmp_path / "train", TRAINING)


def encode(batch) -> Conditions:
    """Of each text the mean of its ids, of each reference its mean."""
    text, speaker = (
        torch.arange(batch[name].shape[1]) < batch[count][:, None]
        for name, count in (("text_ids", "text_tokens"), ("speaker", "speaker_frames"))
    )
    ids = (batch["text_ids"] * text).sum(1) / text.sum(1)
    count = speaker.sum(1, keepdim=True).clamp_min(1)
    voice = (batch["speaker"] * speaker[..., None]).sum(1) / count
    return Conditions(ids, text, voice, speaker)


def denoise(batch, noisy, t, conditions) -> torch.Tensor:
    shift = 0.01 * conditions.text[:, None, None] + conditions.speaker[:, None]
    return 0.5 * noisy - shift * t[:, None, None]


def deaf(batch, noisy, t, conditions) -> torch.Tensor:
    return 0.5 * noisy + conditions.speaker[:, None]


def measurer(
    folders, network: Callable = denoise, batch_size: int = 2, objective=None, seed=3, **more: Any
) -> HeldoutLoss:
    sets = [fixed_set(folder, batch_size=batch_size) for folder in folders]
    objective = objective or FlowMatching()

    def to_device(batch):
        mask = torch.arange(batch["latents"].shape[1]) < batch["frames"][:, None]
        return batch | {"frame_mask": mask}

    forward_pass: Any = SimpleNamespace(
        encode=encode,
        predict=network,
        to_device=to_device,
        device=torch.device("cpu"),
        teacher=None,
    )
    validation = Validation(times=TIMES, seed=seed)
    return HeldoutLoss(*sets, validation, objective, forward_pass, **more)


def by_hand(folder, network, prediction: str, stream: int, kind: str = "") -> list[float]:
    """Row by row, without padding."""
    fixed, found = fixed_set(folder, batch_size=2), []
    for position, t in enumerate(TIMES):
        total = frames = 0.0
        for number in range(len(fixed.batches)):
            batch = fixed.load(number)
            for row, place in enumerate(batch.rows.tolist()):
                length = int(batch.inputs["frames"][row])
                clean = batch.inputs["latents"][row, :length]
                keys = stream_keys(3, torch.tensor(position), torch.tensor([place]), stream)
                noise = normal(keys, (length, CHANNELS))[0]
                noisy = (1 - t) * clean + t * noise
                target = noise - clean if prediction == "velocity" else noise
                losses = []
                for entries in ({}, batch.others[kind][0] if kind else {}):
                    inputs = {**batch.inputs, **entries}
                    conditions = encode({n: inputs[n][row : row + 1] for n in CONDITIONS})
                    output = network(inputs, noisy[None], torch.tensor([t]), conditions)[0]
                    losses.append(float((output - target).double().square().mean(-1).sum()))
                if kind and not bool(batch.others[kind][1][row]):
                    continue
                total += losses[1] - losses[0] if kind else losses[0]
                frames += length
        found.append(total / frames)
    return found


@pytest.mark.parametrize("prediction", ["velocity", "noise"])
def test_against_its_definition(folders, prediction):
    objective = FlowMatching(prediction=prediction)
    found = measurer(folders, objective=objective).measure(gains=True)
    heldout, training = folders
    expected = {
        "heldout_loss": by_hand(heldout, denoise, prediction, 300),
        "training_loss": by_hand(training, denoise, prediction, 301),
        "text_gain": by_hand(heldout, denoise, prediction, 300, "text_gain"),
        "speaker_gain": by_hand(heldout, denoise, prediction, 300, "speaker_gain"),
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == torch.float64
        assert found[name].tolist() == pytest.approx(values, abs=1e-5), name
    assert len({round(v, 4) for values in expected.values() for v in values}) == 12
    assert measurer(folders, objective=objective).measure(gains=False).keys() == {
        "heldout_loss",
        "training_loss",
    }


def test_a_figure_of_rows_is_their_mean(folders):
    """Rows count alike, however long they are."""
    more = {"seconds": lambda output, mask: mask.sum(1) / 25}
    found = measurer(folders, row_figures=more).measure(gains=True)
    lengths = [frames for *_, frames, _ in HELDOUT]
    assert found["seconds"].tolist() == pytest.approx([sum(lengths) / len(lengths) / 25] * 3)


def test_a_network_without_ears_for_the_text_gains_exactly_nothing(folders):
    found = measurer(folders, deaf).measure(gains=True)
    assert found["text_gain"].tolist() == [0.0] * 3
    assert found["speaker_gain"].abs().min() > 0.001


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_same_on_any_number_of_ranks(folders, ranks, monkeypatch):
    alone = measurer(folders).measure(gains=True)
    networks, seen = [Mock(wraps=denoise) for _ in range(ranks)], list[torch.Tensor]()
    # Rank by rank: the sums that the ranks would exchange.
    exchange = lambda values, group: seen.append(values.clone())  # noqa: E731
    monkeypatch.setattr(torch.distributed, "all_reduce", exchange)
    for rank, network in enumerate(networks):
        measurer(folders, network, rank=rank, ranks=ranks, group=object()).measure(gains=True)
    # Sharded weights are gathered by all ranks at once.
    assert len({network.call_count for network in networks}) == 1
    heldout, training = (sum(seen[kind::2]).sum(2) for kind in (0, 1))
    gain = (heldout[1, :, 0] - heldout[1, :, 2]) / heldout[1, :, 1]
    assert gain.tolist() == alone["text_gain"].tolist()
    for name, sums in (("heldout_loss", heldout), ("training_loss", training)):
        assert (sums[0, :, 0] / sums[0, :, 1]).tolist() == alone[name].tolist()


def test_the_noise_is_fixed_and_of_its_own_seed(folders):
    one, other = measurer(folders), measurer(folders, seed=4)
    first, second = one.measure(gains=True), one.measure(gains=True)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.isclose(first["heldout_loss"], other.measure(False)["heldout_loss"]).any()
    # A set of its own has noise of its own, or a training sample's would be a held-out one's.
    same = measurer((folders[0], folders[0])).measure(gains=False)
    assert not torch.isclose(same["heldout_loss"], same["training_loss"], atol=1e-6).any()


def test_figures_of_a_row():
    def losses(heldout, training, **more):
        values = {"heldout_loss": heldout, "training_loss": training, **more}
        return {name: torch.tensor(each, dtype=torch.float64) for name, each in values.items()}

    by_weights = {
        "raw": losses([1.0, 2.0], [1.0, 1.0]),
        "ema:0.9": losses([0.5, 1.5], [0.25, 1.0]),
        "ema:0.99": losses(
            [2.0, 3.0], [1.0, 1.0], text_gain=[0.5, 0.25], speaker_gain=[math.nan] * 2
        ),
    }
    expected = {"weights": "ema:0.99", "best_heldout_loss": 1.0, "best_weights": "ema:0.9"}
    for name, mean, at_09, at_025 in (
        ("heldout_loss", 2.5, 2.0, 3.0),
        ("training_loss", 1.0, 1.0, 1.0),
        ("gap", 1.5, 1.0, 2.0),
        ("text_gain", 0.375, 0.5, 0.25),
        ("speaker_gain", None, None, None),
    ):
        expected |= {name: mean, f"{name}_at_0.9": at_09, f"{name}_at_0.25": at_025}
    for name, heldout, training, gap in (
        ("raw", 1.5, 1.0, 0.5),
        ("ema:0.9", 1.0, 0.625, 0.375),
        ("ema:0.99", 2.5, 1.0, 1.5),
    ):
        means = {"heldout_loss": heldout, "training_loss": training, "gap": gap}
        expected |= {f"{figure}_{name}": value for figure, value in means.items()}
    assert figures(by_weights, [0.9, 0.25], "ema:0.99") == expected


def test_what_is_no_number_is_null_and_never_the_best(folders):
    broken = measurer(folders, lambda batch, noisy, t, conditions: noisy * math.nan).measure(
        gains=True
    )
    fine = measurer(folders).measure(gains=False)
    row = figures({"raw": fine, "ema:0.9": broken}, TIMES, "ema:0.9")
    assert row["heldout_loss"] is row["gap"] is row["text_gain"] is None
    assert row["heldout_loss_at_0.25"] is None
    assert row["best_weights"] == "raw"
    assert row["best_heldout_loss"] == row["heldout_loss_raw"] is not None
    assert figures({"raw": broken}, TIMES, "raw")["best_heldout_loss"] is None
