"""The kinds of faults that the doctor knows, and limits that depend on the training."""

from dataclasses import dataclass, field

# Severity, code (a stable name in the JSON), title, advice; the worst first. An error is corrupt or leaking data, a warning
# is valid data that is likely to harm a training, a note is worth knowing.
_KINDS = """
error | corrupt_shard | Shards that are corrupt or cut off | Copy or write the shard again; the samples after the fault are lost to training.
error | not_finite | Samples with NaN or infinite values | One of them makes the loss NaN: encode these utterances again or remove them.
error | unusable_sample | Samples that lack a member, cannot be parsed or do not fit the others | Write them again or remove them; [data] on_error = "skip" trains on the others.
error | corrupt_sample | Samples whose bytes differ from what was written | A disk or a copy corrupted them: copy the shard again from a valid one.
error | shard_changed | Shards that are missing or have another size than prepare.json recorded | Copy them again; if they were changed on purpose, remove prepare.json.
error | constant_latents | Latents that are all zero or never change | Every frame is the same, which speech never is: encode these utterances again or remove them.
error | constant_reference | References that are all zero or never change | They hold no information about the speaker: titan-tts prepare into a new folder chooses others; in your own shards take another utterance of the speaker, or none.
error | reference_from_target | References with frames of their own target | The model copies its target: titan-tts prepare into a new folder chooses others; in your own shards take another utterance of the speaker, or none.
error | texts_of_others | Texts that do not fit the lengths of their recordings | They belong to other recordings, as if a list were shifted by a row: listen to a few.
error | lost_letters | Texts with letters that espeak-ng does not read | It says the name of their script or nothing, the same for many words: train on chars or bytes, or write these words as they are said.
error | heldout_in_training | Held-out samples with the latents of a training sample | Their metrics measure memorization: remove them from one of the two.
warning | std_outlier | Latents with a standard deviation far from the others' | Often a different loudness, a different codec or silence: listen to a few.
warning | peak_outlier | Latents with a maximum magnitude far above the others' | Often a corrupt or clipped recording: listen to a few.
warning | clipped | Recordings with more than 1 % of their samples at full scale | Their peaks are cut off, and a model learns to sound so: record them at a lower level, or leave them out by titan-tts prepare --max-clipped 0.01.
warning | chars_per_second_outlier | Speech much faster or slower than the rest | Text and audio probably do not match, or one of them is cut off.
warning | texts_explain_little | Texts that fit the lengths of their recordings less than right ones do | Some belong to other recordings, or these are cut or hold long silence: listen to a few.
warning | empty_text | Samples without text | The model learns to speak from nothing: give them their text or remove them.
warning | unspoken_parts | Texts with parts in brackets, such as <beep> or (laughs) | The model learns to say them: remove what is not heard, and name what is in [encoder] added_tokens.
warning | not_nfc | Samples with a text or a speaker in decomposed Unicode (not NFC) | Generation composes what it is given, so these are other letters and other speakers: titan-tts prepare into a new folder composes them.
warning | long_text | Texts above max_text_tokens | Training leaves them out: raise [data] max_text_tokens or split them.
warning | long_latents | Latents above max_frames | Training leaves them out: raise [data] max_frames or split them.
warning | duration_mismatch | Latents whose length differs from their target_duration | Audio was cut or padded, or the frame rate differs: see --frames-per-second.
warning | duplicate_latents | Samples with the latents of an earlier sample | The same recording counts several times: remove the copies.
note | texts_not_compared | Texts that could not be compared with the lengths of their recordings | Whether they belong to other recordings cannot be told from so little: listen to a few.
note | single_utterance_speaker | Speakers with one utterance | No other utterance can be their reference.
"""


@dataclass(frozen=True)
class Limits:
    """Limits that the doctor compares the samples with."""

    frames_per_second: float = 25.0
    """Latent frames per second of audio."""

    max_frames: int | None = None
    """Maximum length of the latents, as [data] max_frames; by default as there, and what 99 % of the speech needs."""

    max_text_tokens: int | None = None
    """Maximum length of the text with its begin and end token, as [data] max_text_tokens; by default likewise."""

    text_unit: str = "bytes"
    """Unit of text tokens, as [encoder] model: bytes, chars or phones:LANGUAGE."""

    normalize: str = ""
    """Language in which numbers count as words, as [encoder] normalize."""


@dataclass(frozen=True)
class Example:
    """The id and the fault of a sample or shard."""

    where: str
    detail: str


@dataclass
class Finding:
    """The cases of one kind of fault; the first or the worst are examples."""

    code: str
    severity: str
    title: str
    advice: str
    count: int = 0
    examples: list[Example] = field(default_factory=list)


def all_kinds() -> dict[str, Finding]:
    """Code -> its finding without a case, the worst first."""
    found = {}
    for line in _KINDS.strip().splitlines():
        severity, code, title, advice = map(str.strip, line.split("|"))
        found[code] = Finding(code, severity, title, advice)
    return found
