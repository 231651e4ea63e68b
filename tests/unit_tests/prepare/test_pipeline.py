"""From recordings to archives: complete triplets, honest references, no work twice, clear errors."""

import io
import json
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.helpers import speech_corpora as corpora
from tests.helpers.http_server import FolderServer
from torchtitan.models.dit_tts.codec import build_codec
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.prepare import pipeline, work_folder
from torchtitan.models.dit_tts.prepare.audio_reader import read_audio_corpus
from torchtitan.models.dit_tts.prepare.pipeline import RunOptions, prepare_corpus
from torchtitan.models.dit_tts.prepare.processing import REASONS
from torchtitan.models.dit_tts.prepare.settings import AudioSettings, PrepareSettings

AS_IS = AudioSettings(loudness=None, max_silence=None)
# Small chunks and shards: several of each.
SMALL = PrepareSettings(samples_per_shard=3, chunk_items=4, audio=AS_IS)
HERE = RunOptions(workers=1)
SKIP = RunOptions(workers=1, on_error="skip", max_corrupt_fraction=0.5)
OVERWRITE = RunOptions(workers=1, overwrite=True)


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def recording(
    key: str, speaker: str, split: str, samples: int = 8000, rate: int = 16_000, **more: object
) -> dict[str, bytes]:
    """The two members of a recording: a tone whose pitch depends on the key."""
    audio = io.BytesIO()
    tone = 0.1 * np.sin(np.arange(samples) * (0.02 + 0.001 * (sum(key.encode()) % 97)))
    soundfile.write(audio, tone, rate, format="FLAC")
    metadata = {"text": f"text of {key}", "speaker": speaker, "split": split, "language": "en"}
    return {f"{key}.flac": audio.getvalue(), f"{key}.json": json.dumps(metadata | more).encode()}


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Two speakers with four and three training utterances and one held out each; one who is alone."""
    members = {}
    for speaker, count in (("ann", 4), ("bob", 3)):
        for number in range(count):
            members |= recording(f"{speaker}-{number}", speaker, "train", 6000 + 700 * number)
        members |= recording(f"{speaker}-held", speaker, "heldout", 9000)
    members |= recording("cat-0", "cat", "train", 12_800)
    return write_tar(tmp_path / "corpus.tar", members)


def read_archive(folder: Path) -> dict[str, dict]:
    """{key: {"npy": latents, "ref.npy": reference, "json": metadata}} of all shards of a folder."""
    samples: dict[str, dict] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, kind = member.name.split(".", 1)
                data = tar.extractfile(member).read()
                value = json.loads(data) if kind == "json" else np.load(io.BytesIO(data))
                samples.setdefault(key, {})[kind] = value
    return samples


def tree(folder: Path) -> dict[str, bytes]:
    """Every shard's bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("*/*.tar"))}


def contains(latents: np.ndarray, part: np.ndarray) -> bool:
    """Whether `part` is a run of frames of `latents`."""
    starts = range(len(latents) - len(part) + 1)
    return any(np.array_equal(latents[start : start + len(part)], part) for start in starts)


@pytest.mark.long
def test_embedded_corpus():
    utterances = list(read_audio_corpus(corpora.CORPUS))
    train = [one for one in utterances if one.split == "train"]
    assert (len(train), len(utterances) - len(train)) == (880, 48)
    assert {one.text for one in train}.isdisjoint(
        one.text for one in utterances if one.split == "heldout"
    )
    for voice in ("slt", "rms", "awb", "kal16"):
        texts = [one.text.split() for one in utterances if one.speaker == voice]
        assert len(texts) == 232 and len({tuple(text) for text in texts}) == 232
        assert len({pair for text in texts for pair in zip(text, text[1:])}) > 90
    assert all(one.waveform.abs().max() < 1 and one.sample_rate == 16_000 for one in utterances)
    assert all(one.metadata["license"] == "LicenseRef-CMU-Flite" for one in utterances)
    assert corpora.CORPUS.stat().st_size < 5.5e6


def test_triplets_and_references(corpus, tmp_path):
    codec = build_codec("mel_dct")
    record = prepare_corpus(corpus, tmp_path / "out", SMALL, HERE)
    summary = record["summary"]
    assert summary["train"]["samples"] == 8 and summary["train"]["shards"] == 3
    assert summary["heldout"]["samples"] == 2 and summary["speakers"] == 3
    assert summary["own_crop_references"] == 1 and record["reused"] is False
    train, heldout = read_archive(tmp_path / "out/train"), read_archive(tmp_path / "out/heldout")
    recordings = {one.key: one for one in read_audio_corpus(corpus)}
    assert list(train) + list(heldout) == sorted(recordings, key=lambda key: "held" in key)
    for key, sample in (train | heldout).items():
        latents, reference, metadata = sample["npy"], sample["ref.npy"], sample["json"]
        waveform = recordings[key].waveform
        assert latents.dtype == reference.dtype == np.float16
        np.testing.assert_array_equal(latents, codec.encode(waveform).half().numpy())
        assert metadata["target_duration"] == len(waveform) / 16_000
        assert metadata["text"] == f"text of {key}" and metadata["language"] == "en"
        source = metadata["reference_key"]
        # Never from the held-out part.
        assert train[source]["json"]["speaker"] == metadata["speaker"]
        assert contains(train[source]["npy"], reference)
        if metadata["speaker"] == "cat":
            assert source == key and len(reference) == 10  # half of its own 20 frames
        else:
            assert source != key
    # The loader reads it, and the record tells its frames and digests.
    dataset = open_dataset(str(tmp_path / "out/train"))
    assert len(dataset) == 8 and dataset.frames.sum() == summary["train"]["frames"]
    assert all((tmp_path / "out" / f"{name}.idx").exists() for name in record["shards"])
    assert "- speakers: 3" in (tmp_path / "out/report.md").read_text()


def test_references_of_several_utterances(corpus, tmp_path):
    settings = replace(SMALL, references=3, max_reference_frames=30)
    prepare_corpus(corpus, tmp_path / "out", settings, HERE)
    train, heldout = read_archive(tmp_path / "out/train"), read_archive(tmp_path / "out/heldout")
    for key, sample in (train | heldout).items():
        keys, reference = sample["json"]["reference_keys"], sample["ref.npy"]
        assert keys[0] == sample["json"]["reference_key"] and len(set(keys)) == len(keys)
        assert (key in keys) == (key == "cat-0")
        whole = np.concatenate([train[one]["npy"] for one in keys])
        assert contains(whole, reference)
        if key != "cat-0":
            # ann's others have 10 to 13 frames, bob's two 10 to 12: 30 are three of ann's or all.
            assert len(reference) == min(30, sum(len(train[one]["npy"]) for one in keys))
            assert len(keys) >= 2


def test_long_references_are_cropped(tmp_path):
    members = recording("a", "ann", "train", 16_000 * 20) | recording("b", "ann", "train", 640)
    prepare_corpus(write_tar(tmp_path / "c.tar", members), tmp_path / "out", SMALL, HERE)
    samples = read_archive(tmp_path / "out/train")
    assert samples["b"]["ref.npy"].shape == (384, 128) and samples["a"]["ref.npy"].shape == (1, 128)


def test_a_reference_does_not_depend_on_other_speakers(corpus, tmp_path):
    prepare_corpus(corpus, tmp_path / "one", SMALL, HERE)
    members = recording("zoe-0", "zoe", "train") | recording("zoe-1", "zoe", "train")
    with tarfile.open(corpus) as tar:
        members |= {m.name: tar.extractfile(m).read() for m in tar}
    prepare_corpus(write_tar(tmp_path / "more.tar", members), tmp_path / "two", SMALL, HERE)
    one, two = read_archive(tmp_path / "one/train"), read_archive(tmp_path / "two/train")
    assert all(one[key]["json"] == two[key]["json"] for key in one) and len(two) == len(one) + 2


@pytest.mark.long
def test_a_given_reference_is_kept(tmp_path):
    folder = corpora.write_latents_table(tmp_path / "t", corpora.speech(each=1), flat=False)
    prepare_corpus(folder, tmp_path / "out", replace(SMALL, max_reference_frames=8), HERE)
    for sample in read_archive(tmp_path / "out/train").values():
        np.testing.assert_array_equal(sample["ref.npy"], sample["npy"][:8])
        assert "reference_key" not in sample["json"]


def test_second_run_does_nothing_and_a_change_is_refused(corpus, tmp_path):
    out = tmp_path / "out"
    first = prepare_corpus(corpus, out, SMALL, HERE)
    before, shard = tree(out), out / "train/shard-000000.tar"
    inode = shard.stat().st_ino
    again = prepare_corpus(corpus, out, SMALL, HERE)
    assert again == first | {"reused": True} and shard.stat().st_ino == inode

    shard.write_bytes(b"damaged")
    with pytest.raises(InputError, match="lacks shards.*--overwrite"):
        prepare_corpus(corpus, out, SMALL, HERE)
    assert prepare_corpus(corpus, out, SMALL, OVERWRITE)["reused"] is False and tree(out) == before

    other = replace(SMALL, seed=1)
    with pytest.raises(InputError, match=r"other settings \(seed was 0, is 1\)"):
        prepare_corpus(corpus, out, other, HERE)
    assert tree(out) == before
    prepare_corpus(corpus, out, other, OVERWRITE)
    assert tree(out) != before
    assert sorted(os.listdir(tmp_path)) == ["corpus.tar", "out"]  # nothing is left beside
    assert sorted(os.listdir(out)) == ["heldout", "prepare.json", "report.md", "train"]


@pytest.mark.long
def test_a_moved_source_is_compared_by_content(recordings_tree, tmp_path):
    """New times alone are no change; another byte or another text is one."""
    moved = tmp_path / "moved/LJ"
    prepare_corpus(recordings_tree, tmp_path / "out", SMALL, HERE)
    shutil.copytree(recordings_tree, moved, copy_function=shutil.copyfile)
    assert prepare_corpus(moved, tmp_path / "out", SMALL, HERE)["reused"] is True
    wav = next((moved / "wavs").iterdir())
    content = bytearray(wav.read_bytes())
    content[-2] ^= 1
    wav.write_bytes(content)
    with pytest.raises(InputError, match="other recordings, or the source has changed"):
        prepare_corpus(moved, tmp_path / "out", SMALL, HERE)
    content[-2] ^= 1
    wav.write_bytes(content)
    assert prepare_corpus(moved, tmp_path / "out", SMALL, HERE)["reused"] is True
    lines = (moved / "metadata.csv").read_text().replace("one", "won")
    (moved / "metadata.csv").write_text(lines)
    with pytest.raises(InputError, match="other recordings, or the source has changed"):
        prepare_corpus(moved, tmp_path / "out", SMALL, HERE)


@pytest.fixture
def recordings_tree(tmp_path) -> Path:
    return corpora.write_ljspeech(tmp_path / "LJ", corpora.speech(each=5, voices=("slt",)))


def test_interrupted_work_is_kept_and_goes_on(corpus, tmp_path, monkeypatch):
    """An error ends the run after the first chunk; the next run encodes the rest alone."""
    whole = prepare_corpus(corpus, tmp_path / "whole", SMALL, HERE)
    encoded = []
    real = pipeline.open_engine

    def breaks(name, workers, devices):
        context = real(name, workers, devices)

        class Breaking:
            def __enter__(self):
                runner = context.__enter__()

                def run(function, jobs):
                    for job, result in zip(jobs, runner(function, jobs), strict=True):
                        encoded.append(job[1:])
                        yield result
                        if len(encoded) == 1:
                            raise InputError("pulled the plug")

                return run

            def __exit__(self, *error):
                return context.__exit__(*error)

        return Breaking()

    monkeypatch.setattr(pipeline, "open_engine", breaks)
    out = tmp_path / "out"
    with pytest.raises(InputError, match="plug"):
        prepare_corpus(corpus, out, SMALL, HERE)
    assert sorted(os.listdir(tmp_path)) == ["corpus.tar", "out.partial", "whole"]
    with pytest.raises(InputError, match=r"earlier run on other settings \(seed was 0, is 5\)"):
        prepare_corpus(corpus, out, replace(SMALL, seed=5), HERE)
    record = prepare_corpus(corpus, out, SMALL, HERE)
    assert encoded[:3] == [(0,), (1,), (2,)] and record["throughput"]["recordings_encoded"] == 6
    assert tree(out) == tree(tmp_path / "whole") and record["shards"] == whole["shards"]
    assert record["summary"] == whole["summary"]
    assert sorted(os.listdir(tmp_path)) == ["corpus.tar", "out", "whole"]


def test_cut_short_in_its_last_steps(corpus, tmp_path, monkeypatch):
    """After prepare.json is written, after the old output is set aside, and after the rename."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    prepare_corpus(corpus, out, SMALL, HERE)
    before = tree(out)

    def stop(*args):
        raise KeyboardInterrupt

    other = replace(SMALL, seed=1)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(work_folder, "finish", stop)
        prepare_corpus(corpus, out, other, OVERWRITE)
    assert tree(out) == before and (partial / "prepare.json").exists()
    out.rename(partial / "replaced")
    after = tree(partial)
    prepare_corpus(corpus, out, other, HERE)
    assert tree(out) == after != before and not (out / "replaced").exists()

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(work_folder, "tidy", stop)
        prepare_corpus(corpus, out, SMALL, OVERWRITE)
    assert tree(out) == before and (out / "replaced").exists()
    assert prepare_corpus(corpus, out, SMALL, HERE)["reused"] is True
    assert sorted(os.listdir(out)) == ["heldout", "prepare.json", "report.md", "train"]
    assert sorted(os.listdir(tmp_path)) == ["corpus.tar", "out"]


def test_two_runs_do_not_meet(corpus, tmp_path):
    out = tmp_path / "out"
    at_work = pytest.raises(InputError, match="another titan-tts prepare is at work")
    with work_folder.locked(out), at_work:
        prepare_corpus(corpus, out, SMALL, HERE)
    prepare_corpus(corpus, out, SMALL, HERE)


def test_a_foreign_folder_is_not_replaced(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out/thesis.tex").write_text("ten years of work")
    for options in (HERE, OVERWRITE):
        with pytest.raises(InputError, match="not replaced"):
            prepare_corpus(corpus, tmp_path / "out", SMALL, options)
    assert (tmp_path / "out/thesis.tex").exists()
    (tmp_path / "out/thesis.tex").rename(tmp_path / "out.partial/thesis.tex")
    with pytest.raises(InputError, match="holds thesis.tex, which is none of it"):
        prepare_corpus(corpus, tmp_path / "out", SMALL, OVERWRITE)
    (tmp_path / "out.partial/thesis.tex").unlink()
    prepare_corpus(corpus, tmp_path / "out", SMALL, HERE)  # an empty one is taken


def test_every_reason_is_counted(tmp_path):
    tone = recording("ok-0", "s", "train", 16_000) | recording("ok-1", "s", "train", 17_000)
    loud = io.BytesIO()
    soundfile.write(loud, np.sign(np.sin(np.arange(16_000) / 20)), 16_000, format="FLAC")
    silent = io.BytesIO()
    soundfile.write(silent, np.zeros(16_000), 16_000, format="FLAC")
    members = (
        tone
        | recording("clipped", "s", "train")
        | {"clipped.flac": loud.getvalue()}
        | recording("silent", "s", "train")
        | {"silent.flac": silent.getvalue()}
        | recording("too_short", "s", "train", 3000)
        | recording("too_long", "s", "train", 64_000)
        | recording("chars_per_second_low", "s", "train", 16_000, text="a")
        | recording("chars_per_second_high", "s", "train", 16_000, text="a" * 99)
        | recording("empty_text", "s", "train", 16_000, text=" ")
        | recording("undecodable", "s", "train")
        | {"undecodable.flac": b"fLaC" + bytes(200)}
    )
    source = write_tar(tmp_path / "c.tar", members)
    filters = AudioSettings(
        loudness=None,
        max_silence=None,
        min_seconds=0.5,
        max_seconds=2,
        min_chars_per_second=2,
        max_chars_per_second=40,
        max_clipped=0.01,
    )
    settings = replace(SMALL, audio=filters)
    with pytest.raises(InputError, match="c.tar: undecodable: the audio cannot.*--on-error skip"):
        prepare_corpus(source, tmp_path / "out", settings, HERE)
    with pytest.raises(InputError, match="1 of 9 recordings are damaged.*0.1 allows"):
        prepare_corpus(source, tmp_path / "out", settings, replace(SKIP, max_corrupt_fraction=0.1))
    summary = prepare_corpus(source, tmp_path / "out", settings, SKIP)["summary"]
    assert summary["dropped"] == dict.fromkeys(sorted(REASONS), 1)
    assert summary["train"]["samples"] == 2 and summary["problems"][0][0] == "undecodable"
    assert "| too_long | 1 |" in (tmp_path / "out/report.md").read_text()
    # Whoever wants every recording is not content with this output.
    with pytest.raises(InputError, match="leaves damaged recordings out"):
        prepare_corpus(source, tmp_path / "out", settings, HERE)
    with pytest.raises(InputError, match="no training recording is left.*'too_short'"):
        none = replace(settings, audio=replace(filters, min_seconds=9, max_seconds=10))
        prepare_corpus(source, tmp_path / "none", none, SKIP)


@pytest.mark.long
def test_processing_is_recorded(tmp_path):
    """Stereo at another rate, long silence, peaks: what was done is counted and told a sample."""
    one = corpora.speech(each=1, voices=("rms",))[1]
    silence = np.zeros(16_000, np.float32)
    samples = np.concatenate([silence, 0.1 * one.samples, silence])
    folder = tmp_path / "m"
    path = corpora.write_manifest(folder, [replace(one, samples=samples), replace(one, key="b")])
    record = prepare_corpus(path, tmp_path / "out", PrepareSettings(), HERE)
    summary, train = record["summary"], read_archive(tmp_path / "out/train")
    assert (summary["mixed_channels"], summary["resampled"]) == (2, 2)
    assert summary["silence_cut_seconds"] == pytest.approx(1.5, abs=0.15)
    first, second = train[f"audio/{one.key}"], train["audio/b"]
    assert first["json"]["gain_db"] == pytest.approx(second["json"]["gain_db"] + 20, abs=1.5)
    longer = first["json"]["target_duration"] - second["json"]["target_duration"]
    assert longer == pytest.approx(0.5, abs=0.15)
    assert len(first["npy"]) == -(-round(first["json"]["target_duration"] * 16_000) // 640)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"samples_per_shard": 0}, "--samples-per-shard is 0"),
        ({"references": 0}, "--references"),
        ({"codec": "mp3"}, "known are: mel_dct"),
        ({"format": "mp4"}, "--format is 'mp4'"),
        ({"audio": AudioSettings(loudness=3)}, "--loudness is 3"),
        ({"audio": AudioSettings(max_silence=-1)}, "--max-silence is -1"),
        ({"audio": AudioSettings(min_seconds=3, max_seconds=2)}, "nothing would be kept"),
        ({"items": replace(SMALL.items, heldout_share=1)}, "--heldout-share is 1"),
    ],
)
def test_bad_settings(change, said, corpus, tmp_path):
    with pytest.raises(InputError, match=said):
        prepare_corpus(corpus, tmp_path / "out", replace(SMALL, **change), HERE)
    assert sorted(os.listdir(tmp_path)) == ["corpus.tar"]


def test_bad_options(corpus, tmp_path):
    for change, said in (
        ({"engine": "slurm"}, "allowed are local, ray"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"on_error": "hope"}, "raise, skip"),
        ({"workers": -1}, "--workers"),
        ({"max_corrupt_fraction": 2}, "between 0 and 1"),
    ):
        with pytest.raises(InputError, match=said):
            prepare_corpus(corpus, tmp_path / "out", SMALL, replace(HERE, **change))
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file/out", "/proc/nowhere/out"):
        with pytest.raises(InputError, match="cannot be written"):
            prepare_corpus(corpus, place, SMALL, HERE)
    members = recording("a", "ann", "heldout")
    with pytest.raises(InputError, match="training needs at least one"):
        prepare_corpus(write_tar(tmp_path / "h.tar", members), tmp_path / "out", SMALL, HERE)
    assert sorted(os.listdir(tmp_path)) == ["corpus.tar", "file", "h.tar"]


def test_a_corpus_behind_a_url(corpus, tmp_path):
    prepare_corpus(corpus, tmp_path / "local", SMALL, HERE)
    with FolderServer(tmp_path) as server:
        url = f"{server.url}/corpus.tar"
        assert prepare_corpus(url, tmp_path / "out", SMALL, HERE)["reused"] is False
        assert prepare_corpus(url, tmp_path / "out", SMALL, HERE)["reused"] is True
    assert tree(tmp_path / "out") == tree(tmp_path / "local")


def test_reading_a_corpus_refuses_damage(tmp_path):
    members = recording("a", "ann", "train") | {"a.flac": b"hello"}
    for path, said in (
        (write_tar(tmp_path / "c.tar", members), "c.tar: a: the audio is not flac"),
        (tmp_path / "missing.tar", "no such corpus"),
    ):
        with pytest.raises(InputError, match=said):
            list(read_audio_corpus(path))
