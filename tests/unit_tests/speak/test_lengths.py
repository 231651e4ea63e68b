"""Lengths of utterances: the ways to tell them, and how what the reference says corrects them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.row_model import CHANNELS
from tests.helpers.sentences import refused
from titan_tts.speak import lengths
from titan_tts.speak.lengths import Lengths, TimedText, open_lengths
from torchtitan.models.dit_tts.text.durations import LinearDurationModel

WEIGHTS = np.zeros(257)
WEIGHTS[ord("a")], WEIGHTS[ord("b")] = 2.0, 5.0
FIT = LinearDurationModel(WEIGHTS, {"ann": 3.0})
NOBODY = TimedText("aab", torch.zeros(0, CHANNELS))
SAID = replace(NOBODY, reference=torch.zeros(100, CHANNELS), reference_text="bbbbb")


@pytest.fixture
def alone(loaded, tmp_path):
    """A run without a predictor."""
    return replace(loaded, folder=tmp_path / "run")


def asked(run, choice: str = "", scale: float = 1.0) -> Lengths:
    return open_lengths(choice, scale, run, lambda: FIT)


def test_the_fit_is_the_default_and_lengths_are_scaled(alone):
    found = asked(alone)
    assert found.name == "the fit on the training data"
    assert found.frames([NOBODY, replace(NOBODY, speaker="ann")]) == [9, 27]
    assert asked(alone, "fit", 2.0).frames([NOBODY]) == [18]
    assert found.frames([replace(NOBODY, text="")]) == [1] and found.frames([]) == []


def test_a_reference_whose_text_is_known_corrects_the_estimate(alone):
    """It takes 100 frames where the fit says 25: by half, as it is of 100. A speaker's own rate is known
    better from all of the training data."""
    assert asked(alone).frames([SAID, NOBODY]) == [round(9 * 4**0.5), 9]
    assert asked(alone).frames([replace(SAID, speaker="ann")]) == [27]
    unsaid = replace(SAID, reference_text="zz")
    assert asked(alone).frames([unsaid]) == [9]  # the fit knows none of its letters


@pytest.mark.parametrize("frames", [4197, 1e300, np.inf, np.nan])
def test_a_length_that_no_speech_has_is_refused(frames):
    """Whoever tells it: 4,096 frames, and 25 for each of four characters."""
    found = Lengths(
        "the fit", lambda texts: [4196 if t.text == "aaaa" else frames for t in texts], 10
    )
    least = replace(NOBODY, text="aaaa")
    assert found.frames([least]) == [41960]
    asked = replace(NOBODY, text="abbb")
    refused(
        lambda: found.frames([least, asked]), "the fit gives", "'abbb'", "at most 4196", "--seconds"
    )


def test_the_rate_rule_has_as_many_frames_per_byte_as_the_reference(alone):
    found = asked(alone, "rate")
    assert found.frames([SAID, replace(SAID, text="äa")]) == [60, 60]
    refused(lambda: found.frames([SAID, NOBODY]), "--duration = rate", "--reference-text")


class Counting:
    """Predicts as many frames as there are characters, times the mean of the reference it is given."""

    def __init__(self):
        self.batches = []

    def __call__(self, model, tokenizer, requests, device, text_encoder):
        self.batches.append(len(requests))
        return [len(r.text) * float(r.reference.mean()) for r in requests]


def test_a_predictor_hears_as_much_of_the_reference_as_it_was_trained_on(alone, monkeypatch):
    predictor = SimpleNamespace(
        config=alone.config,
        model=None,
        tokenizer=None,
        device=None,
        text_encoder=None,
        step=5,
    )
    counting = Counting()
    monkeypatch.setattr(lengths, "predict_frames", counting)
    monkeypatch.setattr(lengths, "load_predictor", lambda folder, config, encoder: predictor)
    monkeypatch.setattr(lengths, "_BATCH", 2)
    found = asked(alone, "outputs/duration")
    assert found.name == "outputs/duration step 5"
    limit = alone.config.data.max_speaker_frames
    reference = torch.cat([torch.full((limit, CHANNELS), 4.0), torch.zeros(limit, CHANNELS)])
    text = replace(NOBODY, reference=reference)
    assert found.frames([text, replace(text, text="a"), text]) == [12, 4, 12]
    assert counting.batches == [2, 1]


def config_of(run, flavor: str, **data):
    """Another run's config."""
    model = replace(run.config.model, flavor=flavor)
    return replace(run.config, model=model, data=replace(run.config.data, **data))


@pytest.mark.parametrize(
    "place, flavor, path, found",
    [
        ("run/duration", "duration", "other data", True),
        ("duration", "duration", None, True),
        ("duration", "duration", "other data", False),
        ("run/duration", "debug", None, False),
        ("elsewhere", "duration", None, False),
    ],
)
def test_a_predictor_is_found_in_and_beside_the_run(
    alone, tmp_path, monkeypatch, place, flavor, path, found
):
    """Beside it only one of the same data."""
    there = tmp_path / place
    config = config_of(alone, flavor, path=path or alone.config.data.path)

    def load(folder):
        if folder != there:
            raise lengths.InputError("nothing")
        return config

    monkeypatch.setattr(lengths, "load_run_config", load)
    monkeypatch.setattr(lengths, "find_checkpoint", lambda *_: (5, ""))
    wanted = there if found else None
    assert lengths.find_predictor(alone.folder, alone.config) == wanted


@pytest.mark.parametrize(
    "flavor, data, words",
    [
        ("debug", {}, ["flavor = 'debug'", "give a run of 'duration'"]),
        ("duration", {"latent_channels": 7}, ["latent_channels = 7", "train a predictor"]),
        ("duration", {"frames_per_second": 50.0}, ["frames_per_second = 50.0"]),
    ],
)
def test_what_predicts_no_length_of_this_run_is_refused(
    alone, tmp_path, monkeypatch, flavor, data, words
):
    monkeypatch.setattr(lengths, "load_run_config", lambda _: config_of(alone, flavor, **data))
    refused(lambda: asked(alone, str(tmp_path)), f"--duration = {tmp_path}", *words)


@pytest.mark.parametrize("model, given", [("google-t5/t5-base", "/new/t5"), ("bytes", "")])
def test_a_predictor_finds_the_runs_encoder_where_it_is_now(
    alone, tmp_path, monkeypatch, model, given
):
    """Not where it has an encoder of its own."""
    alone.config.encoder.model = "google-t5/t5-base"
    own = config_of(alone, "duration")
    own.encoder = replace(own.encoder, model=model)
    asked = []
    monkeypatch.setattr(lengths, "load_run_config", lambda _: own)
    monkeypatch.setattr(
        lengths, "load_run", lambda *a, encoder: asked.append(encoder) or replace(alone, step=5)
    )
    open_lengths(str(tmp_path), 1.0, alone, lambda: FIT, "/new/t5")
    assert asked == [given]


def test_a_number_is_no_predictor(alone):
    refused(lambda: asked(alone, "3.5"), "--duration = 3.5", "fit, rate or the folder", "--seconds")
