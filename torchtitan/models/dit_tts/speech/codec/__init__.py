"""Codecs: waveform <-> latent frames. The rest of the system sees the `Codec` protocol only."""

from pathlib import Path

from torchtitan.models.dit_tts.speech.codec.interface import Codec, codec_kind

__all__ = ["Codec", "build_codec", "codec_kind"]


def build_codec(name: str, device: str = "cpu") -> Codec:
    """The codec called `name`; mel_dct is also the path of its mel_dct_stats.json. `device`: where
    a codec with weights runs, as torch names it; mel_dct always runs on the CPU.
    """
    if codec_kind(name) == "mel_dct":
        from torchtitan.models.dit_tts.speech.codec.mel_dct import STATISTICS_FILE, MelDctCodec

        return MelDctCodec(STATISTICS_FILE if name == "mel_dct" else Path(name))
    from torchtitan.models.dit_tts.speech.codec.dac_vae import load_dac_vae

    return load_dac_vae(name, device)
