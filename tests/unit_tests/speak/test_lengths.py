"""Lengths of utterances: the estimators, and how a reference whose text is known corrects them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.row_model import CHANNELS
from tests.helpers.sentences import refused
from titan_tts.speak import lengths
from titan_tts.speak.lengths import Lengths, open_lengths
from titan_tts.speak.open_run import OpenRun
from titan_tts.speak.utterance import Utterance, Voice
from torchtitan.models.dit_tts.speech.sampling.sampler import speech_end
from torchtitan.models.dit_tts.text.durations import LinearDurationModel

WEIGHTS = np.zeros(257)
WEIGHTS[ord("a")], WEIGHTS[ord("b")] = 2.0, 5.0
FIT = LinearDurationModel(WEIGHTS, {"ann": 3.0})
NOBODY = Utterance("aab")
SAID = replace(NOBODY, voice=Voice(torch.zeros(50, CHANNELS), text="bbbbb"))


@pytest.fixture
def alone(loaded, tmp_path):
    """A run without a predictor."""
    return replace(loaded, folder=tmp_path / "run")


def asked(run, choice: str = "", scale: float = 1.0) -> Lengths:
    return open_lengths(choice, scale, run, lambda: FIT)


def of(utterance: Utterance, **voice) -> Utterance:
    return replace(utterance, voice=replace(utterance.voice, **voice))


def test_the_fit_is_the_default_and_lengths_are_scaled(alone):
    found = asked(alone)
    assert found.name == "the fit on the training data"
    assert found.frames([NOBODY, of(NOBODY, speaker="ann")]) == [9, 27]
    assert asked(alone, "fit", 2.0).frames([NOBODY]) == [18]
    assert found.frames([replace(NOBODY, text="")]) == [1] and found.frames([]) == []
    # A reference whose text is known takes 50 frames where the fit says 25: by the root, as 50 count half.
    assert found.frames([SAID, NOBODY]) == [round(9 * 2 ** (1 / 2)), 9]
    # A speaker's own rate is known better from all of the training data.
    assert found.frames([of(SAID, speaker="ann")]) == [27]
    assert found.frames([of(SAID, text="zz")]) == [9]  # the fit knows none of its letters
    assert found.frames([of(SAID, reference=None)]) == [9]


@pytest.mark.parametrize("frames, text", [(100, "bbbbb"), (25, "b" * 20), (51, "bbbbb")])
def test_a_text_that_is_not_of_the_reference_changes_no_pace(alone, frames, text):
    """Short ones may deviate by what a pause takes."""
    other = of(SAID, reference=torch.zeros(frames, CHANNELS), text=text)
    short = of(SAID, reference=torch.zeros(30, CHANNELS), text="bb")
    assert asked(alone).frames([other, short]) == [9, round(9 * 3 ** (3 / 8))]


def test_a_model_may_end_the_speech_itself(alone):
    """Trained on padding: rows of the longest length; estimates are for splitting texts."""
    config = replace(alone.config, objective=replace(alone.config.objective, loss_on_padding=True))
    run = replace(alone, config=config)
    longest = config.data.max_frames
    found = asked(run)
    assert found.name == "the model's own end" and found.frames([NOBODY]) == [9]
    assert found.generate([NOBODY, SAID]) == [longest, longest]
    refused(lambda: found.generate([replace(NOBODY, speed=1.5)]), "speed = 1.5", "decides itself")
    refused(lambda: asked(run, scale=2.0), "--duration-scale = 2", "decides itself")
    assert asked(run, "fit", 2.0).generate([NOBODY, replace(NOBODY, speed=2)]) == [18, 9]


def test_texts_in_another_language_are_read_in_it(alone):
    """J is not said alike in both; the grammar of numbers is of the first."""
    weights = np.zeros(257)
    weights[list("xdʒ".encode())] = 1, 10, 100, 100
    spanish = LinearDurationModel(weights, {}, "es", normalize="en")
    for encoder, frames in (("", 1), ("phones:es", 1), ("phones:en-us", 210)):
        found = open_lengths("fit", 1.0, alone, lambda: spanish, encoder)
        assert found.frames([Utterance("j")]) == [frames]


def test_where_speech_ends():
    """At the first of 20 silent frames, or at silence up to the end."""
    speech = torch.ones(100, CHANNELS)
    assert speech_end(speech) == 100
    pause = speech.clone()
    pause[30:49] = 0.1  # a frame less than silence takes
    assert speech_end(pause) == 100
    pause[49] = -0.29
    assert speech_end(pause) == 30
    pause[49] = 0.31
    pause[95:] = 0
    assert speech_end(pause) == 95
    pause[:25] = 0  # before it begins
    assert speech_end(pause) == 95
    assert speech_end(torch.zeros(7, CHANNELS)) == 1


@pytest.mark.parametrize("frames", [4197, np.inf, np.nan])
def test_a_length_that_no_speech_has_is_refused(frames):
    """Whatever estimates it: the limit is 4,096 frames, and 25 for each of four characters."""
    found = Lengths(
        "the fit", lambda said: [4196 if u.text == "aaaa" else frames for u in said], 10
    )
    assert found.frames([Utterance("aaaa")]) == [41960]
    words = "the fit gives", "'abbb'", "at most 4196", "--seconds"
    refused(lambda: found.frames([Utterance("aaaa"), Utterance("abbb")]), *words)


def test_a_predictor_hears_as_much_of_the_reference_as_it_was_trained_on(alone, monkeypatch):
    """In batches; it predicts here a frame per character, times the mean of the reference."""
    batches = []

    def predict(*given):
        requests = given[2]
        batches.append((len(requests), *given[:2], *given[3:], requests[0].metadata))
        return [len(r.text) * float(r.reference.mean()) for r in requests]

    names = ("model", "tokenizer", "device", "text_encoder")
    predictor = SimpleNamespace(config=alone.config, step=5, **{name: name for name in names})
    monkeypatch.setattr(lengths, "predict_frames", predict)
    opened = OpenRun(Path("outputs/duration"), alone.config, 5, "")
    monkeypatch.setattr(lengths, "open_predictor", lambda folder: opened)
    monkeypatch.setattr(lengths, "load_predictor", lambda opened, config, encoder: predictor)
    monkeypatch.setattr(lengths, "_BATCH", 2)
    found = asked(alone, "outputs/duration", 2.0)
    assert found.name == "outputs/duration step 5"
    limit = alone.config.data.max_speaker_frames
    reference = torch.cat([torch.full((limit, CHANNELS), 4.0), torch.zeros(limit, CHANNELS)])
    text = replace(of(NOBODY, reference=reference), conditions={"language": "de"})
    assert found.frames([text, replace(text, text="a"), text]) == [24, 8, 24]
    assert batches == [(number, *names, {"language": "de"}) for number in (2, 1)]
    # Of a known text's 12 frames it predicts 4; it has heard the voice, so that 100 would count half.
    assert found.frames([of(text, text="a")]) == [round(24 * 3 ** (12 / 112))]


def config_of(run, flavor: str, **data):
    """Another run's config."""
    model = replace(run.config.model, flavor=flavor)
    return replace(run.config, model=model, data=replace(run.config.data, **data))


@pytest.mark.parametrize(
    "place, flavor, same_data, is_found",
    [
        ("run/duration", "duration", False, True),
        ("duration", "duration", True, True),
        ("duration", "duration", False, False),
        ("run/duration", "debug", True, False),
    ],
)
def test_where_a_predictor_is_found(
    alone, tmp_path, monkeypatch, place, flavor, same_data, is_found
):
    data = {"path": alone.config.data.path if same_data else "other data"}
    opened = {tmp_path / place: config_of(alone, flavor, **data)}

    def load(folder):
        if folder not in opened:
            raise lengths.InputError("nothing")
        return OpenRun(folder, opened[folder], 5, "")

    monkeypatch.setattr(lengths, "open_run", load)
    found = lengths.find_predictor(alone.folder, alone.config)
    assert (found and found.folder) == (tmp_path / place if is_found else None)
    own = alone.folder / "duration"  # is taken where there are both
    opened[own] = config_of(alone, "duration")
    assert lengths.find_predictor(alone.folder, alone.config).folder == own
    model = tmp_path / "model"  # one that has its own, and is named
    (model / "duration").mkdir(parents=True)
    opened |= {model: alone.config, model / "duration": opened[own]}
    found = lengths.find_predictor(alone.folder, alone.config, str(model))
    assert found.folder == model / "duration"
    assert lengths.find_predictor(alone.folder, alone.config, "fit") is None


def test_which_predictors_are_loaded(alone, tmp_path, monkeypatch):
    """One with the run's frozen encoder finds that at its present path."""
    refused(lambda: asked(alone, "3.5"), "--duration = 3.5", "fit, the folder", "--seconds")
    loads = []

    def load(found, encoder):
        loads.append(encoder)
        return replace(alone, step=5)

    monkeypatch.setattr(lengths, "load_run", load)
    alone.config.encoder.model = "google-t5/t5-base"
    own = config_of(alone, "duration")
    for words, config in (
        ("but it must be fit", config_of(alone, "debug")),
        ("latent_channels = 7 and the run", config_of(alone, "duration", latent_channels=7)),
        ("frames_per_second = 50.0", config_of(alone, "duration", frames_per_second=50.0)),
        ("", own),
        ("", replace(own, encoder=replace(own.encoder, model="bytes"))),
    ):
        found = OpenRun(tmp_path, config, 5, "")
        monkeypatch.setattr(lengths, "open_run", lambda _, found=found: found)
        if words:
            refused(lambda: asked(alone, str(tmp_path)), f"--duration = {tmp_path}", words)
        else:
            open_lengths(str(tmp_path), 1.0, alone, lambda: FIT, "/new/t5")
    assert loads == ["/new/t5", ""]
