"""Test sets: texts, each with a voice to say it in and, where there is one, its own recording.

The source is a prepared folder, any corpus that `prepare` reads, or a list of Seed-TTS-eval,

    name|prompt text|prompt wav|text to say[|recording of that text]

whose paths are relative to it; without the fifth field the recording is wavs/NAME.wav, if it is there. `read_prompts`
reads texts only, so that a recognizer can refuse them; `encode_prompts` reads and encodes the audio.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from titan_tts.evaluate.options import Options as EvaluateOptions
from titan_tts.prepare.audio_reader import Loader, Recording
from titan_tts.prepare.formats import FORMATS, find_format, open_corpus
from titan_tts.prepare.listing import Plan, usable_items
from titan_tts.prepare.processing import process
from titan_tts.prepare.settings import AudioSettings, Options
from titan_tts.records.columns import drawn
from titan_tts.records.utterance import HELDOUT, Reference, Utterance
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.dataset import open_training_data
from torchtitan.models.dit_tts.data.leak import is_leak
from torchtitan.models.dit_tts.data.references import FixedReferences
from torchtitan.models.dit_tts.data.storage import find_shards, open_source
from torchtitan.models.dit_tts.data.tar_reader import walk_members
from torchtitan.models.dit_tts.errors import InputError, require
from torchtitan.models.dit_tts.files import file_name, is_remote, nfc, unique
from torchtitan.models.dit_tts.speech.audio import decode, to_mono
from torchtitan.models.dit_tts.speech.codec import Codec
from torchtitan.models.dit_tts.speech.codec.record import RECORD_NAME, recorded_codecs
from torchtitan.models.dit_tts.speech.scoring.interface import Sound

PREPARED, SEED_TTS = "prepared", "seed_tts"
REFERENCE, RECORDINGS, CODEC = "reference", "recordings", "codec"
_COLUMNS = ("format", "text_column", "speaker_column", "speaker_pattern", "speaker")


@dataclass(frozen=True)
class Prompt(Utterance):
    """One text to say, in whose voice, and what is loaded for it. The text of its reference is that of the whole, or
    not known; the labels have the values of the conditioning tokens."""

    file_name: str = ""
    """name of its wavs without suffix, unique in its set"""

    load_recording: Callable[[], Sound] | None = None
    """the speaker's own recording of the text"""

    load_reference: Callable[[], Sound] | None = None
    """another utterance of the speaker"""

    latents: Tensor | None = None
    """(T, C) of the recording; None without one"""

    voice: Tensor | None = None
    """(R, C) of the reference; None without one"""

    @property
    def reference_text(self) -> str:
        return self.reference.text if self.reference else ""

    @property
    def language(self) -> str:
        return str(self.labels.get("language") or "")

    def loads(self, codec: Codec) -> dict[str, Callable[[], Sound]]:
        """Loaders by name of the sounds that no system has made, where there are any."""
        copy = None if self.latents is None else partial(decoded, codec, self.latents)
        every = {REFERENCE: self.load_reference, RECORDINGS: self.load_recording, CODEC: copy}
        return {name: load for name, load in every.items() if load is not None}


@dataclass
class PromptSet:
    """The prompts of one source, and how many of its utterances were left out, by reason."""

    prompts: list[Prompt]
    left_out: dict[str, int] = field(default_factory=dict)
    latents_hash: np.ndarray | None = None
    """of the prompts in a prepared folder, as its index has them"""


def find_kind(source: str) -> str:
    """PREPARED, SEED_TTS or one of FORMATS, by the source's content."""
    if is_list(source):
        return SEED_TTS
    if is_remote(source) or _has_latents(source):
        return PREPARED
    try:
        return find_format(source)
    except InputError as error:
        reason = str(error).partition(";")[0]
        raise InputError(
            f"--test {reason}; prepare it with --format and --heldout-fraction 1, and give the output"
        ) from None


def _has_latents(source: str) -> bool:
    """True if the source's first tar is a shard of latents."""
    try:
        paths = find_shards(_shards_of(source))
    except InputError:
        return False
    with closing(open_source(paths[0])) as tar:
        names = [member.name for _, member in zip(range(4), walk_members(tar, lambda _: None))]
    return any(name.endswith(".npy") for name in names)


def _shards_of(source: str) -> str:
    """The held-out shards, if the source is the whole output of `prepare`."""
    heldout = os.path.join(source, "heldout")
    whole = os.path.isfile(os.path.join(source, RECORD_NAME)) and os.path.isdir(heldout)
    return heldout if whole else source


def evenly(speakers: Sequence[Any], wanted: int) -> list[int]:
    """Indices of `wanted` utterances, spread evenly over those of all speakers, speaker by speaker; 0: all.
    `speakers`: the speaker of each utterance.
    """
    places = {speaker: place for place, speaker in enumerate(dict.fromkeys(speakers))}
    ordered = sorted(range(len(speakers)), key=lambda index: places[speakers[index]])
    wanted = min(wanted, len(ordered)) or len(ordered)
    return sorted(ordered[n * len(ordered) // wanted] for n in range(wanted))


def read_prompts(options: EvaluateOptions, data: Data) -> PromptSet:
    """The texts of --test, with the recordings of --recordings. Audio is not decoded yet; latents of a prepared folder
    are read. `data`: the run's; a prepared folder is read as its path would be."""
    source, wanted = options.test, options.max_utterances
    kind = find_kind(source)
    if kind == PREPARED:
        found = _prepared(replace(data, path=_shards_of(source)), wanted)
    elif kind in FORMATS:
        found = _corpus(Corpus(source, format=kind, speaker=options.speaker), wanted)
    else:
        lines = read_list(source)
        chosen = evenly([line.speaker for line in lines], wanted)
        found = PromptSet([_listed(source, lines[index]) for index in chosen])
    if not found.prompts:
        why = ", ".join(f"{count} {reason}" for reason, count in found.left_out.items())
        raise InputError(
            f"--test {source}: has no utterance to evaluate on{f' (left out: {why})' if why else ''}"
        )
    keys = unique([prompt.id for prompt in found.prompts])
    # Some filesystems do not tell capitals from small letters.
    names = unique([file_name(key) for key in keys], str.lower)
    for place, (prompt, key, name) in enumerate(zip(found.prompts, keys, names, strict=True)):
        found.prompts[place] = replace(prompt, id=key, file_name=name, text=nfc(prompt.text))
        if options.language and not prompt.language:
            prompt.labels["language"] = options.language
    if options.recordings:
        _add_recordings(found, options)
    return found


def _prepared(data: Data, max_utterances: int) -> PromptSet:
    dataset = open_training_data(data)
    references = FixedReferences(dataset) if data.references == "drawn" else None
    speakers, _ = dataset.labels("speaker")
    chosen = evenly(speakers.tolist(), max_utterances)
    keys = [dataset.key(index) for index in chosen]
    if len(set(keys)) < len(keys):  # a key is unique within its shard only
        keys = [dataset.sample_id(index) for index in chosen]
    loaded = [dataset.load(i, fetched=dataset.fetch([i]).samples.get(i)) for i in chosen]
    if references is not None:
        for place, index in enumerate(chosen):
            for piece in references.pieces(index, data.max_speaker_frames):
                loaded[place].metadata["reference_key"] = dataset.key(piece.sample)
    named = {each.metadata.get("reference_key") for each in loaded}
    indices = {dataset.key(i): i for i in range(len(dataset)) if dataset.key(i) in named}
    prompts = []
    for index, key, sample in zip(chosen, keys, loaded, strict=True):
        reference, labels, text = sample.reference, sample.metadata, ""
        if references is not None:
            reference = references.load(index, sample, data.max_speaker_frames)
        # No empty reference, and none that is a part of the latents.
        usable = len(reference) > 0 and not is_leak(reference, sample.latents)
        other = indices.get(labels.get("reference_key", ""))
        if usable and other is not None and len(reference) == dataset.frames[other]:
            text = dataset.metadata(other)["text"]  # it is another whole sample
        speaker = str(labels.get("speaker", ""))
        prompts.append(
            Prompt(
                *(key, labels["text"], speaker, labels, {}, Reference((), text), HELDOUT),
                latents=torch.from_numpy(sample.latents),
                voice=torch.from_numpy(reference) if usable else None,
            )
        )
    return PromptSet(prompts, latents_hash=dataset.latents_hash[chosen])


class Corpus:
    """Recordings of any format that `prepare` reads: the usable `items`, and those left out, by reason."""

    def __init__(self, source: str, **columns: Any):
        """`columns`: options of prepare that say how it is laid out, and where texts and speakers are."""
        reader = open_corpus(Options(source, "", **columns))
        self.source, self.loader, plan = source, Loader(reader.root, reader.files()), Plan()
        self.items = list(usable_items(reader, source, "skip", plan))
        self.left_out, self.problems = plan.dropped, plan.problems

    def load(self, item: Utterance) -> Sound:
        """The audio of an item, unprocessed."""
        try:
            found = self.loader.load(item.audio, 0)
        except InputError as error:
            raise InputError(f"{self.source}: {item.id}: {error}; correct or remove it") from None
        assert isinstance(found, Recording)
        return Sound(torch.from_numpy(to_mono(found.samples)), found.rate)


def _corpus(corpus: Corpus, max_utterances: int) -> PromptSet:
    """Prompts of the held-out utterances, if the corpus has any, else of all."""
    for key, sentence in corpus.problems[:1]:
        require(
            bool(corpus.items),
            f"--test {corpus.source}: no recording can be used; {key}: {sentence}",
        )
    items = [item for item in corpus.items if item.split == "heldout"] or corpus.items
    near, far = _by_speaker(items), _by_speaker(corpus.items)
    prompts = []
    for index in evenly([item.speaker for item in items], max_utterances):
        item = items[index]
        if item.reference or "latents" in item.audio:
            given = "references" if item.reference else "latents"
            raise InputError(
                f"--test {corpus.source}: {item.id}: has {given} of its own; prepare it (--heldout-fraction 1) and "
                f"give the output"
            )
        other = _another(near[item.speaker], item) or _another(far[item.speaker], item)
        reference, load = Reference((), other.text if other else ""), partial(corpus.load, item)
        of_other = partial(corpus.load, other) if other else None
        more: Any = {"load_recording": load, "load_reference": of_other}
        prompts.append(_prompt(item, reference=reference, **more))
    return PromptSet(prompts, dict(corpus.left_out))


def _prompt(given: Utterance, **more: Any) -> Prompt:
    return Prompt(**vars(given) | more)


def _by_speaker(items: Sequence[Utterance]) -> dict[str, list[Utterance]]:
    found = defaultdict(list)
    for item in items:
        found[item.speaker].append(item)
    return found


def _another(items: Sequence[Utterance], item: Utterance) -> Utterance | None:
    """Another of a speaker's items, drawn by this one's key; None if this is the only one."""
    if len(items) == 1:
        return None
    found = items[int(drawn(item.id, 0) * (len(items) - 1))]
    return items[-1] if found is item else found


def _listed(source: str, line: Utterance) -> Prompt:
    load = partial(_decode, f"{source}: {line.id}")
    assert line.reference is not None
    return _prompt(
        line,
        load_reference=partial(load, line.reference.files[0]),
        load_recording=partial(load, line.audio["file"]) if line.audio else None,
    )


def _decode(where: str, path: str) -> Sound:
    try:
        return read_sound(path)
    except InputError as error:
        raise InputError(f"{where}: {path}: {error}; replace it") from None


def read_sound(path: str | Path) -> Sound:
    samples, rate = decode(str(path))
    return Sound(torch.from_numpy(to_mono(samples)), rate)


def _add_recordings(found: PromptSet, options: EvaluateOptions) -> None:
    """Sets the original recordings of a prepared folder's samples, from their corpus, by key. The corpus is read as
    the prepare.json next to --test says."""
    records = recorded_codecs(_shards_of(options.test))
    settings = next((record.settings for record in records), {})
    columns = {name: settings[name] for name in _COLUMNS if settings.get(name)}
    own = {"speaker": options.speaker} if options.speaker else {}
    corpus = Corpus(options.recordings, **columns | own)
    items = {item.id: item for item in corpus.items}
    missing = [prompt.id for prompt in found.prompts if prompt.id not in items]
    if missing:
        unusable = "".join(f" ({key}: {why})" for key, why in corpus.problems[:1])
        kept = f", and keep the {RECORD_NAME} that names its columns next to --test"
        kept = "" if settings else kept
        raise InputError(
            f"--recordings {options.recordings}: lacks {len(missing)} of the {len(found.prompts)} utterances of --test, the first "
            f"is {missing[0]}{unusable}; give the corpus that it was prepared from{kept}"
        )
    found.prompts = [
        replace(prompt, load_recording=partial(corpus.load, items[prompt.id]))
        for prompt in found.prompts
    ]


def encode_prompts(found: PromptSet, codec: Codec, settings: AudioSettings) -> None:
    """Sets the missing latents of recordings and references, and leaves out utterances whose recording is silent.

    Recordings are processed as the training data were: one channel, the codec's rate, silence at the ends capped,
    loudness brought to a level.
    """

    def latents_of(sound: Sound) -> Tensor | str:
        samples = sound.waveform.numpy()[:, None]
        processed = process(samples, sound.sample_rate, codec.sample_rate, "", settings)
        if isinstance(processed, str):
            return processed
        return codec.encode(torch.from_numpy(processed.waveform)).cpu()

    prompts = []
    for prompt in tqdm(found.prompts, "reading the test set", unit="utterance", mininterval=1.0):
        latents, voice, load = prompt.latents, prompt.voice, prompt.load_reference
        if latents is None and prompt.load_recording is not None:
            latents = latents_of(prompt.load_recording())
            if isinstance(latents, str):
                found.left_out[latents] = found.left_out.get(latents, 0) + 1
                continue
        if voice is None and load is not None:
            encoded = latents_of(load())
            voice = None if isinstance(encoded, str) else encoded
        if voice is None:
            load = None
        elif load is None:
            load = partial(decoded, codec, voice)
        prompts.append(replace(prompt, latents=latents, voice=voice, load_reference=load))
    found.prompts = prompts
    if not prompts:
        raise InputError("--test: every recording in it is silent; give one with speech")


def decoded(codec: Codec, latents: Tensor) -> Sound:
    """Decodes latents (T, C)."""
    return Sound(codec.decode(latents).detach().cpu(), codec.sample_rate)


def is_list(path: str) -> bool:
    """True if the first line of a file has the fields of a list; False for any other file and for folders."""
    if not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        start = file.read(1 << 16)
    lines = start.decode("utf-8-sig", "replace").splitlines()
    first = next((line for line in lines if line.strip()), "")
    # Audio, a table or a tar holds a zero.
    return b"\0" not in start and len(first.split("|")) in (4, 5)


def read_list(path: str) -> list[Utterance]:
    """The requests of a list's lines. `audio` is the recording of the text, and empty where there is none."""
    try:
        content = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give a test list in UTF-8") from None
    numbered = [(n, line) for n, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not numbered:
        raise InputError(f"{path}: is empty; give a test list")
    return [_read_line(f"{path} line {n}", line, Path(path).parent) for n, line in numbered]


def _read_line(where: str, line: str, root: Path) -> Utterance:
    fields = [field.strip() for field in line.split("|")]
    if len(fields) not in (4, 5) or not all(fields[i] for i in (0, 2, 3)):
        raise InputError(
            f"{where}: is {line[:100]!r}, but name|prompt text|prompt wav|text to say is needed, with "
            "the recording of that text as an optional fifth field"
        )
    name, said, reference, text, recording = [*fields, ""][:5]
    named = [root / each for each in (reference, recording) if each]
    for path in named:
        if not path.is_file():
            raise InputError(f"{where}: {path} does not exist; correct the path, or copy it there")
    beside = root / "wavs" / f"{name}.wav"
    audio = named[1] if recording else beside
    given = Reference((str(named[0]),), said)
    files = {"file": str(audio)} if audio.is_file() else {}
    return Utterance(name, text, "", {"text": text}, files, given, HELDOUT)
