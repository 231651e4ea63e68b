"""Recorded passes of a sampler, with a recorder that runs the function again on the same memory, as a graph does."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.small_models import random_model, small_args
from titan_tts.speak.sampling_options import SamplingOptions, load_synthesizer
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.infra.cuda_graphs import record_passes
from torchtitan.models.dit_tts.speech.sampling.sampler import SpeechRequest, generate_latents
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary

TOKENIZER = UnitTokenizer(make_vocabulary("bytes", "", [], {}))


class OnDeviceAlone(TorchDispatchMode):
    """Refuses what a graph cannot record: values that the host reads, and its own that go to the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "is_nonzero")
        assert not any(name in str(func) for name in waits), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("solver, scale", [("euler", 1.0), ("heun", 1.5)])
def test_replayed_passes_say_what_the_network_says(solver, scale):
    args = small_args(latent_channels=8, text_vocab_size=300, n_layers=2)
    plain, model = random_model(args).eval(), random_model(args).eval()
    recorded = []

    def record(function):
        with OnDeviceAlone():
            output = function()
        recorded.append(output.shape)
        return lambda: output.copy_(function()), output

    record_passes(model, record)
    sampling = Sampling(steps=8, solver=solver, text_scale=2.0, speaker_scale=1.0, min_t=0.5)
    sampling.speaker_kv_scale, sampling.speaker_kv_min_t = scale, 0.8
    draw, device = torch.Generator().manual_seed(2), torch.device("cpu")
    batches = [
        [("two of one length", 9), ("the same as it", 9)],
        [("longer", 14)],
        [("longer", 14)],
    ]
    for number, texts in enumerate(batches):
        requests = [SpeechRequest(t, torch.randn(n, 8, generator=draw), n) for t, n in texts]
        requests = [SpeechRequest(r.text.ljust(20), r.reference, r.frames) for r in requests]
        found, expected, other = (
            generate_latents(each, TOKENIZER, FlowMatching(), requests, sampling, seed, device)
            for each, seed in ((model, number), (plain, number), (plain, 9))
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert (found[0] - other[0]).abs().max() > 1e-2
    # With and without guidance, and with the speaker's other scale; anew for each batch.
    keys = 2 if scale == 1.0 else 3
    assert len(model.denoise_guided.passes) == keys
    assert len(recorded) == 3 * keys and {shape[0] for shape in recorded} == {2, 6, 1, 3}


def test_cuda_graphs_are_refused_on_a_cpu():
    for way in ("graphs", "reduce-overhead"):
        with pytest.raises(InputError, match=f"--compile {way} .* no GPU; take default or off"):
            load_synthesizer(SamplingOptions(compile=way))
