"""What `titan-tts finetune` asks of the other commands, which are not run here, and what it says at the end."""

import hashlib
import json
import shutil
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from titan_tts.cli import main
from titan_tts.finetune import finetune_command
from torchtitan.models.dit_tts.config import exported, manager
from torchtitan.models.dit_tts.config.job_config import Encoder
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard

CHANNELS = 8
SECONDS = {"cat": [3, 4], "bob": [9, 8, 7], "ann": [2]}
"""of each speaker's recordings: the first by name is neither the first in the shards nor has most"""
RUN_COMMAND = finetune_command._titan_tts


@pytest.fixture
def finetune(tmp_path, monkeypatch):
    """`titan-tts finetune base data out`: the arguments of each command, by its name."""
    config = manager.load_config([f"--data.latent_channels={CHANNELS}", "--data.max_frames=500"])
    monkeypatch.setattr(manager, "load_run_config", lambda folder, args=(): config)
    monkeypatch.setattr(finetune_command, "_titan_tts", lambda *a: commands.__setitem__(a[0], a))
    monkeypatch.chdir(tmp_path)
    audio = {"loudness": -20.0, "max_silence": None}
    monkeypatch.setattr(exported, "read_exported", lambda folder: {"audio": audio})
    commands: dict[str, tuple[str, ...]] = {}
    (tmp_path / "out/base").mkdir(parents=True)
    (tmp_path / "out/base/fine_tune.toml").write_text("[optimizer]\nlr = 0.02\n")

    def call(speakers, hours, *more):
        samples = []
        for speaker, lengths in speakers.items():
            for seconds in lengths:
                latents = np.ones((25 * seconds, CHANNELS), np.float16)
                metadata = {"text": "one"} | call.labels | ({"speaker": speaker} if speaker else {})
                samples.append(Triplet(f"k{len(samples)}", latents, latents, metadata))
        for split in ("train", "heldout"):
            (tmp_path / "data" / split).mkdir(parents=True, exist_ok=True)
            write_shard(tmp_path / "data" / split / "s.tar", samples)
        record = {"version": 5, "settings": {}, "shards": {}}
        record["summary"] = {"train": {"hours": hours}, "heldout": {"samples": 13}}
        (tmp_path / "data/prepare.json").write_text(json.dumps(record))
        assert main(["finetune", "base", call.recordings, "out", *more]) == 0
        return commands

    call.recordings, call.config, call.labels = "data", config, dict[str, str]()
    return call


def test_the_first_of_several_speakers_is_named(finetune, capsys):
    finetune(SECONDS, 1.0)
    lines = [each for each in capsys.readouterr().out.splitlines() if each.startswith("speak:")]
    speak = "speak:   titan-tts generate out/run --step best"
    voices = ("--speaker ann", "--reference VOICE.wav")
    assert lines == [f"{speak} {voice} --text ..." for voice in voices]
    finetune({"": [2, 3]}, 1.0)
    assert "--speaker" not in capsys.readouterr().out


def test_nothing_is_trained_without_a_held_out_recording(finetune, tmp_path, capsys):
    finetune(SECONDS, 1.0)
    shutil.rmtree(tmp_path / "data/heldout")
    assert main(["finetune", "base", "data", "out"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "data has no held-out recordings" in line and "give more recordings" in line
    assert main(["finetune", "base", "data", "out", "--validation.path=other"]) == 0


@pytest.mark.parametrize("ends, status", [("exit 3", 3), ("kill -9 $$", 137)])
def test_a_command_that_ends_ends_all_with_its_status(
    finetune, monkeypatch, tmp_path, ends, status
):
    finetune(SECONDS, 1.0)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{ends}\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(finetune_command, "_titan_tts", RUN_COMMAND)
    assert main(["finetune", "base", "data", "out"]) == status


def test_another_base_or_method_is_not_continued(finetune, tmp_path, capsys):
    finetune(SECONDS, 1.0, "--method=lora")
    assert main(["finetune", "base", "data", "out"]) == 2
    (tmp_path / "base").mkdir()
    assert main(["finetune", "other", "data", "out", "--method=lora"]) == 2
    (tmp_path / "base").rmdir()  # it has moved
    assert main(["finetune", "other", "data", "out", "--method=lora"]) == 0
    said = capsys.readouterr().err
    assert said.count("give another OUT") == 2 and "by --method lora" in said
    assert f"holds a fine-tune of {tmp_path / 'base'}, not of other" in said


@pytest.mark.parametrize(
    "device, has_bfloat16, checkpointing, precision",
    [("cuda", False, None, None), ("cpu", True, "none", None), ("cpu", False, "none", "float32")],
)
def test_a_cpu_keeps_activations_and_computes_in_the_faster_precision(
    finetune, monkeypatch, device, has_bfloat16, checkpointing, precision
):
    monkeypatch.setattr("torchtitan.tools.utils.device_type", device)
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(f"torch.cpu.{name}", lambda: has_bfloat16)
    given = "--training.mixed_precision_param", "bfloat16"  # what is given comes last
    train = finetune(SECONDS, 1.0, *given)["train"]
    assert train[-2:] == given
    keys = dict(zip(train[2:-2:2], train[3:-2:2], strict=True))
    assert keys.get("--activation_checkpoint.mode") == checkpointing
    assert keys.get("--training.mixed_precision_param") == precision


@pytest.mark.parametrize(
    "minutes, method, given, steps, lr, validations",
    [
        (1.0, "full", 0, 400, 0.002, (134, 12)),
        (20.0, "full", 0, 400, 0.002, (134, 12)),
        (20.1, "full", 0, 1000, 0.002, (334, 31)),
        (20.0, "lora", 0, 133, 0.006, (45, 4)),
        (21.0, "lora", 0, 333, 0.006, (111, 10)),
        (21.0, "lora", 450, 450, 0.006, (150, 14)),
        (1.0, "full", 1, 1, 0.002, (40, 4)),
        (1.0, "full", 8, 8, 0.002, (40, 4)),
        (1.0, "full", 20, 20, 0.002, (40, 4)),  # at the end alone
        (1.0, "full", 9000, 9000, 0.002, (500, 32)),
    ],
)
def test_steps_follow_the_minutes_and_the_rate_the_method(
    finetune, minutes, method, given, steps, lr, validations, capsys
):
    options = f"--method={method}", f"--steps={given}", "--nproc=2", "--data.seed=3"
    train = finetune(SECONDS, minutes / 60, *options)["train"]
    keys = dict(zip(train[2:-1:2], train[3:-1:2], strict=True))
    assert train[1] == "out/base/fine_tune.toml" and train[-1] == "--data.seed=3"
    assert (int(keys["--training.steps"]), float(keys["--optimizer.lr"])) == (steps, lr)
    assert float(keys["--optimizer.weight_decay"]) == 0  # the base's is not, and pulls away from it
    assert keys["--nproc"] == "2"
    warmup, decay = (float(keys[f"--lr_scheduler.{n}"]) for n in ("warmup_steps", "decay_ratio"))
    assert (warmup, decay) == (max(1, steps // 20), {1: 0.0, 8: 0.875}.get(steps, 0.95))
    assert warmup + round(steps * decay) <= steps  # else the training warns
    assert keys["--data.path"] == "data/train" and keys["--validation.path"] == "data/heldout"
    assert keys["--lora.rank"] == ("16" if method == "lora" else "0")
    assert keys["--checkpoint.initial_load_path"] == "out/base"
    freq, samples = validations
    assert (keys["--validation.freq"], keys["--validation.samples"]) == (str(freq), str(samples))
    # Why not all that are held out, unless the user says how many.
    assert (f"measure {samples} of 13 held-out" in capsys.readouterr().out) == (samples < 13)
    finetune(SECONDS, minutes / 60, *options, "--validation.samples=3")
    assert "held-out samples" not in capsys.readouterr().out


def test_a_base_of_phones_learns_another_language(finetune, tmp_path, capsys):
    """Read as its phones, without a grammar of numbers where there is none."""
    row = {"text": "one", "speaker": "ann"}
    rows = [json.dumps(row | {"audio": f"{number}.wav"}) for number in range(4)]
    (tmp_path / "list.jsonl").write_text("\n".join(rows))
    (tmp_path / "out/data").symlink_to(tmp_path / "data")
    finetune.recordings = "list.jsonl"
    finetune.config.encoder.model, finetune.config.encoder.normalize = "phones:en-us", "en"
    for language, *reads in (
        ("es", "phones:es", ""),
        ("ja", "phones:ja", "ja"),
        ("fr_FR", "phones:fr-fr", ""),
        ("fr", "phones:fr-fr", ""),
        ("de-DE", "phones:de", ""),
        ("pt-BR", "phones:pt-br", ""),
        ("Spanish", "phones:es", ""),
        ("zh", "phones:cmn", "zh"),
        ("en-GB", "phones:en-us", "en"),
        ("English", "phones:en-us", "en"),
        ("", "phones:en-us", "en"),
    ):
        commands = finetune(SECONDS, 1.0, f"--language={language}")
        assert commands["prepare"][commands["prepare"].index("--encoder") + 1] == reads[0]
        train = commands["train"]
        keys = dict(zip(train[2::2], train[3::2], strict=True))
        assert [keys["--encoder.model"], keys["--encoder.normalize"]] == reads
        is_new = reads[0] != "phones:en-us"
        assert float(keys["--optimizer.lr"]) == (0.01 if is_new else 0.002)
    finetune.labels = {"language": "es"}
    for languages, recordings, given, reads in (
        (["pt", ""], "list.jsonl", "", "phones:pt"),
        (["pt", ""], "list.jsonl", "it", "phones:it"),
        (["pt", "es"], "list.jsonl", "", "phones:en-us"),
        ([], "data", "", "phones:es"),  # prepared before
        ([], "data", "it", "phones:it"),
    ):
        named = zip(rows, languages * 2)
        lines = [json.dumps(json.loads(row) | {"language": each}) for row, each in named]
        (tmp_path / "list.jsonl").write_text("\n".join(lines))
        finetune.recordings = recordings
        train = finetune(SECONDS, 1.0, f"--language={given}")["train"]
        assert train[train.index("--encoder.model") + 1] == reads
    capsys.readouterr()
    kept = f"--keep={tmp_path / 'data/train'}"
    finetune.recordings = "list.jsonl"
    for given, words in (
        (["--language=qq"], "espeak-ng has no language 'qq'"),
        (["--language=es", "--method=lora"], "'es', which base does not read, nor an adapter"),
        (["--language=es", kept], "as data of --keep are in its own; leave --keep out"),
    ):
        (tmp_path / "out/finetune.json").unlink()
        assert main(["finetune", "base", "list.jsonl", "out", *given]) == 2
        assert words in capsys.readouterr().err
    finetune.config.encoder.model = "chars"  # of no language
    assert "chars" in finetune(SECONDS, 1.0, "--language=es")["train"]
    assert main(["finetune", "base", "data", "out", "--language=es"]) == 2
    assert "--language is for recordings, but data" in capsys.readouterr().err


def test_what_is_forgotten_is_read_in_the_language_of_the_base(finetune, monkeypatch):
    now = replace(finetune.config, encoder=Encoder(model="phones:es"))
    finetune.config.encoder.model = "phones:en-us"
    of = lambda folder, args=(): now if folder.name == "run" else finetune.config  # noqa: E731
    monkeypatch.setattr(manager, "load_run_config", of)
    monkeypatch.setattr("titan_tts.evaluate.page.comparison_page", Mock())
    options = "--recognizer=words:one", "--keep-test=data/heldout"
    asked = finetune(SECONDS, 1.0, *options)["evaluate"]
    assert asked[asked.index("--out") + 1] == "out/forgotten"
    assert asked[asked.index("--encoder") + 1] == "phones:en-us"


@pytest.mark.parametrize("wanted, held", [(14, 4), (35, 11), (70, 12), (140, 14)])
def test_how_many_recordings_are_held_out(finetune, tmp_path, wanted, held):
    """A tenth, at least twelve, or a third of few; of those that --where takes, as `prepare` draws them."""
    keys = [f"k{number}" for number in range(wanted + 30)]
    row = {"text": "one", "speaker": "ann"}
    rows = [
        row | {"audio": f"{key}.wav", "key": key, "quality": "low" if number < 30 else "high"}
        for number, key in enumerate(keys)
    ]
    rows += [row | {"audio": f"{n}.wav", "split": "train", "quality": "high"} for n in range(50)]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "out/data").symlink_to(tmp_path / "data")
    finetune.recordings = "list.jsonl"
    options = "--where=quality=high", "--language=de", "--on-error=skip", "--format=manifest"
    prepare = finetune(SECONDS, 1.0, *options)["prepare"]
    given = dict(zip(prepare[3::2], prepare[4::2], strict=True))
    expected = {"--where": "quality=high", "--loudness": "-20.0", "--max-silence": "off"}
    expected |= {"--on-error": "skip", "--format": "manifest", "--max-corrupt-fraction": "1"}
    expected |= {"--language": "de", "--max-seconds": "20"}  # 500 frames, 25 of which are a second
    assert given | expected == given
    fraction = float(given["--heldout-fraction"])
    digests = (hashlib.sha256(f"0\0{key}".encode()).digest() for key in keys[30:])
    assert sum(int.from_bytes(each[:8], "little") < fraction * 2**64 for each in digests) == held


def test_a_list_without_speakers_or_held_out_rows_is_refused_in_a_sentence(
    finetune, tmp_path, capsys
):
    rows = [{"text": "one", "audio": f"{number}.wav", "speaker": "ann"} for number in range(4)]
    (tmp_path / "out/data").symlink_to(tmp_path / "data")
    finetune.recordings = "list.jsonl"
    for row in rows[2:]:
        del row["speaker"]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["finetune", "base", "list.jsonl", "out"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("list.jsonl: has no speakers; name the voice by --speaker NAME")
    split = [json.dumps(row | {"split": "train"}) for row in rows]
    (tmp_path / "split.jsonl").write_text("\n".join(split))
    assert main(["finetune", "base", "split.jsonl", "out", "--speaker=bob"]) == 2
    assert "split names train alone; name some rows heldout" in capsys.readouterr().err
    assert "--speaker" in finetune(SECONDS, 1.0, "--speaker=bob")["prepare"]
