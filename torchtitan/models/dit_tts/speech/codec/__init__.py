"""Codecs: waveform <-> latent frames. The rest of the system sees the `Codec` protocol only."""

from pathlib import Path

from torchtitan.models.dit_tts.config.codec_name import VOCODERS, split_vocoder
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.factories import call_factory
from torchtitan.models.dit_tts.speech.codec.interface import OWN, Codec, codec_kind

__all__ = ["Codec", "build_codec", "codec_kind"]

_KNOWN = "mel_dct, mel_dct+vocoder, mel_dct+vocoder24k, the weights of a DAC-VAE"
_MEMBERS = (
    *("sample_rate", "hop_length", "latent_channels", "fingerprint", "frames_per_second"),
    *("to_whole_frames", "encode", "encode_batch", "decode"),
)


def build_codec(name: str, device: str = "cpu") -> Codec:
    """The codec called `name`; mel_dct is also the path of its mel_dct_stats.json, and +vocoder, +vocoder24k (or + and
    a vocoder's file) behind it makes the waveforms by a vocoder, at its rate. `device`: where a codec with weights runs,
    as torch names it; mel_dct always runs on the CPU.
    """
    if not name:
        raise InputError(
            "the model's codec is not in its folder, as a user's function makes it; give --codec "
            "package.module:factory (docs/codec.md)"
        )
    if codec_kind(name) == "mel_dct":
        from torchtitan.models.dit_tts.speech.codec.mel_dct import (
            STATISTICS_FILE,
            VOCODER_FOLDER,
            MelDctCodec,
        )

        name, vocoder = split_vocoder(name)
        shipped = VOCODER_FOLDER / f"{vocoder}.safetensors"
        file = shipped if vocoder in VOCODERS.values() else Path(vocoder).expanduser()
        return MelDctCodec(
            STATISTICS_FILE if name == "mel_dct" else Path(name), file if vocoder else None
        )
    if codec_kind(name) == OWN:
        made = call_factory(name, device, "codec", _KNOWN, _MEMBERS, "speech/codec/interface.py")
        made.name = name
        return made
    from torchtitan.models.dit_tts.speech.codec.dac_vae import load_dac_vae

    return load_dac_vae(name, device)
