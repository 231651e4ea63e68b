"""`titan-tts data inspect` and `data doctor`: output, page and exit status."""

import html
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.pages import check_offline
from tests.helpers.sound_samples import (
    CHANNELS,
    changed,
    raw_members,
    sound_samples,
    write_raw,
    write_shards,
)
from titan_tts.cli import main
from titan_tts.doctor.doctor_command import default_output

WIDTH = ("--latent-channels", str(CHANNELS))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two valid shards in ./set, the working folder being of this test alone."""
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "set", sound_samples())
    return tmp_path


def data(*arguments):
    return main(["data", *map(str, arguments), *WIDTH])


def test_inspect_prints_a_table_or_json(folder, capsys):
    """Rare characters are shown with their texts: a letter of another script in one text, quotes in two, a blank in all."""
    assert data("inspect", "set") == 0
    printed = capsys.readouterr().out
    said = "\n".join(" ".join(line.split()) for line in printed.split("\n"))
    assert "samples 24\n" in said and "8 channels\n" in said
    assert "doctor" not in printed and os.listdir(folder) == ["set"]
    samples = sound_samples(300)
    for number, sample in enumerate(samples):
        sample.metadata["text"] += " a." + {7: "\u200bЖЖ", 9: "“q”", 250: "“"}.get(number, "")
    write_shards(folder / "other", samples)
    assert data("inspect", "other") == 0
    assert r"in few texts: 'Ж' 1, '\u200b' 1, '”' 1, '“' 2" in capsys.readouterr().out
    assert data("inspect", "other", "--json", "--frames-per-second=50", "--top=2") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["rare_characters"] == {"\u200b": 1, "Ж": 1, "”": 1, "“": 2}
    assert (found["frames_per_second"], len(found["labels"]["speaker"]["most"])) == (50, 2)
    assert printed.err == ""
    few = sound_samples()  # of few texts a hundredth is less than one
    for number, letters in {7: "Жé", 9: "é"}.items():
        few[number].metadata["text"] += letters
    write_shards(folder / "few", few)
    assert data("inspect", "few", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rare_characters"] == {"Ж": 1}


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_bad_input_is_one_sentence(folder, capsys, command):
    write_shards(folder / "prepared" / "train", sound_samples())
    units = [("words", "'words' is not"), ("phones:", "phones:LANGUAGE"), ("phones:xx", "'xx'")]
    units = units if command == "doctor" else []
    for arguments, words in (
        (["nowhere", *WIDTH], "nowhere"),
        (["set"], "8 wide"),
        ([], "[data] path is empty"),
        (["prepared"], "/prepared/train"),
        (["set", "--frames-per-second=0"], "--frames-per-second = 0.0, but"),
        *((["set", f"--text-unit={unit}"], words) for unit, words in units),
    ):
        assert main(["data", command, *arguments]) == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ") and words in line


@pytest.mark.long
def test_doctor_of_valid_data(folder, capsys):
    assert data("doctor", "set") == 0
    printed = capsys.readouterr().out
    name = f"outputs/{folder.name}-set-doctor.html"
    assert "healthy" in printed and f"page: {folder}/{name}" in printed
    page = (folder / name).read_text()
    # Not that every check passed: 24 texts tell nothing.
    for each in (printed, page):
        assert "every check passed" not in each and "24 texts are too few" in each
    assert "<b>24</b><span>samples</span>" in page and "24 of 24 samples read" in page
    # A page is replaced, and nothing else is.
    options = ["--max-samples=5", "--json", "--top=1", "--max-frames=120"]
    options += ["--frames-per-second=50"]
    assert data("doctor", "set", "--output", name, *options) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["read"]["samples"] == result["read"]["valid_samples"] == 5
    assert (result["status"], result["summary"]["samples"]) == ("warnings", 24)
    assert {"long_latents", "duration_mismatch"} <= {one["code"] for one in result["findings"]}
    assert result["read"]["frames_per_second_measured"] == 25
    assert len(result["summary"]["labels"]["speaker"]["most"]) == 1
    assert result["summary"]["hours"] == pytest.approx(2090 / 50 / 3600)
    assert sorted(os.listdir(folder)) == ["outputs", "set"]


@pytest.mark.long
@pytest.mark.filterwarnings("error::RuntimeWarning")  # as of the mean of no sample
def test_doctor_of_corrupt_data(folder, capsys):
    samples = sound_samples()
    evil = "<script>alert('x')</script> & $1$"
    samples[3] = changed(samples[3], latents=np.zeros((60, CHANNELS)))
    for number in range(24):
        speaker = (evil, "王小明", "s2")[number % 3]
        samples[number] = changed(samples[number], metadata={"speaker": speaker})
    write_shards(folder / "set", samples)
    os.truncate("set/shard-000001.tar", os.path.getsize("set/shard-000001.tar") - 30_000)
    assert data("doctor", "set", "--json", "--output", "page.html") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "errors" and result["page"] == str(folder / "page.html")
    codes = [finding["code"] for finding in result["findings"]]
    assert codes[:2] == ["corrupt_shard", "constant_latents"]
    severities = [finding["severity"] for finding in result["findings"]]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    page = (folder / "page.html").read_text()
    assert "shard-000000:utt003" in page and "王小明" in page
    assert evil not in page and evil in html.unescape(page)
    check_offline(page)

    (sample,) = sound_samples(1)
    del sample.metadata["text"]
    write_raw(folder / "bad.tar", raw_members(sample))
    assert data("doctor", "bad.tar", "--output=page.html") == 1
    printed = capsys.readouterr().out
    assert "cannot be parsed" in printed


def test_what_would_fail_at_the_end_fails_before_reading(folder, capsys):
    (folder / "notes.html").write_text("<html>mine</html>")
    for option, words in (
        ("--output=notes.html", "not overwritten"),
        ("--output=set", "cannot be written; give another path"),
        ("--output=notes.html/page.html", "cannot be written; give another path"),
    ):
        assert data("doctor", "set", option) == 2
        printed = capsys.readouterr().err
        assert words in printed and "reading" not in printed
    assert (folder / "notes.html").read_text() == "<html>mine</html>"
    assert sorted(os.listdir(folder)) == ["notes.html", "set"]


def test_the_page_is_named_after_the_dataset():
    for path, name in (
        ("/x/data/train", "data-train"),
        ("/x/data/train/shard-000000.tar", "train-shard-000000"),
        ("/x/my set/shard-{0..3}.tar", "my_set-shard-_0..3"),
        ("s3://bucket/sets/train", "sets-train"),
        (".", "-".join(Path.cwd().parts[-2:])),
    ):
        assert default_output([path]) == f"outputs/{name}-doctor.html"
