"""DAC-VAE weights on disk: the released layout, exports, damage; names; references; preparation."""

import argparse
import json
import math
import os
import pickle
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers.dac_vae_checkpoints import (
    RELEASED,
    RELEASED_PARAMETERS,
    RELEASED_WATERMARK,
    TINY,
    TINY_WATERMARK,
    layout,
    random_state_dict,
    write_tiny_dac_vae,
)
from torchtitan.models.dit_tts.cli import main as titan_tts
from torchtitan.models.dit_tts.codec import build_codec
from torchtitan.models.dit_tts.codec.dac_vae import DacVaeCodec, export_safetensors
from torchtitan.models.dit_tts.codec.dac_vae_weights import (
    fold_weight_norm,
    match_names,
    read_sizes,
)
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.inference import generate_command
from torchtitan.models.dit_tts.inference.speaker_reference import (
    encode_reference,
    reference_settings,
)
from torchtitan.models.dit_tts.prepare.pipeline import prepare_corpus
from torchtitan.models.dit_tts.prepare.settings import AudioSettings, Options

NORMED = "decoder.model.2.block.1"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_tiny_dac_vae(tmp_path_factory.mktemp("dac_vae"))


@pytest.fixture(scope="module")
def codec(file) -> DacVaeCodec:
    return build_codec(str(file))


def changed(file: Path, folder: Path, change) -> Path:
    """A copy of a checkpoint after `change(content)`."""
    content = torch.load(file, weights_only=True)
    change(content)
    path = folder / "changed.pth"
    torch.save(content, path)
    return path


# ---- the layout


def test_released_layout_is_covered_key_by_key():
    """Shapes only: all of the released model's 107,671,171 parameters have their place."""
    shapes = layout(RELEASED, RELEASED_WATERMARK)
    assert sum(map(math.prod, shapes.values())) == RELEASED_PARAMETERS
    stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    sizes = read_sizes(Path("weights.pth"), stored, {"sample_rate": 48_000})
    assert (sizes.hop_length, sizes.feature_dim, sizes.latent_channels) == (1920, 1024, 128)
    matched = match_names(Path("weights.pth"), stored, sizes)
    taken = {name for names in matched.values() for name in names}
    assert taken == set(layout(RELEASED, None))  # all but what adds the watermark


def test_folding_is_that_of_torch():
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.ConvTranspose1d(150, 3, 4))
    g, v = (getattr(layer.parametrizations.weight, f"original{i}").detach() for i in (0, 1))
    torch.testing.assert_close(
        fold_weight_norm(3 * g, v), 3 * layer.weight.detach(), atol=1e-5, rtol=1e-5
    )


def test_one_fingerprint_for_the_same_weights(file, codec, tmp_path):
    def newer_names(content):
        state = content["state_dict"]
        for name in [name for name in state if name.endswith("weight_g")]:
            layer = name.removesuffix(".weight_g")
            state[f"{layer}.parametrizations.weight.original0"] = state.pop(f"{layer}.weight_g")
            state[f"{layer}.parametrizations.weight.original1"] = state.pop(f"{layer}.weight_v")

    export_safetensors(codec, tmp_path / "export.safetensors")
    others = [
        changed(file, tmp_path, newer_names),
        tmp_path / "export.safetensors",
    ]
    waveform = torch.sin(torch.arange(5000) * 0.05)
    for path in others:
        other = build_codec(str(path))
        assert other.fingerprint == codec.fingerprint
        assert torch.equal(other.encode(waveform), codec.encode(waveform))
        assert torch.equal(
            other.decode(other.encode(waveform)), codec.decode(codec.encode(waveform))
        )


@pytest.mark.parametrize("change", ["alpha", "weight_g", "rate"])
def test_another_fingerprint_for_other_weights(file, codec, tmp_path, change):
    def alter(content):
        state = content["state_dict"]
        if change == "rate":
            content["metadata"]["kwargs"]["sample_rate"] = 44_100
        elif change == "alpha":
            state["encoder.block.1.block.3.alpha"][0, 0, 0] *= 1.001
        else:
            state[f"{NORMED}.weight_g"][0] *= 1.001

    assert build_codec(str(changed(file, tmp_path, alter))).fingerprint != codec.fingerprint


def test_the_watermark_branch_is_of_no_consequence(file, codec, tmp_path):
    def other_watermark(content):
        kept = layout(TINY, None)
        for name, tensor in content["state_dict"].items():
            if name not in kept:
                tensor += 1

    assert (
        build_codec(str(changed(file, tmp_path, other_watermark))).fingerprint == codec.fingerprint
    )


def test_hand_made_safetensors_with_and_without_a_header(file, codec, tmp_path):
    content = torch.load(file, weights_only=True)
    path = tmp_path / "mine.safetensors"
    save_file(content["state_dict"], path)  # hop 1920, hence the released rate
    assert build_codec(str(path)).fingerprint == codec.fingerprint
    save_file(content["state_dict"], path, {"kwargs": json.dumps({"sample_rate": 24_000})})
    assert build_codec(str(path)).sample_rate == 24_000


def test_export_command(file, codec, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert titan_tts(["export-codec", str(file), str(out)]) == 0
    assert codec.fingerprint in capsys.readouterr().out
    assert build_codec(str(out)).fingerprint == codec.fingerprint
    with safe_open(out, "pt") as export:
        assert json.loads(export.metadata()["kwargs"])["encoder_rates"] == [2, 8, 10, 12]
        assert not any("post" in name or "weight_g" in name for name in export.keys())
    assert titan_tts(["export-codec", str(file), str(tmp_path / "out.bin")]) == 2
    assert titan_tts(["export-codec", str(file), str(tmp_path / "no/folder/out.safetensors")]) == 2
    assert titan_tts(["export-codec", "nothing", str(out)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


# ---- names


def test_name_is_good_from_any_folder(file, codec, tmp_path, monkeypatch):
    monkeypatch.chdir(file.parent)
    relative, folder = build_codec("weights.pth"), build_codec(".")
    monkeypatch.chdir(tmp_path)
    assert relative.name == folder.name == codec.name == str(file)
    assert build_codec(relative.name).fingerprint == codec.fingerprint


def test_hub_name(file, codec, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a: asked.append(a) or str(file))
    monkeypatch.chdir(tmp_path)
    found = build_codec("someone/dac.vae-48k")
    assert asked == [("someone/dac.vae-48k", "weights.pth")]
    assert found.name == "someone/dac.vae-48k" and found.fingerprint == codec.fingerprint

    def fail(*_):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nmore")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(
        ValueError, match="someone/x.*no network\\); download it on a machine with"
    ) as error:
        build_codec("someone/x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["mp3", "a/b/c", "", "/nowhere/at/all", "https://a/b"])
def test_unknown_names(name, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ValueError, match="known are: mel_dct, a DAC-VAE|holds 0 files"):
        build_codec(name)


def test_paths_without_one_file_of_weights(file, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    for path, sentence in (
        (tmp_path, "holds 0 files of codec weights"),
        (tmp_path / "notes.txt", "ends in .pth or .safetensors"),
        (tmp_path / "none.pth", "there is no file"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build_codec(str(path))
    for name in ("a.pth", "b.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match="holds 2 files .*: a.pth, b.safetensors"):
        build_codec(str(tmp_path))


# ---- damage


def drop(*names):
    return lambda content: [content["state_dict"].pop(name) for name in names]


def put(name, value):
    return lambda content: content["state_dict"].update({name: value})


def tell(**kwargs):
    return lambda content: content["metadata"]["kwargs"].update(kwargs)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (drop(f"{NORMED}.bias"), f"missing: {NORMED}.bias"),
        (drop(f"{NORMED}.weight_v"), f"missing: {NORMED}.weight; unexpected: {NORMED}.weight_g"),
        (put("decoder.extra", torch.zeros(1)), "unexpected: decoder.extra"),
        (put(f"{NORMED}.bias", torch.zeros(7)), rf"{NORMED}.bias \(7,\), not \(24,\)"),
        (
            put(f"{NORMED}.weight_g", torch.ones(1, 48, 1)),
            r"weight_g \(1, 48, 1\), not \(48, 1, 1\)",
        ),
        (
            put("encoder.block.5.alpha", torch.full((1, 64, 1), torch.nan)),
            "not finite: encoder.snake1",
        ),
        (tell(encoder_dim=64), "metadata tells encoder_dim = 64, its weights have 4"),
        (tell(decoder_rates=[8, 8, 4, 2]), "decoder_rates"),
        (tell(sample_rate="fast"), "sample_rate is 'fast'"),
        (drop("quantizer.out_proj.weight_v"), "is no DAC-VAE, it lacks quantizer.out_proj.weight"),
        (lambda content: content.pop("state_dict"), "has no 'state_dict'"),
        (put("encoder.block.1.block.4.weight_v", torch.ones(8, 4, 3)), "strides .1, 8, 10, 12"),
    ],
)
def test_damaged_checkpoints(file, tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_codec(str(changed(file, tmp_path, change)))


def test_at_most_five_keys_are_listed(file, tmp_path):
    extra = {f"decoder.extra{number}": torch.zeros(1) for number in range(8)}
    path = changed(file, tmp_path, lambda content: content["state_dict"].update(extra))
    with pytest.raises(ValueError, match=r"decoder\.extra4 and 3 more"):
        build_codec(str(path))


class Trap:
    """Unpickled without weights_only, this leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed(tmp_path):
    path, sprung = tmp_path / "weights.pth", tmp_path / "sprung"
    state = random_state_dict(TINY, TINY_WATERMARK)
    torch.save({"state_dict": state, "metadata": {"kwargs": {}, "trap": Trap(sprung)}}, path)
    with pytest.raises(ValueError, match="cannot be read as weights"):
        build_codec(str(path))
    assert not sprung.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"not weights", pickle.dumps([1, 2])])
def test_files_that_are_none(tmp_path, suffix, content):
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)) as error:
        build_codec(str(path))
    assert "\n" not in str(error.value)


# ---- a speaker's reference


def recording(seconds: float, rate: int, level: float = 0.1) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * 220 * time) * (1 + np.sin(9 * time)) / 2).astype(np.float32)


def test_reference_of_any_rate_channels_and_level(codec, tmp_path):
    path = tmp_path / "voice.wav"
    soundfile.write(path, recording(1.0, 48_000), 48_000, subtype="FLOAT")
    at_level = encode_reference(path, codec, AudioSettings(), 384)
    as_is = encode_reference(path, codec, AudioSettings(loudness=None), 384)
    assert at_level.shape == as_is.shape == (25, 128)
    assert (at_level - as_is).abs().max() > 0.1

    quiet = recording(1.0, 44_100, level=0.01)
    soundfile.write(path, np.stack([quiet, quiet], axis=1), 44_100, subtype="FLOAT")
    other = encode_reference(path, codec, AudioSettings(), 384)
    # Within what resampling leaves of the last frames.
    assert (other - at_level)[:18].abs().max() < 0.05 * at_level.std()


def test_reference_is_cut_to_what_the_model_takes(codec, tmp_path):
    path = tmp_path / "voice.wav"
    soundfile.write(path, recording(2.0, 48_000), 48_000, subtype="FLOAT")
    cut, whole = (encode_reference(path, codec, AudioSettings(), frames) for frames in (20, 384))
    assert cut.shape == (20, 128) and whole.shape == (50, 128)
    torch.testing.assert_close(cut[:13], whole[:13], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "samples, sentence",
    [
        (np.zeros(0, np.float32), "has 0 samples"),
        (np.zeros(48_000, np.float32), "quieter than -70 LUFS"),
        (recording(0.1, 48_000), "has 0.100 s beside silence"),
    ],
)
def test_references_without_a_voice(codec, tmp_path, samples, sentence):
    path = tmp_path / "voice.wav"
    soundfile.write(path, samples, 48_000)
    with pytest.raises(ValueError, match=f"--reference {path}: .*({sentence})"):
        encode_reference(path, codec, AudioSettings(), 384)


def test_references_that_are_no_audio(codec, tmp_path):
    (tmp_path / "x.wav").write_text("no audio")
    for path in (tmp_path / "x.wav", tmp_path / "none.wav", tmp_path):
        with pytest.raises(ValueError, match=f"--reference {path}: "):
            encode_reference(path, codec, AudioSettings(), 384)
    with pytest.raises(ValueError, match="--reference-loudness is 3.0"):
        encode_reference(tmp_path / "x.wav", codec, AudioSettings(loudness=3.0), 384)


def write_record(folder: Path, codec: DacVaeCodec, audio: dict) -> str:
    """A prepare.json, as far as it is read beside the data; returns the [data] path."""
    folder.mkdir()
    settings = {"codec": "dac_vae", "codec_fingerprint": codec.fingerprint, "audio": audio}
    (folder / "prepare.json").write_text(json.dumps({"settings": settings}))
    return str(folder / "train")


def test_references_are_treated_as_the_data_were(codec, tmp_path):
    as_they_are = AudioSettings(loudness=None, max_silence=None)
    off = write_record(tmp_path / "off", codec, asdict(replace(as_they_are, max_seconds=0.1)))
    other = write_record(tmp_path / "other", codec, asdict(AudioSettings(-23.0, 0.5)))
    assert reference_settings(off) == as_they_are  # and no filter
    assert (
        reference_settings(other) == reference_settings([other, off]) == AudioSettings(-23.0, 0.5)
    )
    assert reference_settings(write_record(tmp_path / "old", codec, {})) == AudioSettings()
    assert reference_settings(str(tmp_path / "nowhere")) == AudioSettings(-16.0, 0.25)

    path = tmp_path / "voice.wav"
    voice = np.concatenate([np.zeros(24_000, np.float32), recording(1.0, 48_000)])
    soundfile.write(path, voice, 48_000, subtype="FLOAT")
    given = encode_reference(path, codec, reference_settings(off), 384)
    assert torch.equal(given, codec.encode(torch.from_numpy(voice)))
    assert len(encode_reference(path, codec, AudioSettings(), 384)) < len(given)


@pytest.mark.parametrize(
    "option, loudness",
    [([], -23.0), (["--reference-loudness", "off"], None), (["--reference-loudness=-18"], -18.0)],
)
def test_reference_loudness_overrides_the_datas(codec, tmp_path, option, loudness):
    data = write_record(tmp_path / "data", codec, asdict(AudioSettings(-23.0, 0.5)))
    parser = argparse.ArgumentParser()
    generate_command.add_arguments(parser)
    options = parser.parse_args(["run", "--text", "one", *option])
    found = generate_command.requested_reference_settings(options, data)
    assert found == AudioSettings(loudness, 0.5)
    # Of a corpus that lies elsewhere now, --data says where.
    options = parser.parse_args(["run", "--text", "one", *option, "--data", data])
    assert generate_command.requested_reference_settings(options, "/nowhere/train") == found


# ---- preparation


def test_archives_hold_what_encode_makes_of_a_recording(file, codec, tmp_path):
    """Voiced ends off the frame grid, two of them in one batch; within the rounding to float16."""
    source, lengths = tmp_path / "source", (23_500, 24_300, 48_000 + 100, 48_000)
    source.mkdir()
    generator = np.random.default_rng(0)
    rows, waveforms = [], {}
    for number, length in enumerate(lengths):
        waveform = 0.2 * np.sin(2 * np.pi * (150 + 20 * number) * np.arange(length) / 48_000)
        waveform = (waveform + 0.02 * generator.standard_normal(length)).astype(np.float32)
        waveforms[str(number)] = torch.from_numpy(waveform)
        soundfile.write(source / f"{number}.wav", waveform, 48_000, subtype="FLOAT")
        rows.append({"key": str(number), "audio": f"{number}.wav", "text": "la", "speaker": "s"})
    (source / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
    as_they_are = AudioSettings(loudness=None, max_silence=None)
    here = {"workers": 1, "device": "cpu", "audio": as_they_are}
    prepare_corpus(Options(str(source), str(tmp_path / "out"), codec=str(file), **here))

    dataset = open_dataset(str(tmp_path / "out/train"), 128)
    assert len(dataset) == len(lengths)
    for sample in range(len(dataset)):
        stored, _ = dataset.read(sample)
        waveform = waveforms[dataset.key(sample)]
        encoded = codec.encode(waveform).numpy()
        assert (np.abs(stored - encoded) <= 1e-5 + np.abs(encoded) * 2**-11).all()
        missing = -len(waveform) % codec.hop_length
        with_zeros = codec.encode(torch.nn.functional.pad(waveform, (0, missing))).numpy()
        assert (np.abs(stored - with_zeros)[-1].max() > 0.02) == (missing > 0)


@pytest.mark.long
def test_prepares_and_knows_moved_weights_again(file, codec, tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    rows = []
    for number in range(3):
        soundfile.write(source / f"{number}.wav", recording(0.5 + 0.2 * number, 48_000), 48_000)
        rows.append({"audio": f"{number}.wav", "text": "la la", "speaker": "s"})
    (source / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def prepare(codec):
        options = Options(
            str(source), str(tmp_path / "out"), codec=str(codec), workers=1, device="cpu"
        )
        return prepare_corpus(options)

    monkeypatch.chdir(file.parent)
    record = prepare("weights.pth")
    assert record["settings"]["codec"] == "dac_vae"
    assert record["settings"]["codec_fingerprint"] == codec.fingerprint
    assert record["summary"]["train"]["samples"] == 3

    export = tmp_path / "elsewhere.safetensors"
    export_safetensors(codec, export)
    assert prepare(export)["reused"]
    other = write_tiny_dac_vae(tmp_path, seed=1)
    with pytest.raises(ValueError, match="codec_fingerprint was"):
        prepare(other)
