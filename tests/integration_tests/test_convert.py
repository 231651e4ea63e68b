"""A tiny model of Echo-TTS from its weights to a voice of its own: convert, generate, train, finetune, export, serve."""

import json
import tomllib

import numpy as np
import pytest
import soundfile
from safetensors.torch import load_file, save_file

from tests.helpers.echo_style import Sizes, random_weights
from tests.helpers.speech_corpora import tone
from tools.harness.forked import titan_tts

CODEC = "--codec=tests.helpers.small_codec:SmallCodec"


def command(*arguments):
    done = titan_tts(*map(str, arguments))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("echo")
    save_file(random_weights(Sizes()), folder / "pytorch_model.safetensors")
    command("convert", folder, folder / "base", CODEC)
    return folder / "base"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder, lines = tmp_path_factory.mktemp("recordings"), []
    for number in range(12):
        sound = tone(1.0 + 0.1 * number, hertz=200 + 50 * number)
        noise = 0.01 * np.random.default_rng(number).standard_normal(len(sound))
        soundfile.write(folder / f"{number}.wav", sound + noise, 16_000)
        lines.append(
            json.dumps({"audio": f"{number}.wav", "text": ("Ten: seven", "one")[number % 2]})
        )
    (folder / "list.jsonl").write_text("\n".join(lines))
    return folder / "list.jsonl"


def test_it_speaks_and_is_trained_and_given_back(base, recordings, tmp_path):
    fast = ["--sampling-steps=2", CODEC]
    command("generate", base, *fast, "--text=Good morning.", "--out", tmp_path / "base.wav")
    sound, rate = soundfile.read(tmp_path / "base.wav")
    assert rate == 16_000 and 0 < len(sound) <= 640 * 640

    more = ["--speaker=me", "--steps=2", "--heldout-fraction=0.25", CODEC]
    precision = "--training.mixed_precision_param=float32"
    command("finetune", base, recordings, tmp_path / "tuned", *more, precision)
    run = tmp_path / "tuned/run"
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["data"]["bucket_frames"] == [640] and config["objective"]["loss_on_padding"]
    by_hand = [base / "fine_tune.toml", f"--data.path={tmp_path / 'tuned/data/train'}", precision]
    by_hand += [
        f"--checkpoint.initial_load_path={base}",
        "--training.steps=2",
        "--data.batch_multiple=4",
    ]
    by_hand += [
        "--training.global_batch_size=4",
        f"--job.dump_folder={tmp_path}",
        "--job.experiment=hand",
    ]
    command("train", *by_hand, "--sampling.codec=tests.helpers.small_codec:SmallCodec")
    losses = [json.loads(line)["loss"] for line in open(tmp_path / "hand/metrics.jsonl")]
    assert np.isfinite(losses).all()

    command("export", run, tmp_path / "voice", "--weights=raw", "--voices=me", CODEC)
    command(
        "generate",
        tmp_path / "voice",
        *fast,
        "--speaker=me",
        "--text=One.",
        "--out",
        tmp_path / "a.flac",
    )
    command("convert", tmp_path / "voice", tmp_path / "theirs", "--to=echo")
    theirs = load_file(tmp_path / "theirs/pytorch_model.safetensors")
    before = random_weights(Sizes())
    assert {name: value.shape for name, value in theirs.items()} == {
        n: v.shape for n, v in before.items()
    }
    changed = "blocks.1.attention.wk_speaker.weight"
    assert 0 < (theirs[changed] - before[changed]).abs().max() < 0.1
