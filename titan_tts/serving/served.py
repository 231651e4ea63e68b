"""The model that `serve` and `demo` offer, its voices, and what they make of a request's text."""

from dataclasses import dataclass
from functools import cached_property

from titan_tts.serving.options import ServerOptions, given_voices
from titan_tts.speak.long_text import clean_text
from titan_tts.speak.sampling_options import check_text, load_synthesizer
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Utterance, Voice
from torchtitan.models.dit_tts.errors import require


@dataclass
class Served:
    synthesizer: Synthesizer
    voices: dict[str, Voice]
    """of --voice by name"""

    max_characters: int
    """of a request's text"""

    @cached_property
    def names(self) -> list[str]:
        """Voices that a request may name."""
        return sorted({*self.synthesizer.speakers, *self.voices})

    def pieces(
        self, text: str, voice: str | Voice | None, speed: float, low_latency: bool = False
    ) -> list[Utterance]:
        """The utterances as which a text is synthesized. Raises InputError if the model cannot say it."""
        require(bool(text.strip()), "the text is empty; give one")
        require(
            len(text) <= self.max_characters,
            f"the text has {len(text)} characters, but at most {self.max_characters} are allowed",
        )
        text = clean_text(text)
        check_text(text, self.synthesizer.run.tokenizer, "the text")
        if isinstance(voice, str) and voice:
            names = ", ".join(self.names) or "none"
            require(voice in self.names, f"there is no voice {voice!r}; there are: {names}")
            voice = self.voices.get(voice) or self.synthesizer.speaker(voice)
        voice = voice or self.synthesizer.default_voice
        whole = Utterance(text, voice, self.synthesizer.conditions(voice), speed=speed)
        return self.synthesizer.pieces(whole, low_latency)


def load_served(options: ServerOptions) -> Served:
    """The model and the voices of --voice."""
    synthesizer = load_synthesizer(options)
    synthesizer.show_default_voice("a request or the page")
    _ = synthesizer.lengths  # a missing predictor or fit is told now, not at the first request
    voices = {}
    for name, (folder, files) in given_voices(options).items():
        voices[name] = (
            synthesizer.adapted(name, folder, files) if folder else synthesizer.recording(files)
        )
    return Served(synthesizer, voices, options.max_characters)
