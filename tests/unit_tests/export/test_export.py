"""`titan-tts export`: what is in the folder, that it is the model to the bit, and what is refused."""

import json
import shutil
import tomllib
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.exported_run import CONDITIONED, as_by_a_stranger, export
from tests.helpers.sentences import refused
from tests.helpers.tiny_runs import Folder
from titan_tts.cli import main
from titan_tts.speak.lengths import open_lengths
from titan_tts.speak.load_run import load_run
from titan_tts.speak.speech_data import open_speech_data
from titan_tts.speak.utterance import Utterance, Voice
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.manager import load_run_config
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.run.manifest import write_manifest
from torchtitan.models.dit_tts.speech.codec import build_codec, mel_dct
from torchtitan.models.dit_tts.speech.codec.mel_dct import STATISTICS_FILE
from torchtitan.models.dit_tts.speech.codec.vocoder import Vocoder
from torchtitan.models.dit_tts.text.vocabulary import to_json

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed")]


def test_it_is_the_run_without_its_folder_and_its_data(trained, tmp_path, capsys):
    folder = export(trained, tmp_path / "out", "--voices=s2", "--voices=s0", "--license=mit")
    assert f"{folder}: step 2 (ema:0.999) of {trained}, " in capsys.readouterr().out
    codec = build_codec("mel_dct")
    names = ("name", "fingerprint", "sample_rate", "hop_length")
    wanted = {"kind": "mel_dct"} | {name: getattr(codec, name) for name in names}
    assert json.loads((folder / exported.CONFIG).read_text())["codec"] == wanted
    run = load_run(trained)
    assert run.weights == "ema:0.999"
    moved = folder.rename(tmp_path / "moved")
    speech_data = open_speech_data(run.folder, run.config)
    texts = ["seven", "one two three"]
    lengths = [speech_data.durations.frames(text, "s0") for text in texts]
    voice = speech_data.reference("s0")[: run.config.data.max_speaker_frames]
    trained.rename(tmp_path / "away")

    loaded = load_run(moved)
    assert (loaded.step, loaded.weights) == (2, "ema:0.999")
    named = dict(loaded.model.named_parameters())
    for name, value in run.model.named_parameters():
        assert torch.equal(named.pop(name), value), name
    stored = load_file(moved / exported.WEIGHTS)
    assert not named and not any("alignment" in name for name in stored)
    assert loaded.objective == run.objective and loaded.model.args == run.model.args
    assert to_json(loaded.tokenizer.vocabulary) == to_json(run.tokenizer.vocabulary)
    assert loaded.config.sampling.codec == str(moved / exported.MEL_DCT)

    # It names no place of its training; its data are the folder itself.
    assert loaded.config.data.path == str(moved)
    own = open_speech_data(loaded.folder, loaded.config)
    assert [own.durations.frames(text, "s0") for text in texts] == lengths
    assert own.speakers == ["s0", "s2"] and torch.equal(own.reference("s0"), voice.float())
    refused(lambda: own.reference("s1"), "--speaker = s1", "voices of: 's0', 's2'; give")
    for path in moved.rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path
            assert path.stat().st_mode & 0o777 == 0o644, path


def test_a_predictor_of_lengths_travels_too(trained, train, tmp_path):
    """One that was trained next to the run, on the same data."""
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
    moved = folder.rename(tmp_path / "moved")
    assert frames(load_run(moved)) == wanted
    (moved / "duration" / exported.WEIGHTS).unlink()  # as after a copy that was cut short
    refused(lambda: frames(load_run(moved)), str(moved / "duration"))


def test_other_weights_and_constants_at_half_the_size(trained, tmp_path, monkeypatch):
    statistics = tmp_path / STATISTICS_FILE.name  # the codec's own, not the shipped ones
    statistics.write_text(STATISTICS_FILE.read_text() + " ")
    options = ["--weights=raw", "--dtype=bfloat16", f"--codec={statistics}"]
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    export(trained, ".", *options)
    stored, run = load_file(folder / exported.WEIGHTS), load_run(trained, weights="raw")
    assert load_run(folder).weights == load_run(folder, 2, "raw").weights == "raw"
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    for name, value in run.model.named_parameters():
        assert torch.equal(stored[name], value.bfloat16()), name
    for arguments in ({"step": 1}, {"step": "best"}, {"weights": "ema"}):
        refused(lambda given=arguments: load_run(folder, **given), "step 2 and weights raw")
    own, shipped = build_codec(str(folder / exported.MEL_DCT)), build_codec("mel_dct")
    assert own.fingerprint == build_codec(str(statistics)).fingerprint != shipped.fingerprint


def test_a_vocoder_travels_with_its_codec(trained, tmp_path, monkeypatch):
    """A user's own as a file of the folder, those that are shipped by their names."""
    rates = {"own": 24_000, "vocoder": 16_000, "vocoder24k": 24_000}
    for seed, (name, rate) in enumerate(rates.items()):
        torch.manual_seed(seed)
        save_file(Vocoder(rate).state_dict(), tmp_path / f"{name}.safetensors")
    monkeypatch.setattr(mel_dct, "VOCODER_FOLDER", tmp_path)
    latents = build_codec("mel_dct").encode(0.1 * torch.randn(4000))
    own = tmp_path / "own.safetensors"
    for path in (tmp_path / f"{name}.safetensors" for name in rates):
        name = str(own) if path == own else path.stem
        wanted = build_codec(f"mel_dct+{path}").decode(latents)
        folder = export(trained, tmp_path / f"of_{path.stem}", f"--codec=mel_dct+{name}")
        folder = folder.rename(tmp_path / f"moved_{path.stem}")
        own.unlink(missing_ok=True)
        assert (folder / exported.OWN_VOCODER).exists() == (path == own)
        assert "a vocoder with weights" in (folder / exported.CARD).read_text()
        about = json.loads((folder / exported.CONFIG).read_text())["codec"]
        assert about["sample_rate"] == rates[path.stem] == 25 * about["hop_length"]
        codec = build_codec(load_run(folder).config.sampling.codec)
        assert torch.equal(codec.decode(latents), wanted)
        for file in folder.rglob("*"):
            assert not file.is_file() or str(tmp_path).encode() not in file.read_bytes(), file


def test_folders_that_are_no_export_are_refused(trained, tmp_path, capsys):
    folder = export(trained, tmp_path / "out")
    new = str(tmp_path / "new")
    adapter = [str(trained), new, "--adapter"]
    for arguments, words in (
        ([str(trained), str(folder)], "exists already"),
        ([str(folder), new], "exported folder already"),
        (adapter, "not an adapter's run over an exported folder"),
        ([*adapter, "--dtype=bfloat16"], "without --voices, --dtype and --license"),
        ([*adapter, "--voices=s0"], "without --voices, --dtype and --license"),
    ):
        assert main(["export", *arguments]) == 2 and not (tmp_path / "new").exists()
        assert words in capsys.readouterr().err
    weights = folder / exported.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    refused(lambda: load_run(folder), "model.safetensors has other content", "copy")
    weights.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    for path in (folder, folder / "pytorch_model.bin"):
        refused(lambda path=path: load_run(path), "pytorch_model.bin, a pickle")
    (folder / "pytorch_model.bin").unlink()
    refused(lambda: load_run(folder), "is not a run folder", "titan-tts export")


def test_a_strangers_files_are_checked_before_a_model_is_built(trained, tmp_path):
    folder = export(trained, tmp_path / "out")
    content = json.loads((folder / exported.CONFIG).read_text())
    config = content["config"]

    def changed(section, **values):
        return {"config": config | {section: config[section] | values}}

    for values, words in (
        ({"version": 2}, "not of titan-tts export, version 1"),
        # It names no plugins, no paths and nothing else that is not the model's.
        ({"config": {"samples": {"recognizer": "os:system"}}}, "was changed"),
        (changed("encoder", n_layers=2), "text_encoder.layers.1"),
        (changed("encoder", n_layers=10**9), "n_layers = 1000000000 is of another model"),
        (changed("data", latent_channels=2**62), "is of another model"),
        (changed("sampling", steps=-1), "[sampling] steps = -1"),
    ):
        as_by_a_stranger(folder, exported.CONFIG, content | values)
        refused(lambda: load_run(folder), words)
    as_by_a_stranger(folder, exported.CONFIG, content)

    manifest = json.loads((folder / "manifest.json").read_text())
    trained_with = manifest["trained_with"]
    for key, value, words in (
        ("objective.__class__", 1, "unknown [objective] __class__"),
        ("objective.logit_std", -1.0, "logit_std = -1.0, but it must be greater than 0"),
        ("model.flavor", "900B", "[model] flavor = '900B' is not known"),
    ):
        other = manifest | {"trained_with": trained_with | {key: value}}
        (folder / "manifest.json").write_text(json.dumps(other))
        refused(lambda: load_run(folder), words)

    tensors = load_file(folder / exported.WEIGHTS)
    for weights, *words in (
        ({**tensors, "more": torch.zeros(1)}, "is of another model", "more"),
        ({name: value.long() for name, value in tensors.items()}, " is of I64, not of one of "),
        (tensors,),
    ):
        save_file(weights, folder / exported.WEIGHTS)
        write_manifest(folder, exported.files_read(folder), trained_with)
        if words:
            refused(lambda: load_run(folder), *words)
    # What it says is no length that takes all memory.
    durations = json.loads((folder / "durations.json").read_text())
    as_by_a_stranger(folder, "durations.json", durations | {"weights": [1e5] * 257})
    loaded = load_run(folder)
    speech_data = open_speech_data(folder, loaded.config)
    lengths = open_lengths("fit", 1.0, loaded, lambda: speech_data.durations)
    refused(lambda: lengths.frames([Utterance("one")]), "may have at most 4171; give --seconds")


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
    # Nor is a file of other names taken by the text encoder's loader.
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / exported.TEXT_ENCODER).mkdir()
    (folder / exported.TEXT_ENCODER / "more.bin").write_bytes(b"")
    refused(lambda: load_run(folder), "does not list text_encoder/more.bin")


def test_an_export_starts_a_run_by_its_path_alone(trained, train, tmp_path, capsys):
    folder = export(trained, tmp_path / "out", "--weights=raw")
    (tmp_path / "pickle").mkdir()
    torch.save({}, tmp_path / "pickle/model.pt")
    samples = make_samples(16, channels=8, frames=lambda _: 16)
    for sample in samples:  # one of the four speakers
        sample.metadata["speaker"] = "s1"
    write_shard(tmp_path / "new.tar", samples)
    start = f"--data.path={tmp_path / 'new.tar'}", f"--checkpoint.initial_load_path={folder}"
    still = ["--training.steps=1", "--optimizer.lr=0", "--checkpoint.keep_latest_k=0"]
    assert train("tuned", *start, *still, *CONDITIONED) == 0
    tuned = tmp_path / "tuned"
    first, other = load_run(tuned, weights="raw"), load_run(folder)
    pairs = zip(other.model.named_parameters(), first.model.parameters(), strict=True)
    for (name, value), same in pairs:
        assert torch.equal(value, same), name
    assert (tuned / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    shutil.rmtree(folder)
    assert train("tuned", *start, *still[1:], "--training.steps=2", *CONDITIONED) == 0  # resumes
    assert load_run(tuned).step == 2

    export(trained, folder, "--weights=raw")
    for path, arguments, words in (
        (folder, ["--data.conditioning="], "[data] conditioning"),
        (folder, ["--checkpoint.no-initial_load_model_only"], "no optimizer state"),
        (folder, ["--objective.prediction=noise"], "objective.prediction = 'noise'"),
        (folder, ["--encoder.n_layers=2"], "does not fit this config"),
        (trained, [], f"holds no weights; give the folder of one checkpoint, such as {trained}"),
        (tmp_path / "pickle", [], "model.pt, a pickle"),
        (tmp_path / "nowhere", [], "is not a folder"),
    ):
        path = f"--checkpoint.initial_load_path={path}"
        assert train("refused", *start, path, "--training.steps=2", *CONDITIONED, *arguments) == 2
        assert words in capsys.readouterr().err


def test_its_fine_tune_goes_on_where_the_run_was_and_is_saved(train, tmp_path):
    """By fine_tune.toml as it is: the first loss is the base's last, not that of random weights."""
    trained_by = ["--ema.decays=0.99", "--lr_scheduler.decay_ratio=0.3", "--training.max_norm=0.7"]
    kept = ["--validation.keep_best=text_gain", "--checkpoint.interval=100"]
    assert train("run", "--training.steps=40", *trained_by, *kept, *CONDITIONED) == 0
    folder = export(tmp_path / "run", tmp_path / "out", "--weights=raw")
    sections = tomllib.loads((folder / exported.FINE_TUNE).read_text())
    assert "path" not in sections["data"] and "path" not in sections["validation"]
    start = [f"--job.config_file={folder / exported.FINE_TUNE}", "--training.steps=1"]
    start.append(f"--checkpoint.initial_load_path={folder}")
    here = ["--data.num_workers=0", "--metrics.no-enable-tensorboard", "--debug.seed=1"]
    assert train("tuned", *start, common=[*here, "--data.audit"]) == 0
    base, tuned = Folder(tmp_path / "run"), Folder(tmp_path / "tuned")
    losses = base.losses()
    last = sum(losses[step] for step in range(31, 41)) / 10
    assert tuned.audit()[0]["ids"] == base.audit()[0]["ids"]  # the batch of losses[1]
    assert losses[1] - tuned.losses()[1] > 0.5 * (losses[1] - last) > 0.03
    assert tuned.checkpoints() == {"step-1"}
    before, after = asdict(load_run_config(base.path)), asdict(load_run_config(tuned.path))
    for section in ("ema", "lr_scheduler", "optimizer"):
        assert after[section] == before[section]
    for section, key in (
        ("data", "conditioning"),
        ("training", "mixed_precision_param"),
        ("training", "max_norm"),
        ("validation", "keep_best"),
        ("checkpoint", "interval"),
    ):
        assert after[section][key] == before[section][key]
