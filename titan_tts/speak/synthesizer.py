"""Texts and voices to waveforms: the one way in which `generate`, `evaluate`, `serve` and Python speak."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from titan_tts.speak.adapters import Adapters
from titan_tts.speak.blocks import Blocks
from titan_tts.speak.lengths import Lengths
from titan_tts.speak.load_run import LoadedRun
from titan_tts.speak.long_text import ended, split_text
from titan_tts.speak.speech_data import (
    SpeechData,
    encode_reference,
    load_latents,
    reference_settings,
)
from titan_tts.speak.utterance import Speech, Utterance, Voice, check_text, join, pause
from titan_tts.speak.word_times import Word, WordAligner, word_aligner
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.data.members import CAPTION, caption_of
from torchtitan.models.dit_tts.errors import require, show
from torchtitan.models.dit_tts.speech.codec import Codec
from torchtitan.models.dit_tts.speech.sampling.sampler import (
    SpeechRequest,
    generate_latents,
    own_frames,
    speech_end,
)
from torchtitan.models.dit_tts.speech.sampling.sound_files import STREAMED
from torchtitan.models.dit_tts.text.tokenizer import unicode_bytes, with_duration

_MAX_SECONDS = 600.0
"""of a reference whose text is known"""

_BATCH = 16
"""pieces of long texts per batch, where there are fewer texts"""

Files = str | Path | Sequence[str | Path]
"""A file, or several in order"""


@dataclass
class Synthesizer:
    """A model with all that it needs to speak. Use one from one thread at a time."""

    run: LoadedRun
    codec: Codec
    speech_data: SpeechData
    sampling: Sampling
    find_lengths: Callable[[], Lengths]
    """called when the first length is estimated"""

    data_path: str | list[str] = ""
    """training data or exported folder, whose prepare.json says how references are treated"""

    seconds_spent: float = field(default=0.0, init=False)
    """on sampling and decoding so far"""

    @cached_property
    def lengths(self) -> Lengths:
        """The estimator of lengths."""
        return self.find_lengths()

    @cached_property
    def word_aligner(self) -> WordAligner:
        """Finds words in speech."""
        return word_aligner(self.run)

    def word_times(self, texts: Sequence[str], spoken: Sequence[Speech]) -> list[Word]:
        """The words of a text that was said in pieces, and the seconds at which each begins and ends in the joined sound.

        Args:
            texts: of each piece; of a text that was said as a whole this one.
            spoken: the speech of each piece.
        """
        return self.word_aligner.times(texts, spoken)

    @cached_property
    def adapters(self) -> Adapters:
        """Adapters that voices name."""
        return Adapters(self.run.model, self.run.folder)

    def adapted(self, name: str, folder: str | Path, recording: Files = "") -> Voice:
        """The voice of an adapter that `titan-tts export --adapter` wrote. `recording`: a reference of it."""
        self.adapters.open(name, Path(folder))
        voice = self.recording(recording) if recording else Voice()
        return replace(voice, adapter=name)

    @property
    def sample_rate(self) -> int:
        """Sample rate of the waveforms, in Hz."""
        return self.codec.sample_rate

    @property
    def speakers(self) -> list[str]:
        """Names that `voice` knows."""
        return self.speech_data.speakers

    @cached_property
    def default_voice(self) -> Voice:
        """The voice where none is named: that of the exported folder, if it has one."""
        name = self.speech_data.default_voice
        return self.speaker(name) if name else Voice()

    def show_default_voice(self, option: str) -> None:
        """Logs the default voice, and by which option others are chosen."""
        if chosen := self.default_voice.speaker:
            others = ", ".join(name for name in self.speakers if name != chosen)
            more = f"; {option} chooses another: {others}" if others else ""
            show(f"voice: {chosen}{more}", sys.stderr)

    def speaker(self, name: str) -> Voice:
        """The voice of one of `speakers`."""
        reference = self.speech_data.reference(name)
        return Voice(reference, name)

    def recording(self, path: Files, text: str = "") -> Voice:
        """The voice in an audio file, or in a .npy of latents (R, C).

        Args:
            path: of several files, as many speakers in the order of their turns; each may have an equal part of
                [data] max_speaker_frames.
            text: text of the recording, if it is known.
        """
        paths = [path] if isinstance(path, str | Path) else path
        several = f"reference text with {len(paths)} references; leave it out"
        require(not text or len(paths) == 1, several)
        require(
            self.run.model.args.speaker_reference,
            "a reference is given, but the model takes a caption in its place; give --caption",
        )
        data, settings = self.run.config.data, reference_settings(self.data_path)
        # A known text is of the whole recording, whose length then counts; the model takes less.
        longest = round(_MAX_SECONDS * self.codec.frames_per_second)
        whole = text and not self._ends_itself
        limit = longest if whole else max(1, data.max_speaker_frames // len(paths))
        found = [
            load_latents(each, data.latent_channels)
            if Path(each).suffix == ".npy"
            else encode_reference(each, self.codec, settings, limit)
            for each in paths
        ]
        joined = found[0] if len(found) == 1 else torch.cat([each[:limit] for each in found])
        return Voice(joined, text=text)

    def voice(self, of: "Files | Tensor | Voice | None") -> Voice:
        """A voice from an audio file, or several, a speaker's name or latents (R, C); None: the default one. `Voice()`
        is no particular one."""
        if of is None:
            return self.default_voice
        if isinstance(of, Voice):
            return of
        if isinstance(of, Tensor):
            return Voice(of)
        if isinstance(of, str) and not Path(of).is_file():
            return self.speaker(of)
        return self.recording(of)

    @property
    def takes_captions(self) -> bool:
        """True if the model was trained with captions."""
        return self.run.config.data.max_caption_tokens > 0

    def conditions(self, voice: Voice, caption: str = "") -> dict[str, str]:
        """The speaker's token, where the model was trained with it, and the caption. Raises InputError for a caption that
        the model does not take."""
        known = self.run.tokenizer.vocabulary.conditioning.get("speaker", ())
        found = {"speaker": voice.speaker} if voice.speaker in known else {}
        if not caption.strip():
            return found
        require(
            self.takes_captions,
            "a caption is given, but the model was not trained with captions ([data] max_caption_tokens = 0); leave it out, or "
            "give a model that was",
        )
        longest = self.run.config.data.max_caption_tokens
        unicode_bytes(caption)
        size = len(self.run.tokenizer.caption_ids(found := found | {CAPTION: caption}))
        require(
            size <= longest, f"the caption has {size} tokens, but at most {longest} are allowed"
        )
        return found

    def frames(self, utterances: Sequence[Utterance]) -> list[int]:
        """Lengths to generate, in latent frames: given, or by `lengths`."""
        unknown = [self._ended(each) for each in utterances if each.frames is None]
        generated = iter(self.lengths.generate(unknown) if unknown else [])
        return [next(generated) if each.frames is None else each.frames for each in utterances]

    def pieces(self, utterance: Utterance, low_latency: bool = False) -> list[Utterance]:
        """Splits a text into pieces no longer than the training utterances, and sets their lengths; keeps one of a given
        length whole. `low_latency`: see `split_text`."""
        data, tokenizer = self.run.config.data, self.run.tokenizer

        def sizes(texts: Sequence[str]) -> list[float]:
            texts = [self._ended(replace(utterance, text=text)).text for text in texts]
            tokens = [len(tokenizer.encode(text)) / data.max_text_tokens for text in texts]
            # A predictor takes minutes for a text far beyond its training.
            fitting = [replace(utterance, text=t) for t, size in zip(texts, tokens) if size <= 1]
            frames = iter(self.lengths.frames(fitting))
            most = utterance.speed * data.max_frames
            return [size if size > 1 else max(size, next(frames) / most) for size in tokens]

        if utterance.frames is not None:
            return [replace(utterance, text=" ".join(utterance.text.split()))]
        texts = split_text(utterance.text, sizes, low_latency)
        pieces = [replace(utterance, text=text) for text in texts]
        lengths = self.frames(pieces)
        return [replace(each, frames=n) for each, n in zip(pieces, lengths, strict=True)]

    def streams(self, kind: str) -> bool:
        """True if a sound of this format can be sent piece by piece. A wav begins with its length, which a model
        that ends the speech itself does not tell before."""
        return kind in STREAMED and not (kind == "wav" and self._ends_itself)

    @property
    def has_blocks(self) -> bool:
        """True if an utterance can be said block by block: the model must know where in it a part of the text is said."""
        return self.run.config.model.text_positions == "aligned"

    def blocks(self, pieces: Sequence[Utterance]) -> Blocks:
        """The blocks of the first of a text's pieces, whose lengths are set."""
        return Blocks(pieces[0], self.codec.hop_length, len(pieces))

    @property
    def _ends_itself(self) -> bool:
        return own_frames(self.run.config) > 0

    def designs_voice(self, pieces: Sequence[Utterance]) -> bool:
        """True if a caption alone makes the voice of a text of several pieces, of which each would have one of its own."""
        if len(pieces) < 2 or not (self.takes_captions and self.run.model.args.speaker_reference):
            return False
        return pieces[0].voice.reference is None and bool(caption_of(pieces[0].conditions))

    def in_one_voice(self, pieces: Sequence[Utterance], first: Speech) -> list[Utterance]:
        """The pieces with what the first one was said as for the reference, if it `designs_voice`."""
        if not self.designs_voice(pieces):
            return list(pieces)
        voice = replace(pieces[0].voice, reference=first.latents)
        return [replace(each, voice=voice) for each in pieces]

    def samples(self, pieces: Sequence[Utterance]) -> int:
        """Samples that the pieces of a text will have at most, with the pauses between them; exactly so many where
        the model does not end the speech itself."""
        silence = len(pause(self.sample_rate)) * (len(pieces) - 1)
        return silence + self.codec.hop_length * sum(self.frames(pieces))

    def _ended(self, utterance: Utterance) -> Utterance:
        characters = self.run.tokenizer.vocabulary.characters
        return replace(utterance, text=ended(utterance.text, characters))

    def _request(self, utterance: Utterance) -> SpeechRequest:
        """Return the sampler's request for an utterance whose length is set."""
        data, frames = self.run.config.data, utterance.frames or 0
        conditions = with_duration(utterance.conditions, frames, data.frames_per_second)
        reference = utterance.voice.latents(data)
        said = utterance.until, utterance.known
        return SpeechRequest(self._ended(utterance).text, reference, frames, conditions, *said)

    def synthesize(
        self,
        texts: Sequence[str | Utterance],
        voices: "Sequence[Files | Tensor | Voice | None]" = (),
        seed: int = 0,
        sampling: Sampling | None = None,
        caption: str | Sequence[str] = "",
    ) -> list[Speech]:
        """Synthesizes texts as one batch, long ones in pieces. The noise is of the text, the speaker and the seed, so that
        a row does not depend on the others.

        Args:
            voices: of each text, or one for all, as `voice` takes it; empty: the default one. An `Utterance` has its own.
            sampling: instead of the model's.
            caption: the voice and its manner in words, of each text, or one for all, for a model that takes it. With it
                no voices are no particular ones. An `Utterance` has its own.
        """
        captions = [caption] if isinstance(caption, str) else list(caption)
        default = Voice() if any(captions) else None
        found = [self.voice(each) for each in voices or [default]]
        for what, given in (("voices", found), ("captions", captions)):
            counts = f"{len(texts)} texts with {len(given)} {what}"
            require(len(given) in (1, len(texts)), f"{counts}; give one for each, or one for all")
        utterances = [
            Utterance(text, voice, self.conditions(voice, words)) if isinstance(text, str) else text
            for text, voice, words in zip(
                texts,
                found if len(found) > 1 else found * len(texts),
                captions if len(captions) > 1 else captions * len(texts),
            )
        ]
        for each in utterances:
            require(bool(each.text.strip()), "a text is empty; give one")
            check_text(each.text, self.run.tokenizer, f"the text {each.text[:40]!r}")
        pieces = [self.pieces(each) for each in utterances]
        said = dict(self.say(pieces, seed, max(len(texts), _BATCH), sampling))
        return [join(said[index]) for index in range(len(texts))]

    def say(
        self,
        texts: Sequence[Sequence[Utterance]],
        seed: int,
        batch_size: int,
        sampling: Sampling | None = None,
    ) -> Iterator[tuple[int, list[Speech]]]:
        """(index, speech of its pieces) of each text as soon as it is complete; `texts`: the pieces of each, see
        `pieces`."""
        texts, done = list(texts), [dict[int, Speech]() for _ in texts]
        designed = [text for text, pieces in enumerate(texts) if self.designs_voice(pieces)]
        firsts = [texts[text][0] for text in designed]
        for index, speech in self.speak_sorted(firsts, seed, batch_size, sampling):
            done[(text := designed[index])][0] = speech
            texts[text] = self.in_one_voice(texts[text], speech)
        every = ((text, number) for text, each in enumerate(texts) for number in range(len(each)))
        places = [(text, number) for text, number in every if number not in done[text]]
        flat = [texts[text][number] for text, number in places]
        for index, speech in self.speak_sorted(flat, seed, batch_size, sampling):
            text, number = places[index]
            done[text][number] = speech
            if len(done[text]) == len(texts[text]):
                yield text, [done[text][n] for n in range(len(texts[text]))]
                done[text] = {}

    def stream(
        self,
        pieces: Sequence[Utterance],
        seed: int,
        batch_size: int,
        low_latency: bool = False,
    ) -> Iterator[Speech]:
        """The speech of the pieces of one text, in their order. `low_latency`: the first is a batch of its own."""
        alone = low_latency or self.designs_voice(pieces)
        ends = range(1 if alone else batch_size, len(pieces), batch_size)
        for start, end in pairwise([0, *ends, len(pieces)]):
            spoken = dict(self.speak_sorted(pieces[start:end], seed, batch_size))
            yield from (spoken[index] for index in range(end - start))
            pieces = self.in_one_voice(pieces, spoken[0])

    def speak(
        self, utterances: Sequence[Utterance], seed: int, sampling: Sampling | None = None
    ) -> list[Speech]:
        """The speech of a batch of utterances whose lengths are set, of each adapter in turn; see `synthesize`."""
        began, spoken = time.perf_counter(), dict[int, Speech]()
        for adapter in dict.fromkeys(each.voice.adapter for each in utterances):
            chosen = [i for i, each in enumerate(utterances) if each.voice.adapter == adapter]
            self.adapters.use(adapter)
            latents = generate_latents(
                self.run.model,
                self.run.tokenizer,
                self.run.objective,
                [self._request(utterances[index]) for index in chosen],
                sampling or self.sampling,
                seed,
                self.run.device,
                self.run.text_encoder,
            )
            for index, each in zip(chosen, latents, strict=True):
                latents_of_speech = each[: speech_end(each)] if self._ends_itself else each
                waveform = self.codec.decode(latents_of_speech).detach().cpu()
                spoken[index] = Speech(waveform, self.sample_rate, latents_of_speech)
        self.seconds_spent += time.perf_counter() - began
        return [spoken[index] for index in range(len(utterances))]

    def speak_sorted(
        self,
        utterances: Sequence[Utterance],
        seed: int,
        batch_size: int,
        sampling: Sampling | None = None,
    ) -> Iterator[tuple[int, Speech]]:
        """(index, speech) of any number of utterances, in batches of similar length."""
        lengths = self.frames(utterances)
        numbered = [
            (index, replace(each, frames=frames))
            for index, (each, frames) in enumerate(zip(utterances, lengths, strict=True))
        ]
        numbered.sort(key=lambda pair: (pair[1].voice.adapter, pair[1].frames))
        for start in range(0, len(numbered), batch_size):
            indices, batch = zip(*numbered[start : start + batch_size], strict=True)
            yield from zip(indices, self.speak(batch, seed, sampling), strict=True)
