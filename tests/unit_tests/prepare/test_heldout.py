"""An honest held-out split: of a miniature LibriTTS-R to a training step, and by speaker."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.helpers import speech_corpora as corpora
from tests.helpers.loaders import build, take
from tests.helpers.sentences import refused
from tests.helpers.tiny_runs import Folder
from titan_tts.doctor.checks import check_dataset
from titan_tts.doctor.findings import Limits
from titan_tts.doctor.scan import choose_samples, measure
from titan_tts.prepare.recordings import drawn
from torchtitan.models.dit_tts.data.dataset import Dataset, open_dataset

AS_IS = {"audio": corpora.AS_IS}
# The tiny model of the tests on latents of the codec.
LATENTS = ["--data.latent_channels=128", "--data.max_frames=64", "--training.steps=1"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> tuple[Path, dict]:
    """OUTPUT of a miniature LibriTTS-R, and its summary."""
    folder = tmp_path_factory.mktemp("libritts_r")
    source = corpora.write_small_libritts_r(folder / "LibriTTS_R")
    return folder / "out", corpora.prepare(source, folder / "out", **AS_IS)["summary"]


def by_key(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray, dict]]:
    dataset = open_dataset(str(folder))
    return {dataset.key(n): (*dataset.read(n), dataset.metadata(n)) for n in range(len(dataset))}


def codes_of(*folders: Path) -> set[str]:
    dataset: Dataset = open_dataset([str(folder) for folder in folders], on_error="report")
    found = measure(dataset, choose_samples(len(dataset), 0), 1)
    return {finding.code for finding in check_dataset(dataset, found, Limits())}


def test_references_of_a_speaker_disjoint_corpus(prepared):
    output, summary = prepared
    train, heldout = by_key(output / "train"), by_key(output / "heldout")
    assert len(train) == 9 and len(heldout) == 3 + 1 + 6
    assert {one[2]["speaker"] for one in train.values()}.isdisjoint(
        one[2]["speaker"] for one in heldout.values()
    )
    for split in (train, heldout):
        for key, (latents, reference, metadata) in split.items():
            rows = {row.tobytes() for row in latents}
            assert not any(row.tobytes() in rows for row in reference)
            if metadata["speaker"] == "251":
                assert len(reference) == 0 and "reference_key" not in metadata
                continue
            source, _, of_source = split[metadata["reference_key"]]
            assert of_source["speaker"] == metadata["speaker"]
            np.testing.assert_array_equal(reference, source)
    counts = {split: summary[split]["without_reference"] for split in ("train", "heldout")}
    assert counts == {"train": 0, "heldout": 1}
    assert "251_7_000000_000000" in heldout
    assert "heldout samples without a reference" in (output / "report.md").read_text()


def test_the_doctor_finds_no_leak(prepared):
    output, _ = prepared
    leaks = {"reference_from_target", "heldout_in_training"}
    assert not leaks & codes_of(output / "train", output / "heldout")


@pytest.mark.parametrize("references", [1, 2])
def test_overlapping_segments_are_no_references_of_each_other(tmp_path, references):
    """Of a file of six seconds: each second one with the next, and one that all overlap."""
    sound = np.concatenate([one.samples for one in corpora.speech(3, ("slt",))])
    soundfile.write(tmp_path / "long.wav", sound[: 6 * corpora.RATE], corpora.RATE)
    segments = [(start, 2) for start in range(4)] + [(0, 6)]
    rows = [
        {"audio": "long.wav", "text": "x", "speaker": "s", "key": f"{start}-{start + length}"}
        | {"offset": start, "duration": length}
        for start, length in segments
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "out"
    options = {"references": references, **AS_IS}
    record = corpora.prepare(tmp_path / "list.jsonl", output, **options)
    assert record["summary"]["train"]["without_reference"] == 1
    assert "reference_from_target" not in codes_of(output / "train")
    others = {"0-2": {"2-4", "3-5"}, "1-3": {"3-5"}, "2-4": {"0-2"}, "3-5": {"0-2", "1-3"}}
    for key, (_, reference, metadata) in by_key(output / "train").items():
        names = metadata.get("reference_keys" if references > 1 else "reference_key", [])
        names = {names} if isinstance(names, str) else set(names)
        assert names <= others.get(key, set()) and bool(names) == (key in others)
        assert len(reference) == 50 * len(names)


@pytest.mark.long
def test_held_out_samples_are_loaded_and_trained_on(prepared, train, tmp_path):
    """Also where no sample of a batch has a reference."""
    output, _ = prepared
    seen = set()
    heldout = {"allow_heldout": True, "latent_channels": 128, "num_buckets": 1}
    for inputs, _ in take(build(output / "heldout", **heldout), 5):
        alone = [sample_id.endswith("251_7_000000_000000") for sample_id in inputs["sample_id"]]
        assert inputs["speaker_frames"].bool().tolist() == [not one for one in alone]
        seen |= set(alone)
    assert seen == {True, False}
    assert train("all", f"--data.path={output}/heldout", "--data.allow-heldout", *LATENTS) == 0

    for number in range(4):
        soundfile.write(tmp_path / f"{number}.wav", corpora.tone(1), corpora.RATE)
    rows = [{"audio": f"{n}.wav", "text": "x", "speaker": f"s{n}"} for n in range(4)]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    record = corpora.prepare(tmp_path / "list.jsonl", tmp_path / "out", **AS_IS)
    assert record["summary"]["train"]["without_reference"] == 4
    [(inputs, _)] = take(build(tmp_path / "out/train", latent_channels=128), 1)
    assert inputs["speaker"].shape[1] >= 4 and not inputs["speaker_frames"].any()
    assert train("none", f"--data.path={tmp_path}/out/train", *LATENTS) == 0
    for name in ("all", "none"):
        [step] = Folder(tmp_path / name).metrics()
        assert np.isfinite(step["loss"]) and np.isfinite(step["grad_norm"])


def write_list(folder: Path, speakers: str, **columns: str) -> Path:
    """Two recordings of each speaker: a0 a1 b0 b1 ..., without a column of the speaker."""
    rows = []
    for speaker in speakers:
        for number in range(2):
            name = f"{speaker}{number}.wav"
            soundfile.write(
                folder / name, corpora.tone(0.2, hertz=200 + 9 * len(rows)), corpora.RATE
            )
            rows.append({"audio": name, "text": "x"} | columns)
    path = folder / "list.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_held_out_by_speaker(tmp_path):
    """The speakers are found in the keys; all of one go together, whoever else is there."""
    pattern = {"speaker_pattern": "^(.)", "heldout_by": "speaker", "heldout_fraction": 0.4}
    splits = []
    for name, speakers in (("six", "abcdef"), ("eight", "abcdefgh")):
        (tmp_path / name).mkdir()
        source = write_list(tmp_path / name, speakers)
        corpora.prepare(source, tmp_path / name / "out", **AS_IS, **pattern)
        found = {split: by_key(tmp_path / name / "out" / split) for split in ("train", "heldout")}
        for split in found.values():
            for key, (_, reference, metadata) in split.items():
                other = metadata["speaker"] + str(1 - int(key[1]))
                assert metadata["reference_key"] == other and other in split and len(reference)
        splits.append({key[0]: split for split in found for key in found[split]})
    assert splits[0] == {speaker: splits[1][speaker] for speaker in "abcdef"}
    assert set(splits[0].values()) == {"train", "heldout"}


@pytest.mark.parametrize("by", ["speaker", "utterance"])
def test_nothing_held_out_is_refused_before_encoding(tmp_path, by):
    source = write_list(tmp_path, "bcde")

    def prepare(fraction: float, name: str = "out", **options: str) -> dict:
        options = {"speaker_pattern": "^(.)", "heldout_by": by} | options
        return corpora.prepare(
            source, tmp_path / name, heldout_fraction=fraction, **AS_IS, **options
        )

    refused(lambda: prepare(0.0001), f"{source}: ", "= 0.0001 holds nothing out", "another --seed")
    keys = [speaker + number for speaker in "bcde" for number in "01"]
    fraction, name = min((drawn(one, 0), one) for one in ("bcde" if by == "speaker" else keys))
    refused(lambda: prepare(fraction), "nothing out")
    prepare(fraction + 1e-6)
    held = by_key(tmp_path / "out/heldout")
    assert {key[: len(name)] for key in held} == {name} and len(held) == 3 - len(name)
    write_list(tmp_path, "ab", split="train")
    refused(lambda: prepare(0.5, "given"), "nothing out", "its own splits")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]
