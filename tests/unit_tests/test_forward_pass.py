"""An array that the README's recipe adds to a batch reaches every caller of the network."""

import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.exported_run import export
from tests.helpers.small_models import random_model, small_args
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.data import members
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.forward_pass import ForwardPass
from torchtitan.models.dit_tts.model import conditions
from torchtitan.models.dit_tts.speech.sampling.sampler import SpeechRequest, encode_requests
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed")]

F0 = members.ArrayMember("f0", "f0.npy", length="frames", entry="f0", width=1)


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """Samples whose f0 is the first channel of their latents."""
    monkeypatch.setattr(members, "ARRAYS", (*members.ARRAYS, F0))
    samples = make_samples(24, channels=8, frames=lambda draw: int(draw.integers(8, 33)))
    for sample in samples:
        sample.other_arrays["f0"] = sample.latents[:, :1]
    (folder := tmp_path / "data").mkdir()
    write_shard(folder / "a.tar", samples)
    return folder


@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """The callers that gave the network an f0, which is added at the one place that the README names."""
    plain, encode = conditions.condition_inputs, conditions.ConditionedModel.encode_conditions
    callers: list[str] = []

    def inputs(batch):
        return plain(batch) | {"f0": batch["f0"]}

    def encode_with_f0(model, *given, f0, **more):
        assert f0.shape[-1] == 1 and f0.abs().max() > 0
        trains = any(parameter.requires_grad for parameter in model.parameters())
        kind = "training" if torch.is_grad_enabled() else "validation"
        callers.append(kind if trains else "teacher")
        return encode(model, *given, **more)

    for module in list(sys.modules.values()):
        if getattr(module, "condition_inputs", None) is plain:
            monkeypatch.setattr(module, "condition_inputs", inputs)
    monkeypatch.setattr(conditions.ConditionedModel, "encode_conditions", encode_with_f0)
    return callers


@pytest.mark.parametrize("batching", [[], ["--data.batching=packed", "--data.longest_per_row=2"]])
def test_a_new_array_reaches_training_validation_and_the_teacher(
    data, seen, train, tmp_path, batching
):
    common = [f"--data.path={data}", f"--validation.path={data}", "--validation.samples=8"]
    common += ["--training.steps=1", *batching]
    assert train("teacher", *common) == 0
    assert set(seen) == {"training", "validation"}
    export(tmp_path / "teacher", tmp_path / "exported")
    seen.clear()
    student = ["--sampling.steps=3", "--sampling.text_scale=0", "--distill.teacher_steps=2"]
    assert train("student", *common, *student, f"--distill.teacher={tmp_path / 'exported'}") == 0
    assert set(seen) == {"training", "validation", "teacher"}


def test_a_request_without_it_is_not_spoken_in_silence(seen):
    """Generation reads its batch at the same place."""
    model = random_model(small_args(latent_channels=8, text_vocab_size=300))
    tokenizer = UnitTokenizer(make_vocabulary("bytes", "", [], {}))
    request = SpeechRequest("one", torch.zeros(4, 8), 5)
    with pytest.raises(KeyError, match="f0"):
        encode_requests(model, tokenizer, [request], torch.device("cpu"))


@pytest.mark.parametrize("on_padding", [False, True])
def test_validation_has_the_frames_of_training(tiny_data, train, monkeypatch, on_padding):
    """A model that learns where speech ends is validated on whole rows, silence included."""
    masks, predict = {True: [], False: []}, ForwardPass.predict

    def seen(of_batch, batch, *given, **more):
        masks[torch.is_grad_enabled()].append(batch["frame_mask"])
        return predict(of_batch, batch, *given, **more)

    monkeypatch.setattr(ForwardPass, "predict", seen)
    own = ["--objective.loss_on_padding", "--data.num_buckets=1"] if on_padding else []
    common = [f"--validation.path={tiny_data}", "--validation.samples=8", "--training.steps=1"]
    assert train("run", *common, *own) == 0
    for found in masks.values():
        assert found and all(mask.any(1).all() for mask in found)
        assert all(mask.all() and mask.shape[1] == 32 for mask in found) == on_padding
