"""A tiny model of Irodori-TTS from its weights to a voice of its own, and back in its layout."""

import json
import tomllib
from dataclasses import replace

import numpy as np
import soundfile
from safetensors.torch import load_file, save_file

from tests.helpers.echo_style import Sizes, random_weights
from tests.helpers.pretrained_checkpoints import gemma_tokenizer
from tests.helpers.speech_corpora import tone
from tools.harness.forked import titan_tts

CODEC = "--codec=tests.helpers.small_codec:SmallCodec"
SIZES = replace(Sizes(), vocabulary=700, patch=2)
FILE = "model.safetensors"
HEADER = {"text_tokenizer_repo": "some/tokenizer", "fixed_target_latent_steps": 120}
FLOAT32 = "--training.mixed_precision_param=float32"
# Rows are as long as the model's longest utterance.
SMALL = ["--training.global_batch_size=4", "--training.max_local_batch_size=4"]
SMALL += ["--validation.times=0.9"]


def command(*arguments):
    done = titan_tts(*map(str, arguments))
    assert done.returncode == 0, done.stdout + done.stderr


def write_base(folder):
    """A converted model of Irodori-TTS."""
    folder.mkdir()
    save_file(random_weights(SIZES), folder / FILE, {"config_json": json.dumps(HEADER)})
    gemma_tokenizer().save_pretrained(folder / "tokenizer")
    command("convert", folder, folder / "base", CODEC, f"--tokenizer={folder / 'tokenizer'}")
    return folder / "base"


def write_recordings(folder):
    folder.mkdir()
    lines = []
    for number in range(12):
        sound = tone(1.0 + 0.1 * number, hertz=200 + 50 * number)
        noise = 0.01 * np.random.default_rng(number).standard_normal(len(sound))
        soundfile.write(folder / f"{number}.wav", sound + noise, 16_000)
        lines.append(
            json.dumps({"audio": f"{number}.wav", "text": ("Ten: seven", "one")[number % 2]})
        )
    (folder / "list.jsonl").write_text("\n".join(lines))
    return folder / "list.jsonl"


def test_a_voice_of_it_and_back(tmp_path):
    recordings = write_recordings(tmp_path / "recordings")
    base = write_base(tmp_path / "irodori")
    more = ["--speaker=me", "--steps=2", "--heldout-fraction=0.25", CODEC, FLOAT32, *SMALL]
    command("finetune", base, recordings, tmp_path / "tuned", *more)
    run = tmp_path / "tuned/run"
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["data"]["bucket_frames"] == [120]
    assert config["encoder"]["convention"] == "irodori" and config["sampling"]["start_t"] == 0.999
    losses = [json.loads(line)["loss"] for line in open(run / "metrics.jsonl")]
    assert np.isfinite(losses).all()

    command("export", run, tmp_path / "voice", "--weights=raw", "--voices=me", CODEC)
    speak = ["--sampling-steps=2", "--speaker=me", "--text=One.", CODEC]
    command("generate", tmp_path / "voice", *speak, "--out", tmp_path / "a.flac")
    sound, rate = soundfile.read(tmp_path / "a.flac")
    assert rate == 16_000 and 0 < len(sound) <= 120 * 640
    command("convert", tmp_path / "voice", tmp_path / "theirs", "--to=irodori")
    theirs = load_file(tmp_path / "theirs" / FILE)
    before = random_weights(SIZES)
    assert {n: v.shape for n, v in theirs.items()} == {n: v.shape for n, v in before.items()}
    changed = "blocks.1.attention.wk_speaker.weight"
    assert 0 < (theirs[changed] - before[changed]).abs().max() < 0.1
