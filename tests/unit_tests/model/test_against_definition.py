"""The network against its definition written out: one sample at a time, without padding or masks,
in float64. What a sample does not have is not there, rather than masked."""

import math
import zlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.small_models import padded_inputs, random_model, small_args
from torchtitan.models.dit_tts.model.args import DiTTTSModelArgs
from torchtitan.models.dit_tts.model.model import DiTTTSModel

VOCABULARY, PATCH = 40, 4
ARGS = small_args(
    speaker_n_layers=2,
    latent_channels=8,
    text_dim=16,
    text_vocab_size=VOCABULARY,
    text_n_layers=2,
)
POSITIONED = replace(ARGS, text_positions="aligned")
CONDITIONED = replace(
    POSITIONED, text_vocab_size=0, first_condition_id=VOCABULARY, condition_tokens=3
)
"""Text features come from outside; the last 3 ids have a row of the model's own."""

Weights = dict[str, Tensor]


# ---- the definition, straight from the state dict
# Shapes: T frames, L keys of a condition, D width, H heads of K channels


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def normed(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """(T, K): the pair (i, i + K/2), as a complex number, turned by position·10000^(-2i/K)."""
    frequencies = 10000.0 ** -(torch.arange(0, x.shape[1], 2).double() / x.shape[1])
    turns = torch.exp(1j * positions[:, None] * frequencies)
    pairs = torch.complex(*x.chunk(2, dim=1)) * turns
    return torch.cat([pairs.real, pairs.imag], dim=1)


def attention(
    w: Weights,
    name: str,
    x: Tensor,
    rotated_heads: int,
    causal: bool,
    contexts: dict[str, tuple[Tensor, Tensor]],
) -> Tensor:
    """(T, D); one softmax over the keys of x and of the contexts: projection's name -> (L, c), and the
    positions (L,) of its keys."""
    q_norm, k_norm = w[f"{name}.q_norm.weight"], w[f"{name}.k_norm.weight"]
    n_heads, width = q_norm.shape

    def per_head(projection: str, source: Tensor) -> Tensor:
        """(H, parts, L, K): the rows of the weight are head by head, and part by part in a head."""
        rows = w[f"{name}.{projection}.weight"].view(n_heads, -1, width, source.shape[1])
        return torch.einsum("hpkc,lc->hplk", rows, source)

    own = per_head("qkv_gate", x)
    others = [(per_head(kind, source), at) for kind, (source, at) in contexts.items()]
    frames = torch.arange(len(x)).double()
    heads = []
    for head in range(n_heads):
        q, k, v, gate = own[head]
        q, k = normed(q, q_norm[head]), normed(k, k_norm[head])
        keys = [(k, frames), *((normed(y[head, 0], k_norm[head]), at) for y, at in others)]
        if head < rotated_heads:
            q, keys = rotated(q, frames), [(rotated(k, at), at) for k, at in keys]
        keys = torch.cat([k for k, _ in keys])
        values = torch.cat([v, *(other[head, 1] for other, _ in others)])
        scores = q @ keys.T / math.sqrt(width)
        if causal:
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        weights = scores.exp() / scores.exp().sum(1, keepdim=True)
        heads.append(weights @ values / (1 + torch.exp(-gate)))
    return linear(w, f"{name}.out", torch.cat(heads, dim=1))


def mlp(w: Weights, name: str, x: Tensor, n_blocks: int) -> Tensor:
    """The rows of the weight are block by block, first a block's gates and then its ups."""
    both = linear(w, f"{name}.gate_and_up", x).chunk(2 * n_blocks, dim=1)
    return linear(w, f"{name}.down", silu(torch.cat(both[0::2], 1)) * torch.cat(both[1::2], 1))


def encoder(w: Weights, name: str, x: Tensor, n_layers: int, causal: bool) -> Tensor:
    for block in (f"{name}.layers.{layer}" for layer in range(n_layers)):
        n_heads = len(w[f"{block}.attention.q_norm.weight"])
        h = normed(x, w[f"{block}.attention_norm.weight"])
        x = x + attention(w, f"{block}.attention", h, n_heads, causal, {})
        x = x + mlp(w, f"{block}.mlp", normed(x, w[f"{block}.mlp_norm.weight"]), n_heads)
    return normed(x, w[f"{name}.norm.weight"])


def speaker_keys(w: Weights, latents: Tensor) -> Tensor:
    """(S, C) to (ceil(S / patch), c)."""
    missing = torch.zeros(-len(latents) % PATCH, latents.shape[1])
    patches = torch.cat([latents, missing]).view(-1, PATCH * latents.shape[1])
    return encoder(w, "speaker_encoder", linear(w, "speaker_encoder.input", patches), 2, True)


def text_features(w: Weights, ids: Tensor) -> Tensor:
    return encoder(w, "text_encoder", w["text_encoder.embedding.weight"][ids], 2, False)


def modulation(w: Weights, name: str, shared: Tensor, what: int, where: int) -> Tensor:
    """what: 0 shift, 1 scale, 2 gate; where: 0 attention, 1 MLP."""
    width = len(shared[what])
    down = w[f"{name}.down.weight"].view(3, 2, -1, width)[what, where]
    up = w[f"{name}.up.weight"].view(3, 2, width, -1)[what, where]
    bias = w[f"{name}.up.bias"].view(3, 2, width)[what, where]
    return up @ (down @ silu(shared[what])) + bias + shared[what]


def decoder_block(w: Weights, name: str, x: Tensor, shared: Tensor, contexts) -> Tensor:
    n_heads = len(w[f"{name}.attention.q_norm.weight"])
    for where, function in enumerate(
        (
            lambda h: attention(w, f"{name}.attention", h, n_heads // 2, False, contexts),
            lambda h: mlp(w, f"{name}.mlp", h, n_heads),
        )
    ):
        shift, scale, gate = (modulation(w, f"{name}.adaln", shared, n, where) for n in range(3))
        x = x + torch.tanh(gate) * function(normed(x) * (1 + scale) + shift)
    return x


def shared_modulation(w: Weights, t: Tensor) -> Tensor:
    """(3, D)."""
    half = w["timestep.layers.0.weight"].shape[1] // 2
    angles = t.double() * 1000 * torch.exp(-math.log(10000) * torch.arange(half).double() / half)
    x = torch.cat([angles.cos(), angles.sin()])
    x = silu(linear(w, "timestep.layers.2", silu(linear(w, "timestep.layers.0", x))))
    return linear(w, "timestep.layers.4", x).view(3, -1)


def encoded_text(w: Weights, sample: dict[str, Tensor]) -> Tensor:
    return normed(linear(w, "text_input", sample["features"]), w["text_norm.weight"])


def predicted(w: Weights, sample: dict[str, Tensor]) -> Tensor:
    """(T, C) for one sample, which has no "features" or "speaker" where they are dropped."""
    contexts = {}
    if "features" in sample:
        contexts["text_kv"] = encoded_text(w, sample), sample["positions"]
    if "speaker" in sample:
        speaker = speaker_keys(w, sample["speaker"])
        contexts["speaker_kv"] = speaker, torch.zeros(len(speaker))
    x = linear(w, "input", sample["latents"])
    for layer in range(2):
        x = decoder_block(w, f"layers.{layer}", x, shared_modulation(w, sample["t"]), contexts)
    return linear(w, "output", normed(x, w["norm.weight"]))


def log_frames(w: Weights, sample: dict[str, Tensor]) -> Tensor:
    """The duration predictor: the sum of each token's frames, which depend on three tokens on each side."""
    x = linear(w, "input", encoded_text(w, sample))
    voice = torch.zeros(ARGS.speaker_dim, dtype=torch.float64)
    if "speaker" in sample:
        voice = speaker_keys(w, sample["speaker"]).mean(0)
    for layer in ("layers.0", "layers.1"):
        scale, shift = linear(w, f"{layer}.voice", voice).chunk(2)
        h, near = normed(x) * (1 + scale) + shift, w[f"{layer}.near"]
        mixed = [
            sum(h[j] * near[:, j - i + 3] for j in range(max(0, i - 3), min(len(h), i + 4)))
            for i in range(len(h))
        ]
        x = x + mlp(w, f"{layer}.mlp", torch.stack(mixed), ARGS.n_heads)
    return linear(w, "output", normed(x, w["norm.weight"])).exp().sum().log()


# ---- the product, on a batch with padding


FRAMES, TEXT, SPEAKER = [11, 6, 9, 1, 7], [4, 7, 3, 5, 1], [10, 4, 13, 5, 1]
KEEP_TEXT = [True, True, False, True, False]
KEEP_SPEAKER = [True, True, True, False, False]


def inputs(args: DiTTTSModelArgs) -> dict[str, Tensor]:
    """Five rows of other lengths; the last drop text, speaker and both."""
    batch = padded_inputs(args, FRAMES, TEXT, SPEAKER, seed=8) | {
        "t": torch.tensor([0.9, 0.013, 0.5, 1.0, 0.0]),
        "keep_text": torch.tensor(KEEP_TEXT),
        "keep_speaker": torch.tensor(KEEP_SPEAKER),
    }
    if args.condition_tokens:
        ids = batch["text_ids"]
        ids[:, 0] = args.first_condition_id + torch.tensor([0, 1, 2, 0, 1])
        batch["text_positions"] = batch["text_positions"].where(ids < VOCABULARY, -1.0)
    return batch


def samples(w: Weights, batch: dict[str, Tensor], args: DiTTTSModelArgs) -> list[dict[str, Tensor]]:
    """The rows, each with what it has."""
    found = []
    for row, (frames, text, speaker) in enumerate(zip(FRAMES, TEXT, SPEAKER)):
        sample = {"latents": batch["latents"][row, :frames].double(), "t": batch["t"][row]}
        if KEEP_TEXT[row] or args.task == "duration":  # which needs one
            ids = batch["text_ids"][row, :text]
            if args.condition_tokens:
                table, base = w["condition_embedding.weight"], args.first_condition_id
                rows = zip(ids.tolist(), batch["text_features"][row].double())
                sample["features"] = torch.stack(
                    [table[i - base] if i >= base else x for i, x in rows]
                )
            else:
                sample["features"] = text_features(w, ids)
            sample["positions"] = torch.zeros(text)
            if args.text_positions == "aligned":
                places = batch["text_positions"][row, :text].double()
                sample["positions"] = torch.tensor(
                    [place * frames - 0.5 if place >= 0 else 0.0 for place in places]
                )
        if KEEP_SPEAKER[row]:
            sample["speaker"] = batch["speaker"][row, :speaker].double()
        found.append(sample)
    return found


def in_float64(model: DiTTTSModel) -> Weights:
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def assert_near(found: Tensor, expected: Tensor, name: str = "") -> None:
    """Float32 is within 4e-6 of the largest output and, as t·1000 is an angle, within 1.4e-5 of the
    largest gradient; a wrong formula is off by more than a hundredth."""
    largest = expected.abs().max()
    assert found.shape == expected.shape and largest > 1e-3, name
    assert (found.double() - expected).abs().max() < 3e-4 * largest, name


@pytest.mark.parametrize(
    "args",
    [
        ARGS,
        CONDITIONED,
        replace(ARGS, task="duration"),
        *(replace(POSITIONED, attention=each) for each in ("auto", "matmul", "varlen")),
    ],
    ids=["learned", "from outside", "duration", "positions", "matmul", "varlen"],
)
def test_the_network_and_its_gradients_are_as_defined(args):
    model, batch = random_model(args, seed=7), inputs(args)
    w, generator = in_float64(model), torch.Generator().manual_seed(9)
    found, expected = model(**batch), []
    for sample in samples(w, batch, args):
        expected.append((log_frames if args.task == "duration" else predicted)(w, sample))
    losses, wanted_losses = [], []
    assert found.dtype == torch.float32
    for row, (frames, wanted) in enumerate(zip(FRAMES, expected, strict=True)):
        actual = found[row, :frames] if found.dim() > 1 else found[row]
        assert_near(actual, wanted, f"row {row}")
        weight = 10 * torch.randn(actual.shape, generator=generator)
        losses.append((actual * weight).sum())
        wanted_losses.append((wanted * weight).sum())
    sum(losses).backward()
    sum(wanted_losses).backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad, w[name].grad, name)


# ---- what weights of given names make, for good


def formula(shape: torch.Size | tuple[int, ...], phase: float) -> Tensor:
    """Numbers in [-1, 1] that no generator makes: sin(phase + i² / 100)."""
    place = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(phase + place.square() / 100).reshape(shape)


@torch.no_grad()
def test_pinned_output():
    """The same names and values of weights give these numbers, else checkpoints are worthless."""
    model = DiTTTSModel(ARGS)
    for name, parameter in model.named_parameters():
        value = formula(parameter.shape, zlib.crc32(name.encode()) % 1000)
        fan_in = parameter.shape[-1] if value.dim() > 1 else 4
        parameter.copy_(value / math.sqrt(fan_in) + (0.5 if name.endswith("norm.weight") else 0))
    length = torch.ones(1, 5, dtype=torch.bool)
    out = model(
        formula((1, 5, 8), 1.0).float(),
        torch.tensor([0.6]),
        length,
        text_ids=torch.tensor([[3, 14, 15, 9, 26]]),
        text_mask=length,
        speaker=formula((1, 5, 8), 2.0).float(),
        speaker_mask=length,
    )
    expected = [
        [0.742798, 0.562133, 0.425279, 0.353212, 0.234443, 0.047281, 0.316328, 0.510732],
        [0.737454, -0.343949, -0.158306, 0.657627, -0.284066, 0.046705, -0.022895, 0.621880],
    ]
    torch.testing.assert_close(out[0, [0, 4]], torch.tensor(expected), rtol=0, atol=1e-4)
