"""`titan-tts export`: what is in the folder, that it is the model to the bit, and what is refused."""

import json
import shutil
import tomllib

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.exported_run import as_by_a_stranger, export
from tests.helpers.sentences import refused
from tests.helpers.tiny_runs import Folder
from titan_tts.cli import main
from titan_tts.export.exporter import _write_codec
from titan_tts.speak.lengths import open_lengths
from titan_tts.speak.load_run import load_run
from titan_tts.speak.speech_data import open_speech_data
from titan_tts.speak.utterance import Utterance, Voice
from tools.harness.synthetic import make_samples, make_shards
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.manager import load_config, load_run_config
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.files import JsonLines
from torchtitan.models.dit_tts.run.checkpoint_storage import write_manifest
from torchtitan.models.dit_tts.speech.codec import build_codec
from torchtitan.models.dit_tts.speech.codec.mel_dct import STATISTICS_FILE
from torchtitan.models.dit_tts.text.vocabulary import to_json

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed")]

CONDITIONED = ["--data.conditioning=speaker", "--alignment.ctc_weight=0.1"]


@pytest.fixture
def trained(train, tmp_path):
    """Two steps, with heads, averages and conditioning tokens."""
    assert train("run", "--training.steps=2", *CONDITIONED) == 0
    return tmp_path / "run"


def test_it_is_the_run_without_its_folder_and_its_data(trained, tmp_path, capsys):
    folder = export(trained, tmp_path / "out", "--voices=s0", "--license=mit")
    assert "licences" in capsys.readouterr().out
    run = load_run(trained)
    assert run.weights == "ema:0.999"
    moved = folder.rename(tmp_path / "moved")
    speech_data = open_speech_data(run.folder, run.config.data)
    texts = ["seven", "one two three"]
    lengths = [speech_data.durations.frames(text, "s0") for text in texts]
    voice = speech_data.reference("s0")[: run.config.data.max_speaker_frames]
    trained.rename(tmp_path / "away")

    loaded = load_run(moved)
    assert (loaded.step, loaded.weights) == (2, "ema:0.999")
    named = dict(loaded.model.named_parameters())
    for name, value in run.model.named_parameters():
        assert torch.equal(named.pop(name), value), name
    assert not named and not any(
        "alignment" in name for name in load_file(moved / exported.WEIGHTS)
    )
    assert loaded.objective == run.objective and loaded.model.args == run.model.args
    assert to_json(loaded.tokenizer.vocabulary) == to_json(run.tokenizer.vocabulary)
    assert loaded.config.sampling.codec == str(moved / exported.MEL_DCT)

    # Nothing of where it was trained is in it; its data are the folder itself.
    assert loaded.config.data.path == str(moved)
    own = open_speech_data(loaded.folder, loaded.config.data)
    assert [own.durations.frames(text, "s0") for text in texts] == lengths
    assert own.speakers == ["s0"] and torch.equal(own.reference("s0"), voice.float())
    refused(lambda: own.reference("s1"), "--speaker = s1", "voices of: 's0'", "--reference")
    for path in moved.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path
            assert path.stat().st_mode & 0o777 == 0o644, path


def test_a_predictor_of_lengths_travels_too(trained, train, tmp_path):
    """One that was trained beside the run, on the same data."""
    small = ["--model.flavor=duration", "--objective.text_dropout=0", "--training.steps=1"]
    small.append("--activation_checkpoint.mode=none")
    assert train("duration", *small) == 0
    folder = export(trained, tmp_path / "elsewhere/out")
    asked = [Utterance("one two", Voice(torch.ones(5, 8))), Utterance("nine")]

    def frames(run):
        lengths = open_lengths("", 100.0, run, lambda: pytest.fail("the fit was asked"))
        return lengths.frames(asked)

    wanted = frames(load_run(trained))
    shutil.rmtree(trained)
    shutil.rmtree(tmp_path / "duration")
    assert frames(load_run(folder.rename(tmp_path / "moved"))) == wanted


def test_other_weights_and_half_the_size(trained, tmp_path, monkeypatch):
    folder = export(trained, tmp_path / "raw", "--weights=raw", "--dtype=bfloat16")
    stored, run = load_file(folder / exported.WEIGHTS), load_run(trained, weights="raw")
    assert load_run(folder).weights == "raw"
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    for name, value in run.model.named_parameters():
        assert torch.equal(stored[name], value.bfloat16()), name
    for arguments in ({"step": 1}, {"step": "best"}, {"weights": "ema"}):
        refused(
            lambda given=arguments: load_run(folder, **given), "from step 2 with the weights raw"
        )
    # To where one is.
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    export(trained, ".")
    assert load_run(here).step == 2


def test_the_codecs_own_constants_are_copied(tmp_path):
    """Not those that are shipped, where the run had others."""
    path = tmp_path / STATISTICS_FILE.name
    path.write_text(STATISTICS_FILE.read_text() + " ")
    (tmp_path / "codec").mkdir()
    codec = build_codec(str(path))
    _write_codec(tmp_path, codec, str(path))
    again = build_codec(str(tmp_path / exported.MEL_DCT))
    assert again.fingerprint == codec.fingerprint != build_codec("mel_dct").fingerprint


def test_the_card_has_the_runs_figures_and_places_to_fill_in(trained, tmp_path):
    rows = JsonLines(trained / "validation.jsonl")
    rows.append({"step": 1, "weights": "ema:0.999", "heldout_loss": 0.7})
    rows.append(
        {"step": 2, "weights": "ema:0.999", "heldout_loss": 0.1234, "heldout_loss_raw": 0.5}
    )
    row = {
        "step": 2,
        "weights": "raw",
        "figures": {"wer": {"value": 0.021, "low": 0.0, "high": 0.06}},
    }
    report = {
        "test": {"source": "/secret/place/heldout", "utterances": 9},
        "scorers": {"recognizer": "the referee"},
        "rows": [
            {"name": "codec", "figures": {}},
            row,
            row | {"step": 1, "figures": {"wer": None}},
        ],
    }
    place = trained / "evaluation/step-2/evaluation.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(report))
    place.parent.with_name("broken").mkdir()
    place.parent.with_name("broken").joinpath("evaluation.json").write_text("{")
    card = (export(trained, tmp_path / "one") / exported.CARD).read_text()
    assert "| held-out loss | 0.1234 at step 2 |" in card and "word errors" not in card
    assert "license: unknown" in card and card.count("to fill in") >= 4
    card = (
        export(trained, tmp_path / "two", "--weights=raw", "--license=mit") / exported.CARD
    ).read_text()
    assert "| held-out loss | 0.5000 at step 2 |" in card and "license: mit" in card
    expected = "| word errors on `place/heldout` | 2.1% (0.0% to 6.0%), 9 utterances, heard by the referee |"
    assert expected in card and "secret" not in card


def test_what_is_not_of_an_export_is_refused(trained, tmp_path, capsys):
    folder = export(trained, tmp_path / "out")
    assert main(["export", str(trained), str(folder)]) == 2
    assert "there is something already" in capsys.readouterr().err
    assert main(["export", str(folder), str(tmp_path / "new")]) == 2
    assert "exported folder already" in capsys.readouterr().err
    assert main(["export", str(trained), str(tmp_path / "new"), "--push=x"]) == 2
    assert "OWNER/NAME" in capsys.readouterr().err and not (tmp_path / "new").exists()

    config = json.loads((folder / exported.CONFIG).read_text())

    def changed(**values):
        other = shutil.copytree(folder, tmp_path / "changed", dirs_exist_ok=True)
        as_by_a_stranger(other, exported.CONFIG, config | values)
        return other

    refused(lambda: load_run_config(changed(version=2)), "not of titan-tts export, version 1")
    refused(lambda: load_run_config(changed(format="other")), "not of titan-tts export")
    # A stranger's config names no plugins, no paths and nothing else that is not the model's.
    for section in (
        {"samples": {"recognizer": "os:system"}},
        {"data": {"path": "/etc"}},
        {"data": 3},
    ):
        refused(lambda given=section: load_run_config(changed(config=given)), "was changed")
    wider = config["config"] | {"encoder": config["config"]["encoder"] | {"n_layers": 2}}
    refused(lambda: load_run(changed(config=wider)), "is of another model", "text_encoder.layers.1")

    cut = shutil.copytree(folder, tmp_path / "cut")
    weights = cut / exported.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    refused(lambda: load_run(cut), "model.safetensors has other content", "copy")
    weights.unlink()
    torch.save({}, cut / "pytorch_model.bin")
    refused(lambda: load_run(cut), "pytorch_model.bin, a pickle", "run code")
    refused(lambda: load_run(cut / "pytorch_model.bin"), "pytorch_model.bin, a pickle")
    (cut / "pytorch_model.bin").unlink()
    refused(lambda: load_run(cut), "is no run's folder", "titan-tts export")


def test_an_export_starts_a_run_by_its_path_alone(trained, train, tmp_path, capsys):
    folder = export(trained, tmp_path / "out", "--weights=raw")
    shutil.rmtree(trained)
    start = f"--checkpoint.initial_load_path={folder}"
    # Of one of the four speakers.
    samples = make_samples(16, channels=8, frames=lambda _: 16)
    for sample in samples:
        sample.metadata["speaker"] = "s1"
    write_shard(tmp_path / "new.tar", samples)
    start = f"--data.path={tmp_path / 'new.tar'}", start
    still = ["--training.steps=2", "--optimizer.lr=0", "--checkpoint.keep_latest_k=0"]
    tuned = tmp_path / "tuned"
    assert train("tuned", *start, *still, *CONDITIONED) == 0
    first = load_run(tuned, weights="raw")
    for (name, value), other in zip(
        load_run(folder).model.named_parameters(), first.model.parameters(), strict=True
    ):
        assert torch.equal(value, other), name
    assert (tuned / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert train("tuned", *start, *still[1:], "--training.steps=4", *CONDITIONED) == 0  # resumes
    assert load_run(tuned).step == 4

    for name, arguments, words in (
        ("other", ["--data.conditioning="], "[data] conditioning"),
        (
            "optimizer",
            ["--checkpoint.no-initial_load_model_only", *CONDITIONED],
            "no optimizer state",
        ),
        ("noise", ["--objective.prediction=noise", *CONDITIONED], "objective.prediction = 'noise'"),
        ("wide", ["--encoder.n_layers=2", *CONDITIONED], "of another model"),
    ):
        assert train(name, *start, "--training.steps=2", *arguments) == 2, name
        assert words in capsys.readouterr().err


def test_its_fine_tune_goes_on_where_the_run_was_and_is_saved(train, tmp_path):
    """By fine_tune.toml as it is: the first loss is the base's last, not that of random weights."""
    trained_by = ["--ema.decays=0.99", "--lr_scheduler.decay_ratio=0.3", "--training.max_norm=0.7"]
    kept = ["--validation.keep_best=text_gain", "--checkpoint.interval=100"]
    assert train("run", "--training.steps=40", *trained_by, *kept, *CONDITIONED) == 0
    folder = export(tmp_path / "run", tmp_path / "out", "--weights=raw")
    sections = tomllib.loads((folder / exported.FINE_TUNE).read_text())
    assert "path" not in sections["data"] and "path" not in sections["validation"]
    start = [
        f"--job.config_file={folder / exported.FINE_TUNE}",
        f"--checkpoint.initial_load_path={folder}",
        "--training.steps=1",
    ]
    here = [
        "--data.num_workers=0",
        "--metrics.no-enable-tensorboard",
        "--debug.seed=1",
        "--data.audit",
    ]
    assert train("tuned", *start, common=here) == 0
    base, tuned = Folder(tmp_path / "run"), Folder(tmp_path / "tuned")
    losses = base.losses()
    last = sum(losses[step] for step in range(31, 41)) / 10
    assert tuned.audit()[0]["ids"] == base.audit()[0]["ids"]  # the batch of losses[1]
    assert losses[1] - tuned.losses()[1] > 0.5 * (losses[1] - last) > 0.04
    assert tuned.checkpoints() == {"step-1"}
    config = load_run_config(tuned.path)
    assert config.data.conditioning == ["speaker"]
    assert config.training.mixed_precision_param == "float32" and config.training.max_norm == 0.7
    assert config.ema.decays == [0.99] and config.lr_scheduler.decay_ratio == 0.3
    assert config.lr_scheduler.warmup_steps == 3 and config.optimizer.lr == 0.01
    assert config.validation.keep_best == "text_gain" and config.checkpoint.interval == 100


def test_a_figure_of_speech_is_not_asked_of_a_fine_tune():
    """It needs what listens, which could be anything on the machine of whoever fine-tunes."""
    samples = ["--samples.freq=5", "--samples.recognizer=words:one", "--validation.keep_best=wer"]
    config = load_config(["--data.path=d", *samples])
    sections = exported.fine_tune_config(config, "mel_dct", "bytes")
    assert "keep_best" not in sections["validation"] and "samples" not in sections


def test_what_a_length_depends_on_is_exported():
    given = {"frames_per_second": 50.0, "max_frames": 999, "speaker_patch_size": 2}
    config = load_config([f"--data.{name}={value}" for name, value in given.items()])
    found = exported.kept(config)["data"]
    assert {name: found[name] for name in given} == given


def test_what_is_no_weights_cannot_start_a_run(trained, train, tmp_path, capsys):
    """A run's folder, as one is tempted to give; a pickle."""
    other = tmp_path / "other"
    other.mkdir()
    torch.save({}, other / "model.pt")
    for given, words in (
        (trained, f"holds no weights; give the folder of one checkpoint, such as {trained}"),
        (trained / "checkpoint", "checkpoint/step-2, or one that titan-tts export wrote"),
        (other, "model.pt, a pickle"),
        (tmp_path / "nowhere", "is not a folder"),
    ):
        path = f"--checkpoint.initial_load_path={given}"
        assert train("new", path, "--training.steps=2", *CONDITIONED) == 2
        assert words in capsys.readouterr().err


def test_weights_that_name_a_place_in_memory_are_not_taken(trained, tmp_path):
    """Shapes and names are compared with the model's before anything is read."""
    folder = export(trained, tmp_path / "out")
    tensors = load_file(folder / exported.WEIGHTS)
    save_file({**tensors, "more": torch.zeros(1)}, folder / exported.WEIGHTS)
    manifest = folder / "manifest.json"
    before = json.loads(manifest.read_text())["trained_with"]
    listed = exported.files_read(folder)
    write_manifest(folder, listed, before)
    refused(lambda: load_run(folder), "is of another model", "more")
    whole = {name: value.long() for name, value in tensors.items()}
    save_file(whole, folder / exported.WEIGHTS)
    write_manifest(folder, listed, before)
    refused(lambda: load_run(folder), "torch.int64", "floating-point")


def test_a_strangers_config_and_manifest_are_checked_as_a_runs(trained, tmp_path):
    """Before a model is built by them."""
    folder = export(trained, tmp_path / "out")
    manifest = json.loads((folder / "manifest.json").read_text())
    for key, value, words in (
        ("objective.__class__", 1, "unknown [objective] __class__"),
        ("objective.logit_std", "1", "logit_std = '1', but it must be a number"),
        ("objective.logit_std", -1.0, "logit_std = -1.0, but it must be greater than 0"),
        ("model.flavor", "900B", "[model] flavor = '900B' is not known"),
    ):
        changed = manifest | {"trained_with": manifest["trained_with"] | {key: value}}
        (folder / "manifest.json").write_text(json.dumps(changed))
        refused(lambda: load_run(folder), words)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    content = json.loads((folder / exported.CONFIG).read_text())
    for section, key, value, words in (
        ("encoder", "n_layers", 10**9, "n_layers = 1000000000 is of another model"),
        ("encoder", "dim", 10**12, "dim = 1000000000000 is of another model"),
        ("data", "latent_channels", 2**62, "is of another model"),
        ("sampling", "steps", -1, "[sampling] steps = -1"),
    ):
        changed = content["config"] | {section: content["config"][section] | {key: value}}
        as_by_a_stranger(folder, exported.CONFIG, content | {"config": changed})
        refused(lambda: load_run(folder), words)
    as_by_a_stranger(folder, exported.CONFIG, content)
    assert load_run(folder).step == 2


def test_a_manifest_lists_every_file_that_is_read(trained, tmp_path):
    folder = export(trained, tmp_path / "out", "--voices=s0")
    manifest = json.loads((folder / "manifest.json").read_text())
    unread = {"manifest.json", exported.CARD, exported.FINE_TUNE}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == there - unread
    for name in manifest["files"]:
        files = {each: value for each, value in manifest["files"].items() if each != name}
        (folder / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
        refused(lambda: load_run(folder), f"manifest.json does not list {name}", "export the run")
    # Nor is a file of other names taken by what the text encoder is loaded with.
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / exported.TEXT_ENCODER).mkdir()
    (folder / exported.TEXT_ENCODER / "more.bin").write_bytes(b"")
    refused(lambda: load_run(folder), "does not list text_encoder/more.bin")


def test_what_a_strangers_folder_says_is_no_command_to_the_terminal(train, tmp_path, capsys):
    make_shards(tmp_path / "data", 16, channels=128, frames=lambda _: 16)
    data = [f"--data.path={tmp_path / 'data'}", "--data.latent_channels=128"]
    assert train("run", *data, "--training.steps=1") == 0
    folder = export(tmp_path / "run", tmp_path / "out")
    content = json.loads((folder / exported.CONFIG).read_text())
    as_by_a_stranger(folder, exported.CONFIG, content | {"weights": "raw\x1b]0;mine\x07\x9b31m"})
    arguments = ["--text=one", "--seconds=0.1", "--sampling-steps=1", f"--out={tmp_path / 'a.wav'}"]
    assert main(["generate", str(folder), *arguments]) == 0
    assert r"(raw\x1b]0;mine\x07\x9b31m)" in capsys.readouterr().out
    durations = json.loads((folder / "durations.json").read_text())
    durations["weights"] = [1e5] * 257
    as_by_a_stranger(folder, "durations.json", durations)
    assert main(["generate", str(folder), *arguments[:1], *arguments[2:]]) == 2
    assert "3 characters may have at most 4171; give --seconds" in capsys.readouterr().err
