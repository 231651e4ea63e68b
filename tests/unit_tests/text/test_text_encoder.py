"""Pretrained text encoders: loaded exactly or not at all, on real tokens only, wherever they run."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from tests.helpers.packed_batches import packed_batch
from tests.helpers.pretrained_checkpoints import VOCAB_SIZE, WRITERS, encoded
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.objective import squared_error_sums
from torchtitan.models.dit_tts.forward_pass import ForwardPass
from torchtitan.models.dit_tts.model.args import TextEncoderSizes
from torchtitan.models.dit_tts.model.flops import text_encoder_flops
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model_config import DiTTTSModelConfig
from torchtitan.models.dit_tts.text.hf_encoder import find_source
from torchtitan.models.dit_tts.text.text_encoder import PretrainedTextEncoder, load_text_encoder

LENGTHS = (5, 30, 1, 17, 0, 23, 9, 4, 30)
ROUNDING = 1e-4
"""Thirty times what float32 leaves of features near 1 when rows are laid out otherwise; a token too many
or too few, or another place, changes more than a hundredth"""


def load(path, dtype="float32", device="cpu"):
    return load_text_encoder(Encoder(model=str(path), dtype=dtype), device)


def texts(lengths=LENGTHS):
    generator = np.random.default_rng(3)
    return [generator.integers(3, 300, size=length).tolist() for length in lengths]


def full_models_encoder(path):
    """The encoder inside the full model, loaded in transformers' usual way."""
    model = AutoModel.from_pretrained(path).eval()
    return model.get_encoder() if model.config.is_encoder_decoder else model


@torch.no_grad()
def alone(encoder, ids):
    """A text without padding through an encoder of transformers."""
    row = torch.tensor([ids])
    return encoder(input_ids=row, attention_mask=torch.ones_like(row)).last_hidden_state[0]


@pytest.mark.parametrize("name", WRITERS)
def test_features_are_the_full_models_in_any_batch(checkpoints, name):
    encoder, reference = load(checkpoints[name]), full_models_encoder(checkpoints[name])
    for ids, features in zip(texts(), encoded(encoder, texts()), strict=True):
        assert features.shape == (len(ids), encoder.width)
        if ids:
            expected = alone(reference, ids)
            assert expected.std() > 0.5  # equality of nothing would say nothing
            for found in (features, encoded(encoder, [ids])[0]):
                torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", WRITERS)
def test_padding_on_either_side_and_its_ids_change_nothing(checkpoints, name):
    encoder = load(checkpoints[name])
    ids = torch.randint(3, 300, (4, 20))
    mask = torch.zeros(4, 20, dtype=torch.bool)
    for row, (first, last) in enumerate([(0, 12), (8, 20), (5, 6), (7, 7)]):
        mask[row, first:last] = True
    once = encoder.train()(ids, mask)  # without dropout, always
    again = encoder(torch.where(mask, ids, VOCAB_SIZE + 3), mask)  # a conditioning token
    assert torch.equal(once, again)
    assert (once[~mask] == 0).all()
    without_text = encoder(ids, torch.zeros_like(mask))
    assert without_text.shape == (4, 20, encoder.width) and not without_text.any()
    reference = full_models_encoder(checkpoints[name])
    torch.testing.assert_close(
        once[1, 8:], alone(reference, ids[1, 8:].tolist()), rtol=0, atol=ROUNDING
    )


def test_a_text_beyond_the_positions_is_one_sentence(checkpoints):
    encoder = load(checkpoints["bert"])
    assert encoder.source.max_tokens == 126
    assert find_source(str(checkpoints["t5"])).max_tokens is None
    encoded(encoder, texts((126,)))
    with pytest.raises(InputError, match="127 tokens is longer than the 126"):
        encoded(encoder, texts((127,)))


@pytest.mark.parametrize("name", ["t5gemma2", "t5"])
def test_flops_are_the_counters(checkpoints, name):
    source = find_source(str(checkpoints[name]))
    sizes = TextEncoderSizes(*source.matmul_sizes(), trained=False)
    with torch.device("meta"):
        encoder = PretrainedTextEncoder(source)
    mask = np.arange(24) < np.array([24, 10, 14, 3])[:, None]
    rows = encoder.rows(mask)
    with FlopCounterMode(display=False) as counter:
        encoder(torch.zeros(4, 24, dtype=torch.long, device="meta"), mask, rows.to("meta"))
    assert counter.get_total_flops() == text_encoder_flops(sizes, *rows.shape)
    assert text_encoder_flops(TextEncoderSizes(*source.matmul_sizes(), True), 2, 9) == 3 * (
        text_encoder_flops(sizes, 2, 9)
    )


def test_an_empty_encoder_is_filled_exactly(checkpoints):
    path = checkpoints["t5gemma2"]
    with torch.device("meta"):
        encoder = PretrainedTextEncoder(find_source(str(path)))
    encoder.to_empty(device="cpu")
    for tensor in (*encoder.parameters(), *encoder.buffers()):
        tensor.data.copy_(torch.full_like(tensor, 77))
    encoder.load_weights(lambda parameter, value: parameter.copy_(value))
    expected = encoded(load(path), texts())
    assert all(map(torch.equal, encoded(encoder, texts()), expected))
    for buffer in encoder.buffers():
        buffer.copy_(torch.full_like(buffer, 77))
    encoder.reset_buffers()
    assert all(map(torch.equal, encoded(encoder, texts()), expected))


# Inside the model, where it trains.


def model_args(path, folder, *arguments):
    """Sizes of a model whose tokenizer has 3 ids more than the encoder."""
    sizes = dict(dim=16, n_layers=1, n_heads=2, mlp_dim=16)
    sizes |= {f"speaker_{name}": size for name, size in sizes.items()}
    args = DiTTTSModelConfig(**sizes, adaln_rank=2, timestep_dim=8)
    options = [f"--encoder.model={path}", f"--job.dump_folder={folder}", "--encoder.vocab_size=515"]
    args.update_from_config(load_config([*options, "--data.latent_channels=8", *arguments]))
    return args


@torch.no_grad()
def test_features_inside_the_model(checkpoints, tmp_path):
    """Tokens of the text have the encoder's features, ids behind them rows of the model's own."""
    path = checkpoints["t5gemma2"]
    args = model_args(path, tmp_path, "--encoder.no-frozen")
    assert (args.first_condition_id, args.condition_tokens) == (512, 3)
    model = DiTTTSModel(args)
    model.init_weights()
    seen = []
    model.text_input.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    ids = torch.tensor([[514, 512, 5, 6, 7, 8], [513, 9, 511, 0, 0, 0]])
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    speaker = torch.zeros(2, 4, 8), torch.ones(2, 4, dtype=torch.bool)
    model.encode_conditions(ids, mask, *speaker)
    table, texts = model.condition_embedding.weight, encoded(load(path), [[5, 6, 7, 8], [9, 511]])
    for found, rows, text in ((seen[0][0], [2, 0], texts[0]), (seen[0][1, :3], [1], texts[1])):
        expected = torch.cat([table[rows], text])
        torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("where", ("trained", "frozen"))
def test_texts_of_a_packed_batch(checkpoints, tmp_path, name, where):
    """Losses and gradients are those of the padded batch, in which one text is of conditioning tokens only."""
    options = ["--encoder.no-frozen"] if where == "trained" else []
    model = DiTTTSModel(model_args(checkpoints[name], tmp_path, *options))
    model.init_weights()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if not parameter.any() else None
    frozen = None if where == "trained" else load(checkpoints[name])
    ids = torch.tensor([[514, 512, 5, 6, 7, 8], [513] + [0] * 5, [514, 9, 511, 4, 0, 0]])
    lengths, frames, speaker = (torch.tensor(n) for n in ([6, 1, 4], [9, 14, 4], [8, 3, 0]))
    draw = torch.Generator().manual_seed(1)
    batch = {
        "latents": torch.randn(3, 16, 8, generator=draw),
        "speaker": torch.randn(3, 8, 8, generator=draw)
        * (torch.arange(8) < speaker[:, None])[..., None],
        **{"frames": frames, "text_tokens": lengths, "speaker_frames": speaker},
        **{"text_ids": ids, "text_positions": torch.rand(3, 6)},
        **{"global_batch": torch.tensor(4), "global_batch_size": torch.tensor(3)},
        **{"row": torch.arange(3)},
    }
    config = load_config(["--data.latent_channels=8", f"--job.dump_folder={tmp_path}"])
    found = []
    for each in (batch, packed_batch(batch, 5, 40)):
        ways = model, frozen, 512, squared_error_sums, torch.device("cpu"), nullcontext()
        of_batch = ForwardPass(config, *ways)
        model.zero_grad()
        loss = of_batch.loss_sum(of_batch.to_device(each))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert sum(each.norm() > 1e-3 for each in found[0]) > 0.9 * len(found[0]) > 20
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm().clamp_min(1e-2)
