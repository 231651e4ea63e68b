"""Speak a text without torch, by a folder of titan-tts export --onnx."""

import argparse
import sys
import wave

from titan_tts.onnx_voice import load
from titan_tts.overlay import install_overlay


def _run(args: list[str]) -> None:
    from torchtitan.models.dit_tts.errors import require, show
    from torchtitan.models.dit_tts.files import check_writable

    parser = argparse.ArgumentParser("python -m titan_tts.onnx_voice", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--text", required=True)
    parser.add_argument("--out", required=True, help="a file .wav")
    parser.add_argument(
        "--voice", help="one of the folder's; default: its first, none by --caption"
    )
    parser.add_argument("--caption", default="", help="how the voice sounds, in words")
    given = parser.parse_args(args)
    is_wav = given.out.lower().endswith(".wav")
    require(is_wav, f"--out = {given.out}, but its name must end with .wav; give another")
    check_writable(given.out, "--out")
    voice = load(given.folder)
    sound = voice.speak(given.text, given.voice, caption=given.caption)
    with wave.open(given.out, "wb") as file:
        file.setparams((1, 2, voice.sample_rate, 0, "NONE", ""))
        file.writeframes((sound * 32767).round().astype("<i2").tobytes())
    show(f"{given.out}: {len(sound) / voice.sample_rate:.2f} s")


if __name__ == "__main__":
    install_overlay(upstream=False)
    from torchtitan.models.dit_tts.errors import report_input_errors

    sys.exit(report_input_errors(_run)(sys.argv[1:]))
