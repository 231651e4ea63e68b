"""evaluation.html: the figures of evaluation.json, the worst utterances, and hostile texts."""

import base64
import html
import io
import json
import re

import pytest
import soundfile

from tests.helpers import sampled_run
from tests.helpers.duration_recognizer import SPEAKER_SPEC, SPEC
from tests.helpers.evaluated_run import (
    RATE,
    SCRIPT,
    UTTERANCES,
    evaluate,
    frames_of,
    set_up,
    write_tree,
)
from tests.helpers.pages import check_offline, table
from titan_tts.evaluate.page import comparison_page, marks
from torchtitan.models.dit_tts.speech.scoring.word_errors import count_errors

HEADS = {"wer": "WER", "cer": "CER", "speaker_similarity": "speaker similarity"}
HEADS |= {"duration_error": "duration error", "pitch": "F0 (Hz)"}
HEADS |= {"pitch_range": "F0 range (semitones)"}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, shards):
    """Two steps compared, on a tree with a hostile text; three utterances on the page. Of the seeds the second is worse."""
    folder = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_up(monkeypatch, sampled_run.make_run(folder, shards))
        arguments = ["--test", write_tree(folder / "tree"), "--recognizer", SPEC, "--on-page=3"]
        arguments += ["--seed=3", "--speaker-scorer", SPEAKER_SPEC]
        assert evaluate(folder / "a@5", folder / "a@7", *arguments, "--out", folder / "out") == 0
    return folder / "out"


def test_the_worst_are_first_and_nothing_breaks_out(evaluated):
    page = (evaluated / "evaluation.html").read_text()
    shown = [html.unescape(text) for text in re.findall(r"<article>\s*<h3>(.*?)</h3>", page)]
    wanted = [UTTERANCES[number][1] for number in (3, 1, 0)]  # 3 is never heard right
    assert sorted(shown) == sorted(wanted) and SCRIPT in shown[0]
    for words in ("3 of 5", "2 more in wavs/", "5 utterances of", "2 noise seeds each"):
        assert words in page
    assert SCRIPT not in page and "<img src=x" not in page
    check_offline(page)


def test_each_panel_plays_what_it_names(evaluated):
    """Recordings have their own rate; systems the codec's, and the length of what they say."""
    page = (evaluated / "evaluation.html").read_text()
    (one,) = (part for part in page.split("<article>") if "1887" in html.unescape(part[:400]))
    labels = re.findall(r"<div><b>(.*?)</b>", one)
    assert labels == ["reference", "recordings", "codec", "a@5", "a@7"]
    sounds = [
        soundfile.info(io.BytesIO(base64.b64decode(content)))
        for content in re.findall(r'src="data:audio/flac;base64,(.*?)"', one)
    ]
    assert [sound.samplerate for sound in sounds] == [24_000, 24_000, RATE, RATE, RATE]
    # Seed 4, with more errors, is shown: step 5 says the next utterance then.
    lengths = [round(25 * sound.duration) for sound in sounds]
    assert lengths[1:] == [frames_of(0), frames_of(0), frames_of(1), frames_of(0)]
    assert one.count("data:image/png;base64,") == 5 and "seed 4" in one
    # Under each sound its own scores: step 5 with that seed, and not with the other one, errs.
    wrong = re.findall(r'class="badge (\w+)">(\d+) errors? in', one)
    assert [kind for kind, _ in wrong] == ["good", "good", "error", "good"]
    assert all((kind == "error") == (count != "0") for kind, count in wrong)
    assert one.count("similarity ") == 4
    widths = [float(each) for each in re.findall(r'style="width: ([\d.]+)%"', one)]
    assert widths == pytest.approx([100 * n / max(lengths) for n in lengths], abs=1e-3)


def test_a_comparison_plays_the_texts_with_most_errors_first(evaluated, tmp_path):
    """The page of a fine-tune adds both systems' errors with the first seed. Nothing of the hostile text is heard right."""
    content = comparison_page("t", {"new": evaluated}).html()
    shown = [html.unescape(text) for text in re.findall(r"<article>\s*<h3>(.*?)</h3>", content)]
    found = json.loads((evaluated / "evaluation.json").read_text())["utterances"]
    errors = {
        row["text"]: sum(row["scores"][name][0]["word_errors"] for name in ("a@5", "a@7"))
        for row in found
    }
    assert len(shown) == 5 and [errors[text] for text in shown] == sorted(errors.values())[::-1]
    assert errors[shown[0]] > 0 and SCRIPT in shown[0]
    # What was heard stands at each sound and recording; recordings of other words come first.
    heard = [
        len(re.findall(r'class="badge \w+">\d+ errors? in', one))
        for one in content.split("<article>")
    ]
    assert heard == [0] + [2] * 5 and content.count("heard in the recording: ") == 5
    changed, copy = json.loads((evaluated / "evaluation.json").read_text()), tmp_path / "copy"
    for row in changed["utterances"]:
        recorded, is_last = row["scores"]["recordings"][0], row["text"] == shown[-1]
        recorded |= {"word_errors": recorded["words"] * is_last}
        recorded |= {"heard": "<b>no"} if is_last else {}
        row["scores"]["a@5"][0]["compared"] = ["grey", "grey"]
    copy.mkdir()
    (copy / "wavs").symlink_to(evaluated / "wavs")
    (copy / "evaluation.json").write_text(json.dumps(changed))
    content = comparison_page("t", {"new": copy}).html()
    again = [html.unescape(text) for text in re.findall(r"<article>\s*<h3>(.*?)</h3>", content)]
    assert again == [shown[-1], *shown[:-1]] and len(re.findall(r"\bgrey\b", content)) == 5
    assert "heard in the recording: &quot;&lt;b&gt;no&quot;" in content.replace("&#34;", "&quot;")


def test_wrong_words_are_marked():
    """Marks exactly the words that count as errors, not other spellings of numbers or of a checkpoint."""
    spelling = {"grey": "gray"}

    def found(text, heard, language=""):
        return marks(count_errors(text, heard, language, spelling).compared)

    said = found("Mr. Brown paid $23 now.", "mister brown said twenty three dollars right now")
    assert ("said", "wrong", "paid") in said and ("right", "extra", "") in said
    assert [word for word, kind, _ in said if kind == "right"][:2] == ["mister", "brown"]
    assert {kind for _, kind, _ in found("Fifty grey cats.", "50 gray cats")} == {"right"}
    assert found("one two three", "one three")[1] == ("2", "missing", "")
    assert found("rot", "um rot", "de")[0] == ("um", "extra", "") and len(found("a", "um a")) == 1
    assert found("...", "well") == [("well", "extra", "")] and found("one", "")[0][1] == "missing"


def test_the_figures_are_those_of_the_json(evaluated):
    page = (evaluated / "evaluation.html").read_text()
    found = json.loads((evaluated / "evaluation.json").read_text())
    head, *rows = table(page, "WER")
    assert head[1:] == [*HEADS.values(), "real-time factor"]
    figures = {row["name"]: row["figures"] for row in found["rows"]}
    assert [row[0] for row in rows] == ["recordings", "codec", "a@5", "a@7"] == [*figures]
    for name, *cells in rows:
        shown = dict(zip(HEADS, (cell.split(" | ")[0] for cell in cells), strict=False))
        for figure in ("wer", "cer"):
            wanted = round(100 * figures[name][figure]["value"], 1)
            assert float(shown[figure].removesuffix(" %")) == wanted
        assert (shown["duration_error"] == "-") is (name in ("recordings", "codec"))
    wer = {row: each["wer"]["value"] for row, each in figures.items()}
    assert wer["a@5"] > wer["a@7"] == wer["codec"] == wer["recordings"]
    differences = {row[1]: row[2:] for row in table(page, "difference")[1:]}
    assert differences["WER"][0] == f"{100 * (wer['a@5'] - wer['a@7']):+.1f} %"
