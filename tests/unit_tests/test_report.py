"""The one page: what a browser, a terminal and a program get of the same parts."""

import base64
import io
import json
import re

import pytest
import torch
from matplotlib.image import imread

from tests.helpers.pages import check_offline, table
from titan_tts.report.page import (
    Audio,
    Cell,
    Details,
    Figure,
    Note,
    Page,
    Section,
    Sound,
    Table,
    check_page,
)
from titan_tts.report.sound import with_spectrograms
from titan_tts.report.words import number, size_text
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.scoring.interface import Sound as Waveform

EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)> & $x$"


def words_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.split("\n")]


def test_everything_that_a_part_is_given_is_escaped(tmp_path):
    sound = Sound(EVIL, 1.0, "data:audio/flac;base64,AA==", "data:image/png;base64,AA==", 50.0)
    sound = Sound(**vars(sound) | dict(verdict=EVIL, words=[(EVIL, "wrong", EVIL)], note=EVIL))
    parts = [
        EVIL,
        Note(EVIL),
        Table([EVIL, "b"], [[EVIL, Cell(EVIL, EVIL, "error")]], EVIL, sortable=True),
        Figure(EVIL, '<svg width="360pt"></svg>'),
        Audio(EVIL, EVIL, [sound]),
        Section(EVIL, [Details(EVIL, [EVIL], EVIL, "error", EVIL)]),
    ]
    page = Page(EVIL, parts, {EVIL: EVIL}, EVIL, "error", EVIL, [EVIL], generator="g")
    content = page.html()
    check_offline(content)
    assert "<img src=x" not in content and "alert(1)</script>" not in content
    # In attributes, too, quotes end nothing: every player and picture has its whole label.
    labels = re.findall(r'(?:aria-label|alt|title)="([^"]*)"', content)
    assert len(labels) == 5 and all("&lt;script&gt;" in each for each in labels)
    path = tmp_path / "page.html"
    assert Page("half a pair \ud800", []).write(path) == path.stat().st_size
    assert r"half a pair \ud800" in path.read_text()


def test_the_quieter_sound_has_the_darker_picture():
    """Spectrograms beside each other share the scale of the louder one."""
    noise = torch.randn(8000, generator=torch.Generator().manual_seed(0))
    sounds = with_spectrograms([(str(gain), Waveform(gain * noise, 8000)) for gain in (0.01, 0.5)])
    pictures = [sound.picture.split(",")[1] for sound in sounds]
    quiet, loud = (imread(io.BytesIO(base64.b64decode(each)))[..., :3] for each in pictures)
    assert quiet.mean() < 0.5 * loud.mean()


def test_many_rows_are_bounded_and_said():
    rows = [(f"r{n}", str(n)) for n in range(1010)]
    page = Page("t", [Table(("name", "n"), rows, rest="in summary.csv")])
    assert len(table(page.html(), "name")) == 1 + 1000
    assert "10 more in summary.csv." in page.html()
    assert words_of(page.text())[-2:] == ["r19 19", "990 more in summary.csv"]
    part = Page("t", [Table((), rows[:3], left=(0, 1), rest="like these", total=5, on_terminal=2)])
    assert "2 more like these" in part.html() and "3 more like these" in part.text()
    assert "more" not in Page("t", [Table(("name", "n"), rows[:20])]).text()


def test_a_terminal_gets_the_same_without_what_only_a_browser_can_show():
    inner = [Note("small print"), Table(("a", "b"), [["x", Cell("1", "0 to 2")]])]
    parts = [
        Section("First", inner),
        Section("Unseen", ["words"], on_terminal=False),
        Section("Empty", []),
        Details("Worst", ["advice"], "error", "error", "1,000"),
        Figure("Lengths", "<svg></svg>"),
        Table(("c",), [["y"]], on_terminal=0),
    ]
    page = Page("Title", parts, {"runs": "3"}, "healthy", "good", "All was read.")
    expected = (
        "Title|healthy: All was read.||runs 3||First|a b|x 1 (0 to 2)|error 1,000 Worst|advice"
    )
    assert words_of(page.text()) == expected.split("|")
    content = page.html()
    assert "small print" in content and "words" in content and "<h2>Empty" not in content
    assert table(content, "a") == [["a", "b"], ["x", "1 | 0 to 2"]]
    assert content.count('scope="col"') == 3 and content.count('scope="row"') == 2


def test_json_is_strict_and_safe_on_a_terminal():
    said = Page("", [], data={"a": "王\x9b[2J\ud800", "b": None}).json()
    assert json.loads(said) == {"a": "王\x9b[2J\ud800", "b": None}
    assert "王" in said and "\x9b" not in said and said.encode()
    with pytest.raises(ValueError):
        Page("", [], data={"a": float("nan")}).json()


def test_a_page_replaces_pages_of_its_own_command_only(tmp_path):
    path = tmp_path / "page.html"
    Page("t", [], generator="titan-tts one").write(path)
    check_page(path, "--out", "titan-tts one")
    with pytest.raises(InputError, match="is not a page of titan-tts two"):
        check_page(path, "--out", "titan-tts two")


def test_numbers_as_people_read_them():
    sizes = {999: "999 bytes", 1000: "1 kB", 1_234_567: "1.23 MB", 5e9: "5 GB", 2e15: "2e+03 TB"}
    assert {size: size_text(size) for size in sizes} == sizes
    numbers = {None: "-", 12345.0: "12,345", 1234.4: "1,234", 999.96: "1000", 0.123456: "0.1235"}
    assert {value: number(value) for value in numbers} == numbers
