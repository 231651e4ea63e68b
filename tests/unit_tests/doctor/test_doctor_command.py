"""`titan-tts data inspect` and `data doctor`: output, page, exit status and suggestions."""

import json
import os
import re
import tomllib
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.helpers.sound_samples import (
    CHANNELS,
    changed,
    raw_members,
    sound_samples,
    write_raw,
    write_shards,
)
from torchtitan.models.dit_tts.cli import main
from torchtitan.models.dit_tts.config.job_config import MAX_BUCKETS
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.doctor.checks import Limits
from torchtitan.models.dit_tts.doctor.doctor_command import default_output
from torchtitan.models.dit_tts.doctor.report import check_output, size_text
from torchtitan.models.dit_tts.doctor.suggest_buckets import (
    bucket_choices,
    fewest_buckets,
    random_batches,
    suggest,
    toml_lines,
)
from torchtitan.models.dit_tts.doctor.summary import distribution, summarize
from torchtitan.models.dit_tts.errors import InputError

WIDTH = ("--latent-channels", str(CHANNELS))
VOID = {"meta", "br", "path", "use", "rect"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two sound shards in ./set, the working folder being of this test alone."""
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "set", sound_samples())
    return tmp_path


def data(*arguments):
    return main(["data", *map(str, arguments), *WIDTH])


class Page(HTMLParser):
    """Checks that tags are closed in order and gathers what a browser would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.tags, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href", "srcset", "data", "action") and value
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


# The summary


def test_summary_of_known_data(folder):
    samples = sound_samples()
    del samples[0].metadata["speaker"]
    samples[1].metadata["quality"] = 3
    write_shards(folder / "set", samples)
    dataset = open_dataset("set", CHANNELS)
    summary = summarize(dataset, ["set"], 25.0, top=2)
    frames = [len(sample.latents) for sample in samples]
    assert summary["samples"] == 24 and summary["shards"] == 2
    assert summary["bytes"] == sum(path.stat().st_size for path in folder.glob("set/*.tar"))
    assert summary["hours"] == pytest.approx(sum(frames) / 25 / 3600)
    assert summary["dtype"] == {"float16": 24}
    assert summary["frames"]["min"] == min(frames) and summary["frames"]["total"] == sum(frames)
    assert summary["frames"]["quantiles"]["0.5"] == np.median(frames)
    assert sum(summary["frames"]["histogram"]["counts"]) == 24
    assert summary["reference_frames"]["max"] == 30 and summary["reference_frames"]["without"] == 0
    assert summary["text_chars"]["total"] == sum(len(one.metadata["text"]) for one in samples)
    assert summary["characters"]["first"] == "abcdefghijklmnopqrstuvwxyz"
    speaker = summary["labels"]["speaker"]
    assert speaker["count"] == 3 and speaker["without"] == 1
    assert len(speaker["most"]) == 2 and len(speaker["least"]) == 1
    named = speaker["most"] + speaker["least"]
    assert sum(row["share"] for row in named) == pytest.approx(1)
    assert sum(row["samples"] for row in named) == 23
    hours = dict.fromkeys(("s0", "s1", "s2"), 0.0)
    for sample in samples[1:]:
        hours[sample.metadata["speaker"]] += len(sample.latents) / 25 / 3600
    assert [row["value"] for row in named] == sorted(hours, key=lambda name: -hours[name])
    assert [row["hours"] for row in named] == pytest.approx(sorted(hours.values(), reverse=True))
    assert summary["labels"]["quality"]["most"][0]["value"] == "3"
    assert summary["fingerprint"] == dataset.fingerprint
    json.dumps(summary, allow_nan=False)


def test_distribution_by_hand():
    found = distribution(np.arange(101)[::-1])
    assert found["quantiles"] == {
        "0.01": 1,
        "0.05": 5,
        "0.25": 25,
        "0.5": 50,
        "0.75": 75,
        "0.95": 95,
        "0.99": 99,
    }
    assert (found["total"], found["min"], found["max"], found["mean"]) == (5050, 0, 100, 50)


def test_distribution_of_nothing_and_of_zeros():
    assert distribution(np.zeros(0))["mean"] is None
    zeros = distribution(np.zeros(3, np.int32))
    assert zeros["max"] == 0 and sum(zeros["histogram"]["counts"]) == 3


def test_sizes_in_words():
    assert [size_text(n) for n in (0, 999, 1000, 256_000_000, 3e15)] == [
        "0 bytes",
        "999 bytes",
        "1 kB",
        "256 MB",
        "3e+03 TB",
    ]


def test_inspect_prints_a_table(folder, capsys):
    assert data("inspect", "set") == 0
    said = capsys.readouterr().out
    for words in ("24 in 2 shards", "float16, 8 channels", "speaker: 3 values", "fingerprint"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 100
    assert os.listdir(folder) == ["set"]  # inspecting leaves no page


def test_inspect_json_is_the_only_output(folder, capsys):
    assert data("inspect", "set/shard-000000.tar", "set/shard-000001.tar", "--json") == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert summary["samples"] == 24
    assert [source["samples"] for source in summary["sources"]] == [12, 12]
    assert said.err == ""


def test_inspect_shows_what_the_terminal_cannot(folder, capsys, monkeypatch):
    samples = [changed(one, metadata={"speaker": "王小明"}) for one in sound_samples(6)]
    write_shards(folder / "set", samples)
    import io
    import sys

    latin = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    assert data("inspect", "set") == 0
    latin.flush()
    assert b"\\u738b" in latin.buffer.getvalue()


def test_inspect_tells_of_problems(folder, capsys):
    os.truncate("set/shard-000001.tar", os.path.getsize("set/shard-000001.tar") - 30_000)
    assert data("inspect", "set") == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_bad_input_is_one_sentence(folder, capsys, command):
    assert data(command, "nowhere") == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("error: ") and "nowhere" in said[0]
    assert main(["data", command, "set"]) == 2
    assert "8 wide" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["data"], "required: command"),
        (["data", "inspect"], "required: path"),
        (["data", "inspect", "set", "--frames-per-second", "0"], "not a positive number"),
        (["data", "doctor", "set", "--max-samples", "-1"], "not 0 or more"),
        (["data", "doctor", "set", "--examples", "0"], "not 1 or more"),
        (["data", "cure", "set"], "invalid choice: 'cure'"),
    ],
)
def test_usage(folder, capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# The doctor


@pytest.mark.long
def test_doctor_of_sound_data(folder, capsys):
    assert data("doctor", "set") == 0
    said = capsys.readouterr()
    assert "healthy" in said.out and "every check passed" in said.out
    assert "24/24" in said.err  # the progress bar
    page = Page((folder / "set-doctor.html").read_text())
    assert "None: every check passed." in " ".join(page.text)
    assert page.tags.count("svg") == 6


@pytest.mark.long
def test_doctor_of_damaged_data(folder, capsys):
    samples = sound_samples()
    evil = "<script>alert('x')</script> & $1$"
    samples[3] = changed(samples[3], latents=np.zeros((60, CHANNELS)))
    for number in range(0, 24, 3):
        samples[number] = changed(samples[number], metadata={"speaker": evil})
    for number in range(1, 24, 3):
        samples[number] = changed(samples[number], metadata={"speaker": "王小明"})
    write_shards(folder / "set", samples)
    os.truncate("set/shard-000001.tar", os.path.getsize("set/shard-000001.tar") - 30_000)
    assert data("doctor", "set", "--json", "--output", "page.html") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "errors" and result["page"] == str(folder / "page.html")
    assert {"status", "summary", "read", "findings", "suggestion", "toml", "shards", "page"} <= set(
        result
    )
    codes = [finding["code"] for finding in result["findings"]]
    assert codes[:2] == ["damaged_shard", "zero_latents"]
    severities = [finding["severity"] for finding in result["findings"]]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert sum(shard["problems"] for shard in result["shards"]) > 0

    text = (folder / "page.html").read_text()
    page = Page(text)
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert all(load.startswith("#") for load in page.loads)
    # Namespaces are names; nothing else may look like an address.
    assert set(re.findall(r"""(\S*)=["']?https?:""", text)) <= {"xmlns", "xmlns:xlink"}
    assert "url(http" not in text and "@import" not in text
    assert evil not in text and "&lt;script&gt;" in text and "王小明" in text
    shown = " ".join(page.text)
    assert "shard-000000:utt003" in shown and evil in shown


def test_doctor_of_data_without_a_sound_sample(folder, capsys):
    (sample,) = sound_samples(1)
    del sample.metadata["text"]
    write_raw(folder / "bad.tar", raw_members(sample))
    assert data("doctor", "bad.tar") == 1
    assert "cannot be parsed" in capsys.readouterr().out
    page = Page((folder / "bad-doctor.html").read_text())
    assert page.tags.count("svg") == 0


@pytest.mark.long
def test_doctor_of_a_subset(folder, capsys):
    assert data("doctor", "set", "--max-samples", 5, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["read"]["samples"] == 5 and result["summary"]["samples"] == 24
    assert "even subset" in result["read"]["scope"]


@pytest.mark.long
def test_doctor_compares_with_the_record(folder, capsys):
    import hashlib

    path = folder / "set" / "shard-000000.tar"
    shards = {path.name: {"bytes": path.stat().st_size, "sha256": "0" * 64}}
    (folder / "set" / "prepare.json").write_text(json.dumps({"shards": shards}))
    assert data("doctor", "set", "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert [finding["code"] for finding in result["findings"]] == ["shard_changed"]
    assert [shard["record"] for shard in result["shards"]] == ["differs", "none"]
    assert "SHA-256" in result["read"]["scope"]

    shards[path.name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "set" / "prepare.json").write_text(json.dumps({"shards": shards}))
    assert data("doctor", "set", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [shard["record"] for shard in result["shards"]] == ["same", "none"]
    # A subset does not read shards whole: their sizes are compared.
    assert data("doctor", "set", "--json", "--max-samples", 3) == 0
    result = json.loads(capsys.readouterr().out)
    assert [shard["record"] for shard in result["shards"]] == ["size only", "none"]


@pytest.mark.long
def test_page_replaces_a_page_and_nothing_else(folder):
    (folder / "notes.html").write_text("<html>mine</html>")
    with pytest.raises(InputError, match="not overwritten"):
        check_output("notes.html")
    with pytest.raises(InputError, match="is a folder"):
        check_output("set")
    with pytest.raises(InputError, match="does not exist"):
        check_output("nowhere/page.html")
    assert data("doctor", "set", "--output", "notes.html") == 2
    assert (folder / "notes.html").read_text() == "<html>mine</html>"
    assert data("doctor", "set", "--output", "page.html") == 0
    assert data("doctor", "set", "--output", "page.html") == 0
    assert sorted(os.listdir(folder)) == ["notes.html", "page.html", "set"]


def test_speaker_patch_is_checked_before_reading(folder, capsys):
    assert data("doctor", "set", "--max-speaker-frames", 383) == 2
    said = capsys.readouterr().err
    assert "multiple of the speaker encoder's patch of 4" in said and "reading" not in said


@pytest.mark.parametrize(
    "path, name",
    [
        ("data/train", "train"),
        ("data/train/", "train"),
        ("data/train/shard-000000.tar", "shard-000000"),
        ("data/train/*.tar", "train"),
        ("data/my set/shard-{000000..000003}.tar", "my_set"),
        ("s3://bucket/sets/train", "train"),
        ("*.tar", "data"),
    ],
)
def test_default_name_of_the_page(path, name):
    assert default_output([path]) == f"{name}-doctor.html"


def test_default_name_of_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder / "set")
    assert default_output(["."]) == "set-doctor.html"


# Suggestions


def lognormal_lengths(count=20_000):
    generator = np.random.default_rng(0)
    return np.clip(generator.lognormal(np.log(225), 0.5, count), 8, 768).astype(np.int64)


def test_more_buckets_waste_less():
    frames = lognormal_lengths()
    choices = bucket_choices(frames, 768)
    useful = [choice["useful_fraction"] for choice in choices]
    assert [choice["buckets"] for choice in choices] == list(range(1, MAX_BUCKETS + 1))
    assert useful == sorted(useful) and useful[0] < 0.5 < 0.85 < useful[-1] < 1
    assert useful[0] == pytest.approx(frames.mean() / 768, rel=1e-4)
    padded = np.array(choices[3]["edges"])
    bucket = np.searchsorted(padded, frames)
    assert useful[3] == pytest.approx(frames.sum() / padded[bucket].sum(), abs=1e-6)


def test_fewest_buckets_within_the_tolerance():
    assert fewest_buckets([0.4, 0.7, 0.89, 0.905, 0.91]) == 2
    assert fewest_buckets([0.99, 1.0]) == 0


def test_random_batches_by_hand():
    even = random_batches(np.full(100, 80), 0)
    assert even == {"batch_size": 32, "useful_fraction": 1.0, "shapes": 1}
    mixed = random_batches(np.array([8] * 31 + [80]), 0)
    assert mixed["useful_fraction"] == pytest.approx((8 * 31 + 80) / (32 * 80), abs=1e-6)


def test_suggestion_can_be_pasted_and_trains(folder):
    """The TOML is taken by the loader and gives the padding that it promises."""
    from types import SimpleNamespace

    from torchtitan.models.dit_tts.data.buckets import make_batch_policy, select_samples

    dataset = open_dataset("set", CHANNELS)
    suggestion = suggest(dataset, Limits(), max_speaker_frames=64)
    pasted = tomllib.loads(toml_lines(suggestion, ["set"]))
    options = SimpleNamespace(**pasted["data"])
    tokens = dataset.text_bytes + 2
    selection = select_samples(
        dataset.frames,
        tokens,
        max_frames=options.max_frames,
        max_text_tokens=options.max_text_tokens,
        on_too_long="error",
    )
    policy = make_batch_policy(
        selection.frames,
        dataset.reference_frames,
        tokens,
        max_frames=options.max_frames,
        max_speaker_frames=options.max_speaker_frames,
        max_text_tokens=options.max_text_tokens,
        num_buckets=options.num_buckets,
        bucket_frames=options.bucket_frames,
        global_batch_size=pasted["training"]["global_batch_size"],
        batch_multiple=8,
        speaker_patch_size=4,
    )
    assert options.path == "set"
    assert list(policy.edges) == suggestion["bucket_frames"]
    useful = [choice["useful_fraction"] for choice in suggestion["choices"]]
    enough = [number for number, each in enumerate(useful, 1) if each >= max(useful) - 0.02]
    assert suggestion["num_buckets"] == enough[0] > 1
    for bucket in suggestion["buckets"]:
        per_epoch = bucket["samples"] / bucket["batch_size"]
        assert bucket["batches_an_epoch"] == pytest.approx(per_epoch, abs=0.006)
    chosen = suggestion["choices"][suggestion["num_buckets"] - 1]
    assert policy.useful_fraction == pytest.approx(chosen["useful_fraction"], abs=1e-6)
    assert [bucket["batch_size"] for bucket in suggestion["buckets"]] == list(policy.batch_sizes)


def test_toml_of_odd_paths(folder):
    suggestion = suggest(open_dataset("set", CHANNELS), Limits(), max_speaker_frames=64)
    paths = ['a "quoted" \\ folder', "Ordner für 王"]
    assert tomllib.loads(toml_lines(suggestion, paths))["data"]["path"] == paths


def test_batch_frames_set_the_batch(folder):
    dataset = open_dataset("set", CHANNELS)
    suggestion = suggest(dataset, Limits(), max_speaker_frames=64, batch_frames=10_000)
    longest = suggestion["bucket_frames"][-1]
    size = suggestion["global_batch_size"]
    assert size % 8 == 0 and size * longest <= 10_000 < (size + 8) * longest
    # Less than one multiple of 8 of the longest cannot be had.
    assert (
        suggest(dataset, Limits(), max_speaker_frames=64, batch_frames=1)["global_batch_size"] == 8
    )


def test_no_suggestion_where_nothing_fits(folder):
    dataset = open_dataset("set", CHANNELS)
    assert suggest(dataset, Limits(max_frames=10), max_speaker_frames=64) is None
