"""Writes a trained model as ONNX graphs, with all that `titan_tts.onnx_voice` speaks by.

A graph has one utterance of any length, without padding. So it has no mask; a branch of guidance gets none of the keys of
the condition that it lacks.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titan_tts import onnx_voice
from titan_tts.export.exporter import new_folder
from titan_tts.export.options import Options
from titan_tts.onnx_voice.voice import FORMAT, MAX_GRAPH
from titan_tts.speak.lengths import find_predictor, load_predictor
from titan_tts.speak.load_run import LoadedRun, load_run
from titan_tts.speak.speech_data import ExportedSpeechData, open_speech_data
from torchtitan.models.dit_tts.config.codec_name import VOCODERS, split_vocoder
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.config.shipped import shipped_path
from torchtitan.models.dit_tts.errors import InputError, quiet_known_warnings, require_modules
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.flow.objective import FlowMatching
from torchtitan.models.dit_tts.flow.solvers import SOLVERS, first_way, plan_steps
from torchtitan.models.dit_tts.infra.kernels import use_operations
from torchtitan.models.dit_tts.model.attention_backends import GuidedKeys
from torchtitan.models.dit_tts.model.conditions import Conditions
from torchtitan.models.dit_tts.model.duration import DurationModel
from torchtitan.models.dit_tts.model.encoders import ByteEncoder
from torchtitan.models.dit_tts.model.model import BlockCache
from torchtitan.models.dit_tts.model.operations import Operations
from torchtitan.models.dit_tts.speech.codec import build_codec, codec_kind
from torchtitan.models.dit_tts.speech.codec.mel_dct import MelDctCodec
from torchtitan.models.dit_tts.speech.codec.record import check_codec
from torchtitan.models.dit_tts.speech.codec.spectrogram import SAMPLE_RATE
from torchtitan.models.dit_tts.text import vocabulary as ids_of
from torchtitan.models.dit_tts.text.tokenizer import ConditionedTokenizer

_LENGTHS = {12: "frames", 10: "tokens", 3: "patches", 7: "caption_tokens"}
"""lengths of the example by which the graphs are traced"""


class _Graph(nn.Module):
    def __init__(self, model: nn.Module, run: Callable[..., Any]):
        super().__init__()
        self.model, self._run = model, run

    def forward(self, *inputs: Tensor) -> Any:
        return self._run(self.model, *inputs)


def _conditions(
    model: Any,
    ids: Tensor,
    reference: Tensor,
    captions: tuple[Tensor, ...],
    positions: Tensor | None = None,
) -> Conditions:
    """`captions`: ids of one, or none for a model without captions."""
    frames = reference.unflatten(-1, (-1, model.args.latent_channels)).flatten(1, 2)
    heard = torch.ones_like(frames[..., 0], dtype=torch.bool)
    text_mask = torch.ones_like(ids, dtype=torch.bool)
    found: dict[str, Any] = {"text_positions": positions}
    if captions:
        [ids_of_caption] = captions
        mask = torch.ones_like(ids_of_caption, dtype=torch.bool)
        found |= {"caption_ids": ids_of_caption, "caption_mask": mask}
    return model.encode_conditions(ids, text_mask, frames, heard, **found)


def _encode(
    model: Any, ids: Tensor, positions: Tensor, frames: Tensor, reference: Tensor, *captions: Tensor
) -> tuple[Tensor, ...]:
    """Keys and values (blocks, 2, 1, L, H, K) of the text, of the speaker and, where the model takes one, of the caption."""
    conditions = _conditions(model, ids, reference, captions, positions)
    [blocks] = model.block_caches(conditions, torch.zeros(1), frames)
    streams = zip(*(block.key_values for block in blocks))
    text, speaker = (torch.stack([torch.stack(pair) for pair in stream]) for stream in streams)
    if not captions:
        return text, speaker
    patches = conditions.speaker_mask.shape[1]
    return text, speaker[:, :, :, :patches], speaker[:, :, :, patches:]


def _step(objective: FlowMatching, smallest: float, model: Any, *given: Tensor) -> Tensor:
    latents, t, text, *voice = given
    speaker = torch.cat(voice, 3)  # and caption
    shared, streams = model.timestep(t), zip(text.unbind(), speaker.unbind())
    caches = [
        BlockCache(((of_text[0], of_text[1]), (voice[0], voice[1])), layer.adaln(shared))
        for layer, (of_text, voice) in zip(model.layers, streams)
    ]
    unread = Conditions(text, text, speaker, speaker)  # by blocks with caches
    keys = GuidedKeys(((True, True),), (None,))
    output = model.denoise_guided(latents, t, keys, unread, t, caches)
    return objective.velocity(output, latents, t, smallest)


def _length(
    model: Any, ids: Tensor, reference: Tensor, has_speaker: Tensor, *of_caption: Tensor
) -> Tensor:
    conditions = _conditions(model, ids, reference, of_caption[:1])
    return model.log_frames(conditions, has_speaker, *of_caption[1:])


class _Matrices(TorchFunctionMode):
    """Fourier transforms of real numbers are products with matrices, which onnxruntime computes faster than its own."""

    def __init__(self, length: int) -> None:
        there = torch.fft.rfft(torch.eye(length))
        unit = torch.eye(there.shape[-1])
        self._there = there.real, there.imag
        self._back = torch.fft.irfft(unit), torch.fft.irfft(1j * unit)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.fft.rfft:
            return torch.complex(*(args[0] @ part[: args[0].shape[-1]] for part in self._there))
        if func is torch.fft.irfft:
            x, (real, imag) = args[0], self._back
            return x.real @ real + x.imag @ imag if x.is_complex() else x @ real
        return func(*args, **(kwargs or {}))


def _sound(codec: MelDctCodec, mode: _Matrices, vocoder: Any, *given: Tensor) -> Tensor:
    latents, noise = given
    with mode:
        return vocoder(codec.log_mel(latents[0]), noise.flatten())


def export_onnx(options: Options, out: Path) -> str:
    """Writes the files of `onnx_voice.voice` to a new or an empty folder: complete under its name, or not at all. Returns a
    report."""
    require_modules("onnx", "onnxscript", "onnxruntime")
    quiet_known_warnings()
    folder = Path(shipped_path(options.run))
    loaded = load_run(folder, options.step, options.weights, options.encoder)
    found = find_predictor(loaded.folder, loaded.config, options.duration)
    predictor = load_predictor(found, loaded.config) if found else None
    name = options.codec or loaded.config.sampling.codec
    _check(loaded, name, predictor)
    codec = build_codec(name if split_vocoder(name)[1] else f"{name}+{VOCODERS[SAMPLE_RATE]}")
    assert isinstance(codec, MelDctCodec) and predictor is not None
    check_codec(codec, loaded.config.data.path)
    speech_data = open_speech_data(folder, loaded.config, options.data)
    known = speech_data.speakers if isinstance(speech_data, ExportedSpeechData) else []
    longest, voices = loaded.config.data.max_speaker_frames, dict[str, Any]()
    for voice in options.voices or known:
        voices[voice] = speech_data.reference(voice)[:longest].float().numpy()
    with new_folder(out) as temporary:
        _write_graphs(temporary, loaded, predictor, codec, options.dtype)
        with ZipFile(temporary / "voices.npz", "w") as archive:  # np.savez takes no name "file"
            for voice, latents in voices.items():
                with archive.open(f"{voice}.npy", "w") as member:
                    np.lib.format.write_array(member, latents)
        if loaded.tokenizer.aligner is not None:
            loaded.tokenizer.aligner.save(temporary)
        default = options.voices[0] if options.voices else speech_data.default_voice
        settings = json.dumps(_settings(loaded, codec, default), ensure_ascii=False)
        write_atomic(temporary / "voice.json", settings + "\n")
        for file in (Path(onnx_voice.__file__).parent / "page").iterdir():
            write_atomic(temporary / file.name, file.read_bytes())
    speak = f"python -m titan_tts.onnx_voice {out} --text ... --out speech.wav"
    return f"{out}: step {loaded.step} of {folder}; speak: {speak}"


def _write_graphs(
    out: Path, loaded: LoadedRun, predictor: LoadedRun, codec: MelDctCodec, dtype: str
) -> None:
    frames, tokens, patches, caption_tokens = _LENGTHS
    args, steps = loaded.model.args, plan_steps(loaded.config.sampling)
    heads = args.n_heads, args.dim // args.n_heads
    example = {
        "ids": torch.full((1, tokens), ids_of.BEGIN_ID),
        "positions": torch.rand(1, tokens),
        "frames": torch.tensor([float(frames)]),
        "reference": torch.randn(1, patches, args.speaker_patch_size * args.latent_channels),
        "caption": torch.full((1, caption_tokens), ord("a")),
        # Two tensors: the graph would have one input for one.
        **{name: torch.ones(1, dtype=torch.bool) for name in ("has_speaker", "has_caption")},
        "latents": torch.randn(1, frames, args.latent_channels),
        "t": torch.ones(1),
        "text": torch.randn(args.n_layers, 2, 1, tokens, *heads),
        "speaker": torch.randn(args.n_layers, 2, 1, patches, *heads),
        "caption_keys": torch.randn(args.n_layers, 2, 1, caption_tokens, *heads),
        "noise": torch.randn(1, frames, codec.hop_length),
    }
    caption, caption_keys = (
        name * bool(args.max_caption_tokens) for name in ("caption", "caption_keys")
    )
    heard = "caption has_caption" * bool(predictor.model.args.max_caption_tokens)
    assert codec.vocoder is not None
    fourier = _Matrices(len(codec.vocoder.window))
    graphs: dict[str, tuple[Any, Callable[..., Any], str]] = {
        "encoder": (loaded.model, _encode, f"ids positions frames reference {caption}"),
        "step": (
            loaded.model,
            partial(_step, loaded.objective, first_way(steps)),
            f"latents t text speaker {caption_keys}",
        ),
        "length": (predictor.model, _length, f"ids reference has_speaker {heard}"),
        "sound": (codec.vocoder, partial(_sound, codec, fourier), "latents noise"),
    }
    for name, (model, run, inputs) in graphs.items():
        graph = _traced(_Graph(model, run), {each: example[each] for each in inputs.split()})
        if dtype == "int8" and model is not codec.vocoder:
            graph = quantized(graph)
        write_atomic(out / f"{name}.onnx", graph)


def _settings(loaded: LoadedRun, codec: MelDctCodec, voice: str) -> dict[str, Any]:
    """The content of voice.json; `voice` is the default one."""
    sampling, data, args = loaded.config.sampling, loaded.config.data, loaded.model.args
    return {
        **{"format": FORMAT, "voice": voice, "reader": reader_arguments(loaded.tokenizer)},
        "steps": _planned(replace(sampling, caption_scale=0.0)),
        **{"caption_steps": _planned(sampling), "max_caption": data.max_caption_tokens},
        "noise_scale": float(sampling.truncation_factor),
        **{"patch": args.speaker_patch_size, "channels": args.latent_channels},
        **{"max_frames": data.max_frames, "max_reference": data.max_speaker_frames},
        **{"max_tokens": data.max_text_tokens, "hop": codec.hop_length},
        "sample_rate": codec.sample_rate,
    }


def _planned(sampling: Sampling) -> list[tuple[Any, ...]]:
    return [(step.times, step.width, step.branches) for step in plan_steps(sampling)]


def reader_arguments(tokenizer: ConditionedTokenizer) -> dict[str, Any]:
    """Arguments of an `onnx_voice.voice.Reader`, except the aligner."""
    vocabulary = tokenizer.vocabulary
    in_bytes = vocabulary.unit == "bytes"
    units = map(chr, range(256)) if in_bytes else vocabulary.characters
    first = ids_of.FIRST_BYTE_ID if in_bytes else ids_of.FIRST_CHARACTER_ID
    return {
        "ids": {unit: first + number for number, unit in enumerate(units)},
        **{"ends": (ids_of.BEGIN_ID, ids_of.END_ID), "in_bytes": in_bytes},
        **{"language": vocabulary.language, "normalize": vocabulary.normalize},
    }


def _check(loaded: LoadedRun, codec: str, predictor: LoadedRun | None) -> None:
    """Raises InputError for what `onnx_voice` does not do."""
    config, vocabulary = loaded.config, loaded.tokenizer.vocabulary
    sampling, own = config.sampling, (vocabulary, config.data.max_speaker_frames)
    size = sum(4 * p.numel() for p in loaded.model.parameters())
    refused = {
        "a network that predicts lengths": isinstance(loaded.model, DurationModel),
        f"codec {codec!r}": codec_kind(codec) != "mel_dct",
        "a pretrained text encoder": not isinstance(loaded.model.text_encoder, ByteEncoder),
        "[encoder] convention or added_tokens": vocabulary.convention or vocabulary.added,
        "a speaker encoder of whole patches": not loaded.model.args.speaker_partial_patches,
        "[data] conditioning": vocabulary.conditioning,
        "no speaker encoder": not loaded.model.args.speaker_reference,
        "[objective] loss_on_padding": config.objective.loss_on_padding,
        f"solver {sampling.solver!r}": SOLVERS[sampling.solver].advance != SOLVERS["euler"].advance,
        "[sampling] rescale_k": sampling.rescale_k != 1.0,
        "[sampling] speaker_kv_scale": sampling.speaker_kv_scale != 1.0,
        f"{size} bytes of weights": size > MAX_GRAPH - 2**20,
        "no length predictor (--duration of the model that a fine-tune began with, or titan-tts train duration)": predictor
        is None,
    }
    if predictor is not None:
        of_predictor = predictor.tokenizer.vocabulary, predictor.config.data.max_speaker_frames
        refused["a length predictor of other texts or references"] = own != of_predictor
    if found := [name for name, is_there in refused.items() if is_there]:
        raise InputError(
            f"--onnx: {loaded.folder} has {', '.join(found)}, with which titan_tts.onnx_voice cannot speak; export without "
            "--onnx"
        )


def _traced(graph: _Graph, given: dict[str, Tensor]) -> bytes:
    """The graph in ONNX, for any lengths."""
    use_operations(graph, lambda x: Operations)
    axes = {2: 1, 3: 1, 6: 3}  # the length's, by the number of dimensions
    dynamic = tuple(
        {axis: _LENGTHS[x.shape[axis]]} if (axis := axes.get(x.dim())) else {}
        for x in given.values()
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = torch.onnx.export(
            graph.cpu().eval(),
            tuple(given.values()),
            input_names=list(given),
            dynamic_shapes=(dynamic,),
            opset_version=18,  # which onnxruntime has read since 1.14
            dynamo=True,
            verbose=False,
        )
    model = made.model_proto
    for node in model.graph.node:  # lines of this machine's sources
        node.ClearField("metadata_props")
    return model.SerializeToString()


def quantized(graph: bytes) -> bytes:
    """The graph with 8-bit weights of matmuls, whose inputs are quantized as they come."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    kinds, only = ["MatMul", "Gemm"], {"MatMulConstBOnly": True}
    with TemporaryDirectory() as folder:
        path = Path(folder, "int8.onnx")
        model = onnx.load_from_string(graph)
        # It asks for a preparation that torch's exporter has done.
        model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
        quantize_dynamic(model, path, kinds, False, False, QuantType.QInt8, extra_options=only)
        return path.read_bytes()
