"""Models of Echo-TTS and Irodori-TTS, from the description of their architecture: tensors under their names, and the
forward pass with a matrix for each of q, k, v and gate, one sample at a time, without masks: what a sample does not
have is not there.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """No two alike, and none a factor of one."""

    channels: int = 6
    dim: int = 24
    heads: int = 4
    layers: int = 2
    mlp: int = 44
    rank: int = 5
    time: int = 14
    speaker: int = 30
    speaker_heads: int = 3
    speaker_layers: int = 3
    speaker_mlp: int = 39
    patch: int = 4
    text: int = 40
    text_heads: int = 5
    text_layers: int = 4
    text_mlp: int = 35
    vocabulary: int = 256
    captions: bool = False
    """in place of references, read by an encoder of the speaker's sizes"""


def shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor."""

    def attention(name: str, dim: int, heads: int, contexts: dict[str, int]) -> dict:
        found = {f"{name}.{each}.weight": (dim, dim) for each in ("wq", "wk", "wv", "wo", "gate")}
        found |= {f"{name}.{each}_norm.weight": (heads, dim // heads) for each in "qk"}
        for each, width in contexts.items():
            found |= {f"{name}.w{kind}_{each}.weight": (dim, width) for kind in "kv"}
        return found

    def mlp(name: str, dim: int, hidden: int) -> dict:
        up = {f"{name}.{each}.weight": (hidden, dim) for each in ("w1", "w3")}
        return up | {f"{name}.w2.weight": (dim, hidden)}

    def encoder(name: str, dim: int, heads: int, layers: int, hidden: int) -> dict:
        found = {}
        for block in (f"{name}.blocks.{number}" for number in range(layers)):
            found |= attention(f"{block}.attention", dim, heads, {})
            found |= mlp(f"{block}.mlp", dim, hidden)
            found |= {f"{block}.{each}_norm.weight": (dim,) for each in ("attention", "mlp")}
        return found

    voice = "caption" if s.captions else "speaker"
    found: dict[str, tuple[int, ...]] = {
        "speaker_encoder.in_proj.weight": (s.speaker, s.patch * s.channels),
        "speaker_encoder.in_proj.bias": (s.speaker,),
    }
    if s.captions:
        found = {"caption_encoder.text_embedding.weight": (s.vocabulary, s.speaker)}
    found |= {
        "text_encoder.text_embedding.weight": (s.vocabulary, s.text),
        "text_norm.weight": (s.text,),
        f"{voice}_norm.weight": (s.speaker,),
        "cond_module.0.weight": (s.dim, s.time),
        "cond_module.2.weight": (s.dim, s.dim),
        "cond_module.4.weight": (3 * s.dim, s.dim),
        "in_proj.weight": (s.dim, s.channels),
        "in_proj.bias": (s.dim,),
        "out_norm.weight": (s.dim,),
        "out_proj.weight": (s.channels, s.dim),
        "out_proj.bias": (s.channels,),
    }
    found |= encoder("text_encoder", s.text, s.text_heads, s.text_layers, s.text_mlp)
    of_voice = s.speaker, s.speaker_heads, s.speaker_layers, s.speaker_mlp
    found |= encoder(f"{voice}_encoder", *of_voice)
    for block in (f"blocks.{number}" for number in range(s.layers)):
        contexts = {"text": s.text, voice: s.speaker}
        found |= attention(f"{block}.attention", s.dim, s.heads, contexts)
        found |= mlp(f"{block}.mlp", s.dim, s.mlp)
        for each in ("attention_adaln", "mlp_adaln"):
            for what in ("shift", "scale", "gate"):
                found[f"{block}.{each}.{what}_down.weight"] = (s.rank, s.dim)
                found[f"{block}.{each}.{what}_up.weight"] = (s.dim, s.rank)
                found[f"{block}.{each}.{what}_up.bias"] = (s.dim,)
    return found


def random_weights(
    s: Sizes, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes(s).items():
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        norm = name.endswith("norm.weight")
        value = 1 + value / 2 if norm or len(shape) == 1 else value / math.sqrt(shape[-1])
        found[name] = value.to(dtype)
    return found


class Reference:
    """The forward pass of `weights`, which keeps what every layer gives."""

    def __init__(self, weights: dict[str, Tensor], s: Sizes, bidirectional: bool = False):
        self.w, self.s, self.bidirectional = weights, s, bidirectional
        self.seen: dict[str, Tensor] = {}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def norm(self, x: Tensor, name: str = "") -> Tensor:
        root = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x / root * (self.w[f"{name}.weight"] if name else 1.0)

    def attention(
        self, name: str, x: Tensor, heads: int, rotated: int, causal: bool, contexts: dict
    ) -> Tensor:
        """(L, D): keys are those of x, and of each context (kind -> (N, c)) behind them, without positions."""

        def split(kind: str, source: Tensor) -> Tensor:
            return self.linear(f"{name}.{kind}", source).unflatten(-1, (heads, -1))

        q, k = (
            self.norm(split("wq", x), f"{name}.q_norm"),
            self.norm(split("wk", x), f"{name}.k_norm"),
        )
        values, others = [split("wv", x)], []
        for kind, source in contexts.items():
            others.append(self.norm(split(f"wk_{kind}", source), f"{name}.k_norm"))
            values.append(split(f"wv_{kind}", source))
        v, found = torch.cat(values), []
        for head in range(heads):
            query, key = q[:, head], k[:, head]
            if head < rotated:
                query, key = turned(query), turned(key)
            keys = torch.cat([key, *(other[:, head] for other in others)])
            scores = query @ keys.T / math.sqrt(keys.shape[1])
            if causal:
                scores = scores.masked_fill(torch.ones(scores.shape).triu(1).bool(), -torch.inf)
            found.append(scores.softmax(-1) @ v[:, head])
        return self.linear(
            f"{name}.wo", torch.cat(found, -1) * self.linear(f"{name}.gate", x).sigmoid()
        )

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(f"{name}.w1", x), self.linear(f"{name}.w3", x)
        return self.linear(f"{name}.w2", gate * gate.sigmoid() * up)

    def encoder(self, name: str, x: Tensor, heads: int, layers: int, causal: bool) -> Tensor:
        for number in range(layers):
            block = f"{name}.blocks.{number}"
            h = self.norm(x, f"{block}.attention_norm")
            x = x + self.attention(f"{block}.attention", h, heads, heads, causal, {})
            x = x + self.mlp(f"{block}.mlp", self.norm(x, f"{block}.mlp_norm"))
            self.seen[block] = x
        return x

    def modulated(self, name: str, shared: Tensor) -> list[Tensor]:
        """Shift, scale and gate."""
        found = []
        for what, part in zip(("shift", "scale", "gate"), shared.chunk(3), strict=True):
            low = self.linear(f"{name}.{what}_down", part * part.sigmoid())
            found.append(self.linear(f"{name}.{what}_up", low) + part)
        return found

    def __call__(self, latents: Tensor, t: Tensor, text_ids: Tensor, speaker: Tensor) -> Tensor:
        """Velocity (T, C) of one sample: latents (T, C), t (), text_ids (L,), speaker (S, C) or ids of a caption (S,)."""
        s, contexts = self.s, {}
        if len(text_ids):
            text = self.w["text_encoder.text_embedding.weight"][text_ids]
            text = self.encoder("text_encoder", text, s.text_heads, s.text_layers, False)
            contexts["text"] = self.norm(text, "text_norm")
        patches = 0 if s.captions else len(speaker) // s.patch
        if s.captions and len(speaker):
            x = self.w["caption_encoder.text_embedding.weight"][speaker]
            x = self.encoder("caption_encoder", x, s.speaker_heads, s.speaker_layers, False)
            contexts["caption"] = self.norm(x, "caption_norm")
        if patches:
            x = speaker[: patches * s.patch].reshape(patches, -1)
            x = self.linear("speaker_encoder.in_proj", x) / 6
            causal = not self.bidirectional
            x = self.encoder("speaker_encoder", x, s.speaker_heads, s.speaker_layers, causal)
            x = self.norm(x, "speaker_norm")
            contexts["speaker"] = (
                torch.cat([x.mean(0, keepdim=True), x]) if self.bidirectional else x
            )
        frequencies = 1000 * 10000.0 ** -(torch.arange(s.time // 2).double() / (s.time // 2))
        shared = torch.cat([(t * frequencies).cos(), (t * frequencies).sin()])
        for number in (0, 2, 4):
            shared = self.linear(f"cond_module.{number}", shared)
            shared = shared * shared.sigmoid() if number < 4 else shared
        self.seen["cond_module"] = shared
        x = self.linear("in_proj", latents)
        for block in (f"blocks.{number}" for number in range(s.layers)):
            shift, scale, gate = self.modulated(f"{block}.attention_adaln", shared)
            h = self.norm(x) * (1 + scale) + shift
            of = (f"{block}.attention", h, s.heads, s.heads // 2, False, contexts)
            x = x + gate.tanh() * self.attention(*of)
            shift, scale, gate = self.modulated(f"{block}.mlp_adaln", shared)
            x = x + gate.tanh() * self.mlp(f"{block}.mlp", self.norm(x) * (1 + scale) + shift)
            self.seen[block] = x
        return self.linear("out_proj", self.norm(x, "out_norm"))


def turned(x: Tensor) -> Tensor:
    """(L, K): neighbouring channels (2i, 2i + 1) as a complex number, turned by position·10000^(-2i/K)."""
    frequencies = 10000.0 ** -(torch.arange(0, x.shape[1], 2).double() / x.shape[1])
    turns = torch.exp(1j * torch.arange(len(x)).double()[:, None] * frequencies)
    return torch.view_as_real(
        torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous()) * turns
    ).flatten(1)
