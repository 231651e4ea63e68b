"""evaluation.html: the figures of evaluation.json, the worst utterances, and hostile texts."""

import base64
import html
import io
import json
import re

import pytest
import soundfile

from tests.helpers.browser import dom_after_scripts, screenshot
from tests.helpers.duration_recognizer import SPEC
from tests.helpers.evaluated_run import SCRIPT, UTTERANCES, evaluate, frames_of, set_up, write_tree
from titan_tts.evaluate.page import marks
from titan_tts.evaluate.report import limits, number


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, shards):
    """Two steps compared, on a tree with a hostile text; three utterances on the page."""
    from tests.helpers import sampled_run

    folder = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_up(monkeypatch, sampled_run.make_run(folder, shards))
        arguments = ["--test", write_tree(folder / "tree"), "--recognizer", SPEC, "--on-page=3"]
        assert evaluate(folder / "a@5", folder / "a@7", *arguments, "--out", folder / "out") == 0
    return folder / "out"


def test_the_worst_are_first_and_the_rest_is_counted(evaluated):
    page = (evaluated / "evaluation.html").read_text()
    shown = re.findall(r"<h3>(.*?)</h3>", page)
    wanted = [UTTERANCES[number][1] for number in (3, 1, 0)]  # 3 is never heard right
    assert sorted(map(html.unescape, shown)) == sorted(wanted) and SCRIPT in html.unescape(shown[0])
    assert "3 of 5" in page and "2 more in wavs/" in page
    assert "5 utterances of" in page and "2 noise seeds each" in page


def test_nothing_breaks_out_and_nothing_is_loaded(evaluated):
    page = (evaluated / "evaluation.html").read_text()
    assert SCRIPT not in page and "<img src=x" not in page and "<b>lengths</b>" not in page
    assert page.count("<script>") == 1
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?\s*(https?:)?//""", page)


def test_each_panel_plays_what_it_names(evaluated):
    """Recordings have their own rate; systems the codec's, and the length of what they say."""
    page = (evaluated / "evaluation.html").read_text()
    (one,) = (part for part in page.split("<section>") if "1887" in html.unescape(part[:400]))
    labels = re.findall(r"<header><b>(.*?)</b>", one)
    assert labels == ["reference", "recording", "codec", "a@5", "a@7"]
    sounds = [
        soundfile.info(io.BytesIO(base64.b64decode(content)))
        for content in re.findall(r'src="data:audio/flac;base64,(.*?)"', one)
    ]
    assert [sound.samplerate for sound in sounds] == [24_000, 24_000, 1000, 1000, 1000]
    # Seed 0, with more errors, is shown: step 5 says the next utterance then.
    lengths = [round(25 * sound.duration) for sound in sounds]
    assert lengths[1:] == [frames_of(0), frames_of(0), frames_of(1), frames_of(0)]
    assert one.count("data:image/png;base64,") == 5 and "seed 0" in one


def test_wrong_words_are_marked():
    text, heard = "Mr. Brown paid $23 now.", "mister brown said twenty three dollars right now"
    found = marks(text, heard)
    assert ("said", "wrong", "paid") in found and ("right", "extra", "") in found
    assert [word for word, kind, _ in found if kind == "right"][:2] == ["mister", "brown"]
    assert marks("one two three", "one three")[1] == ("2", "missing", "")
    assert marks("...", "well") == [("well", "extra", "")] and marks("one", "")[0][1] == "missing"


@pytest.mark.long
def test_the_page_in_a_browser(evaluated, tmp_path):
    """Its scripts run, its title is its own, its figures are those of the JSON."""
    dom = dom_after_scripts(evaluated / "evaluation.html", tmp_path / "profile")
    found = json.loads((evaluated / "evaluation.json").read_text())
    assert "<title>Evaluation of a@5, a@7</title>" in dom
    cells = re.findall(
        r'<td data-figure="(\w+)" data-row="(.*?)">\s*<b>(.*?)</b><small>(.*?)</small>', dom, re.S
    )
    rows = {row["name"]: row["figures"] for row in found["rows"]}
    assert len(cells) == 3 * 4  # WER, CER and duration error of recordings, codec and two systems
    for figure, row, value, interval in cells:
        wanted = rows[row][figure]
        assert value == number(figure, wanted and wanted["value"])
        assert interval.replace("&nbsp;", "") == limits(figure, wanted)
    wer = {row: figures["wer"]["value"] for row, figures in rows.items()}
    assert wer["a@5"] > wer["a@7"] == wer["codec"] == wer["recordings"]
    (difference,) = re.findall(r'data-difference="wer">(.*?)<', dom)
    assert difference == number("wer", wer["a@5"] - wer["a@7"], signed=True)
    assert dom.count("<audio") == 3 * 5


@pytest.mark.long
def test_the_page_is_drawn(evaluated, tmp_path):
    from matplotlib.image import imread

    picture = tmp_path / "page.png"
    screenshot(evaluated / "evaluation.html", tmp_path / "profile", picture, 1200, 1800)
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (1800, 1200) and pixels.std() > 0.05
    # Spectrograms: dark or colourful, unlike the rest of the page.
    assert (pixels.max(-1) < 0.2).mean() > 0.01
