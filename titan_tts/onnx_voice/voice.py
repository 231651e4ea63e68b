"""A voice of ONNX graphs: reads its folder, which may be a stranger's, and speaks by it.

voice.json     SETTINGS; reader: arguments of `Reader`; steps: as `flow.solvers.Step`, (times, width, branches);
               caption_steps: with captions, of at most max_caption bytes, 0: the voice takes none
encoder.onnx   text, reference and caption -> keys and values of each in all blocks
step.onnx      noisy latents, time, keys and values -> velocity; guidance and solver are here
length.onnx    text, reference and caption -> logarithm of the latent frames
sound.onnx     latents and white noise -> waveform
voices.npz, aligner.npz
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from titan_tts.speak.long_text import clean_text, ended, split_text
from torchtitan.models.dit_tts.bounded import read_arrays, read_bytes, read_json_file
from torchtitan.models.dit_tts.errors import check_range, reading, require
from torchtitan.models.dit_tts.files import nfc
from torchtitan.models.dit_tts.text import english
from torchtitan.models.dit_tts.text.aligner import (
    ALIGNER_FILE,
    Aligner,
    load_aligner,
    token_positions,
    unit_spans,
)
from torchtitan.models.dit_tts.text.conventions import mark_table, with_known_marks
from torchtitan.models.dit_tts.text.normalize import TO_SAY, Normalizer
from torchtitan.models.dit_tts.text.phones import Phonemizer


class Reader:
    """Reads texts as a `UnitTokenizer` without conditions and added tokens does."""

    def __init__(
        self,
        ids: Mapping[str, int],
        ends: Sequence[int],
        in_bytes: bool,
        language: str,
        normalize: str,
        aligner: Aligner | None = None,
    ):
        """ids: of characters; bytes are those of Latin 1. ends: the ids before and after a text. Others: as of a
        `Vocabulary`."""
        self._ids = {character: np.int64(number) for character, number in ids.items()}
        (self._begin, self._end), self._in_bytes, self._aligner = ends, in_bytes, aligner
        self.characters = () if in_bytes else self._ids.keys()
        self._marks = {} if in_bytes else mark_table(self._ids, bool(language))
        # Without wetext, whose grammars take 45 MB, texts in which it reads nothing are read.
        self._words = None if normalize and not find_spec("wetext") else Normalizer(normalize)
        self._normalize = normalize
        self._phones = Phonemizer(language) if language else None

    def __call__(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(L,) int64 ids and (L,) float32 positions of a text, -1 for what is not text. Raises InputError for characters that
        the voice does not know."""
        whole = text.encode("utf-8", "replace").decode()
        words = self._words(whole) if self._words else self._as_written(whole)
        spoken = with_known_marks(self._phones(words) if self._phones else words, self._marks)
        units = [c.encode().decode("latin-1") if self._in_bytes else c for c in spoken]
        unknown = sorted(set("".join(units)) - self._ids.keys())
        lost = (self._phones.lost(whole) if self._phones else []) or unknown
        shown = ", ".join(map(repr, lost[:5]))
        require(not lost, f"the voice was not trained with the characters {shown}; leave them out")
        ids = [self._begin, *(self._ids[unit] for unit in "".join(units)), self._end]
        positions = np.full(len(ids), -1.0, np.float32)
        if self._aligner is not None:
            frames = self._aligner.expected_frames(spoken)
            positions[1:-1] = token_positions(frames, unit_spans([*map(len, units)]))
        return np.array(ids, np.int64), positions

    def _as_written(self, text: str) -> str:
        text = english.prepared(text) if self._normalize == "en" else text
        found = TO_SAY.search(text)
        about = f"the text has {found and found[0]!r}, which wetext reads as words"
        require(not found, f"{about}; pip install wetext==0.1.8, or write words")
        return text.replace(english.CUT, "")


FORMAT = "titan-tts-onnx 1"
SETTINGS: dict[str, type] = {
    **{"format": str, "voice": str, "reader": dict, "steps": list, "caption_steps": list},
    **{"noise_scale": float, "max_caption": int},
    **dict.fromkeys(("patch", "channels", "max_frames", "max_tokens", "max_reference"), int),
    **dict.fromkeys(("hop", "sample_rate"), int),
}
GRAPHS = ("encoder", "step", "length", "sound")
MAX_GRAPH = 2**31 - 1  # bytes, the limit of the format
_AGAIN = "export the voice again"
_PAUSE, _FADE = 0.12, 0.005  # seconds, as in speak/utterance.py
_LONGEST = 16  # times max_frames: a text that is not split takes less

Voice = str | np.ndarray | None
"""A name of the folder's voices, latents (R, C) of a reference, "" for no particular voice, or None for the default one, with
a caption for none"""


def _checked(found: Any) -> dict[str, Any]:
    """The content of voice.json. Raises an error of any kind where it is not that."""
    for name, kind in SETTINGS.items():
        if type(found[name]) is not kind or (
            kind is int and not (name != "max_caption") <= found[name] <= 2**20
        ):
            raise ValueError(f"{name} = {str(found[name])[:40]!r}")
    if found["format"] != FORMAT:
        raise ValueError(f"not of the format {FORMAT!r}")
    plans = {}
    for name in ("steps", "caption_steps"):
        plans[name] = steps = [
            (
                tuple(map(float, times)),
                float(width),
                [(float(s), *map(bool, has)) for s, *has in way],
            )
            for times, width, way in found[name]
        ]
        numbers = [n for times, width, way in steps for n in (*times, width, *sum(way, ()))]
        if len(numbers) > 10_000 or not np.isfinite([*numbers, found["noise_scale"]]).all():
            raise ValueError("its steps are too many, or not finite")
    return found | plans


def _graph(path: Path, threads: int) -> Any:
    """A session of a graph. No library of operators is loaded, and no file but this one is read."""
    import onnxruntime

    with reading(path, _AGAIN):
        data = read_bytes(path, MAX_GRAPH)
        if b"location" in data:  # the key of weights that are in other files
            raise ValueError("its weights are in another file")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4
        return onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])


def open_voice(folder: Path, threads: int = 1) -> "OnnxVoice":
    """The voice of a folder; see `onnx_voice.load`."""
    check_range("threads", threads, 0, 1024)
    with reading(folder / "voice.json", "give a folder of titan-tts export --onnx"):
        settings = _checked(read_json_file(folder / "voice.json"))
        aligner = load_aligner(folder) if (folder / ALIGNER_FILE).exists() else None
        reader = Reader(**settings["reader"], aligner=aligner)
    with reading(folder / "voices.npz", _AGAIN):
        voices, channels = read_arrays(folder / "voices.npz"), settings["channels"]
        for name, latents in voices.items():
            right = latents.shape[1:] == (channels,) and latents.dtype.kind == "f"
            if not right or not np.isfinite(latents).all():
                raise ValueError(f"{name[:40]!r} is not an array (frames, {channels}) of numbers")
    graphs = {name: _graph(folder / f"{name}.onnx", threads) for name in GRAPHS}
    return OnnxVoice(folder, settings, reader, voices, graphs)


@dataclass(frozen=True)
class OnnxVoice:
    """A voice to speak with; `voices`: latents (R, C) of references by name. Methods raise InputError for an unknown voice, for
    characters that the voice does not know, and where the graphs do not fit."""

    folder: Path
    settings: dict[str, Any]
    reader: Reader
    voices: dict[str, np.ndarray]
    graphs: dict[str, Any]

    @property
    def sample_rate(self) -> int:
        return self.settings["sample_rate"]

    def speak(self, text: str, voice: Voice = None, seed: int = 0, caption: str = "") -> np.ndarray:
        """(samples,) float32 in [-1, 1] of a text, a long one in pieces. `seed`: of the noise. `caption`: how the voice
        sounds, in words, of a folder that takes captions. Alone it makes a voice, which the first piece has for the others."""
        require(bool(text.strip()), "the text is empty; give one")
        most, speaker = self.settings["max_frames"], voice
        is_made = bool(caption.strip()) and not len(self._reference(voice, caption))

        def sizes(texts: Sequence[str]) -> list[float]:
            texts = [ended(each, self.reader.characters) for each in texts]
            tokens = [len(self.reader(each)[0]) / self.settings["max_tokens"] for each in texts]
            return [
                size if size > 1 else max(size, self.frames(each, voice, caption) / most)
                for each, size in zip(texts, tokens, strict=True)
            ]

        sounds = []
        for number, piece in enumerate(split_text(clean_text(text), sizes)):
            piece = ended(piece, self.reader.characters)
            frames = self.frames(piece, voice, caption)
            latents = self.latents(piece, frames, speaker, seed + number, caption=caption)
            speaker = latents if is_made and not number else speaker
            sounds.append(self.decode(latents))
        return _joined(sounds, self.sample_rate)

    def frames(self, text: str, voice: Voice = None, caption: str = "") -> int:
        """Latent frames that a text takes."""
        reference, (ids, _) = self._reference(voice, caption), self.reader(text)
        given = {"ids": ids[None], "has_speaker": np.array([len(reference) > 0])}
        given |= {"reference": self._patches(reference)} | self._captioned(caption)
        with reading(self.folder / "length.onnx", _AGAIN):
            [found] = self._run("length", given)
            frames = math.exp(min(float(found[0]), 50))
            if not frames <= _LONGEST * self.settings["max_frames"]:
                raise ValueError(f"it gives {frames:.3g} frames to {text[:40]!r}")
        return max(1, round(frames))

    def latents(
        self,
        text: str,
        frames: int,
        voice: Voice = None,
        seed: int = 0,
        noise: np.ndarray | None = None,
        caption: str = "",
    ) -> np.ndarray:
        """(frames, C) float32 of one piece of a text. `noise`: (frames, C); None: drawn from the seed."""
        (ids, positions), reference = self.reader(text), self._reference(voice, caption)
        given = {"ids": ids[None], "positions": positions[None]}
        given |= {"frames": np.array([frames], np.float32), "reference": self._patches(reference)}
        given |= self._captioned(caption)
        if noise is None:
            size = frames, self.settings["channels"]
            noise = np.random.default_rng(seed).standard_normal(size, np.float32)
        with reading(self.folder / "step.onnx", _AGAIN):
            text_keys, *others = self._run("encoder", given)
            has_caption = given["has_caption"][0]
            is_there = len(reference) > 0, has_caption
            keys = [text_keys, *(k if has else k[:, :, :, :0] for k, has in zip(others, is_there))]
            x = np.float32(self.settings["noise_scale"]) * noise[None]
            steps = self.settings["caption_steps" if has_caption else "steps"]  # see flow.solvers
            for (begin, *inner), width, branches in steps:
                slope = self._velocity(x, begin, keys, branches)
                for t in inner:
                    weight = width / (2.0 * (t - begin))
                    second = self._velocity(x + (t - begin) * slope, t, keys, branches)
                    slope = (1.0 - weight) * slope + weight * second
                x = x + width * slope
            if x.shape[1:] != noise.shape or not np.isfinite(x).all():
                raise ValueError(f"it gives no finite latents of {frames} frames")
        return x[0]

    def decode(self, latents: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """(samples,) float32 in [-1, 1] of latents (T, C). `noise`: white, (samples,), always the same by default."""
        size = 1, len(latents), self.settings["hop"]
        if noise is None:
            noise = np.random.default_rng(0).standard_normal(size, np.float32)
        with reading(self.folder / "sound.onnx", _AGAIN):
            given = {"latents": latents[None], "noise": noise.reshape(size)}
            sound = self._run("sound", given)[0]
            if sound.shape != (noise.size,) or not np.isfinite(sound).all():
                raise ValueError(f"it gives no finite sound of {noise.size} samples")
            return sound.clip(-1, 1)

    def _velocity(
        self, x: np.ndarray, t: float, keys: Sequence[np.ndarray], branches: Sequence[Any]
    ) -> np.ndarray:
        """The guided velocity, see flow.guidance. A branch lacks the keys of a condition."""
        given, found = {"latents": x, "t": np.array([t], np.float32)}, []
        for _, *has in ((0.0, True, True, True), *branches):
            kept = [key if kept else key[:, :, :, :0] for key, kept in zip(keys, has)]
            found += self._run("step", given | dict(zip(("text", "speaker", "caption_keys"), kept)))
        scales = (np.float32(scale) for scale, *_ in branches)
        return found[0] + sum(s * (found[0] - other) for s, other in zip(scales, found[1:]))

    def _run(self, name: str, given: dict[str, np.ndarray]) -> list[np.ndarray]:
        session = self.graphs[name]
        return session.run(None, {each.name: given[each.name] for each in session.get_inputs()})

    def _reference(self, voice: Voice, caption: str) -> np.ndarray:
        """(R, C) latents; (0, C) for no particular voice."""
        if voice is None:
            voice = "" if caption.strip() else self.settings["voice"]
        if isinstance(voice, str):
            known = self.voices | {"": np.zeros((0, self.settings["channels"]))}
            has = ", ".join(self.voices) or "none"
            require(voice in known, f"there is no voice {voice!r}; the folder has: {has}")
            voice = known[voice]
        return voice[: self.settings["max_reference"]].astype(np.float32)

    def _captioned(self, caption: str) -> dict[str, np.ndarray]:
        most = self.settings["max_caption"]
        require(most > 0 or not caption, f"{self.folder} takes no captions; leave caption out")
        ids = list(nfc(caption).strip().encode("utf-8", "replace"))
        require(
            len(ids) <= most, f"the caption has {len(ids)} bytes, but at most {most} are allowed"
        )
        return {"caption": np.array([ids or [0]]), "has_caption": np.array([bool(ids)])}

    def _patches(self, reference: np.ndarray) -> np.ndarray:
        """(1, P, patch * C) of a reference; without one, of zeros."""
        patch = self.settings["patch"]
        missing = -len(reference) % patch if len(reference) else patch
        padded = np.pad(reference, ((0, missing), (0, 0)))
        return padded.reshape(1, -1, patch * reference.shape[1])


def _joined(sounds: Sequence[np.ndarray], rate: int) -> np.ndarray:
    """Sounds with pauses between them, each faded in and out; a single one stays as it is."""
    if len(sounds) == 1:
        return sounds[0]
    ramp = np.linspace(0, 1, int(_FADE * rate), False, dtype=np.float32)
    silence = np.zeros(int(_PAUSE * rate), np.float32)
    for sound in sounds:  # of a frame at least, which is longer than both fades
        sound[: len(ramp)] *= ramp
        sound[-len(ramp) :] *= ramp[::-1]
    return np.concatenate([each for sound in sounds for each in (silence, sound)][1:])
