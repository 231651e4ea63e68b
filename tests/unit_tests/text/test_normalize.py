"""Numbers, dates, units and abbreviations as words: what is said, and that everything that reads a text reads the same."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.helpers.sentences import refused
from titan_tts.doctor.checks import text_tokens
from titan_tts.doctor.findings import Limits
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.added_tokens import AddedTokens
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import write_shard
from torchtitan.models.dit_tts.text import normalize
from torchtitan.models.dit_tts.text.build_tokenizer import build_tokenizer
from torchtitan.models.dit_tts.text.durations import fit_durations, stored_durations
from torchtitan.models.dit_tts.text.normalize import Normalizer

SAID = """
In 1999, or the 1990s, he paid £9. | In nineteen ninety nine, or the nineteen nineties, he paid nine pounds.
It costs $1,000 and £2.99! | It costs one thousand dollars and two pounds and ninety nine pence!
On March 5, 2021, at 10:30 | On March fifth, twenty twenty one, at ten thirty
The war of 1939-45; pages 10–20 | The war of nineteen thirty nine to forty five; pages ten to twenty
The 1st, 3/4 and 3.14 | The first, three quarters and three point one four
It weighs 5 kg at 12 km/h, 50% of 100m | It weighs five kilograms at twelve kilometers per hour, fifty percent of one hundred metres
Dr. Smith of Elm St. in St. Louis vs. Mr Jones etc. | Doctor Smith of Elm Street in Saint Louis versus Mister Jones et cetera.
See No. 5, a 3D film of a 4x4 | See number five, a three D film of a four by four
Henry VIII and World War I, Rocky IV, then I | Henry the eighth and World War one, Rocky four, then I
Mr. and Mrs. Jones of the 1800s ate 2½ pies | Mister and Missus Jones of the eighteen hundreds ate two and one half pies
Call 555-1234 | Call five five five, one two three four
Born in 1905 with 1,001 [5] "8" | Born in nineteen oh five with one thousand and one [five] "eight"
a@b.com | a at b dot com
5 p.m. The 10th-century café | five PM. The tenth century café
"""

AS_THEY_ARE = [
    "Don't say it isn't so; it's Tom's: NASA's café, \"Yes!\" (no) - well… 'tis true.",
    "  Two  blanks, a\ttab\nand a line  ",
    "I am John. Vitamin C and Plan B.",
    "",
]
WRITTEN = ["Pay £9.", "In 1999", "50% of it", "I go"]
SPOKEN = ["Pay nine pounds.", "In nineteen ninety nine", "fifty percent of it", "I go"]


@pytest.fixture(scope="module")
def english():
    return Normalizer("en")


@pytest.mark.parametrize("line", SAID.strip().splitlines())
def test_what_is_said(english, line):
    written, said = line.split(" | ")
    assert english(written) == said


def test_the_rest_of_a_text_stays(english):
    assert [english(text) for text in AS_THEY_ARE] == AS_THEY_ARE
    added = Normalizer("en", AddedTokens(["[S1]", "(laugh 2)"]))
    assert added("[S1] I am 5 (laugh 2)") == "[S1] I am five (laugh 2)"
    # Counts of tokens are stored by the fingerprint.
    others = Normalizer("zh"), Normalizer("")
    assert len({each.fingerprint for each in (english, added, *others)}) == 4
    assert Normalizer("zh")('我有50个，"引"！') == '我有五十个，"引"！'
    assert Normalizer("ja")("2024年3月5日。") == "二千二十四年三月五日。"


def test_no_text_ends_a_run_and_threads_get_the_same(english):
    texts = [
        "§5",
        "5\ud83d",
        "+5 #5  5",
        "5" * 400,
        "{5}\\6\v7",
        "٥ ５ ⅷ 5\u200d",
        "1/0 1:99 99/99/9999",
    ]
    draw = np.random.default_rng(1)
    signs = list("0123456789 .,:;-/$£€%&@#°'\"()[]abcIVXSt₹é日\u0301")
    texts += ["".join(draw.choice(signs, 30)) for _ in range(40)]
    alone = [english(text) for text in texts]
    assert alone[0] == "§five" and all(isinstance(each, str) for each in alone)
    normalize._reader.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(Normalizer("en"), texts * 2)) == alone * 2


def test_what_cannot_be_said_is_refused(monkeypatch):
    refused(lambda: Normalizer("klingon"), "[encoder] normalize = 'klingon'", "en, zh, ja")
    normalize._reader.cache_clear()
    monkeypatch.setattr(normalize, "find_spec", lambda name: None)
    refused(lambda: Normalizer("en"), "pip install 'titan-tts[speech]'")


def write(path, texts):
    samples = make_samples(
        len(texts), seed=1, channels=8, frames=lambda draw: int(draw.integers(12, 20))
    )
    for sample, text in zip(samples, texts):
        sample.metadata.update(text=text, speaker="s1")
    path.mkdir(parents=True)
    write_shard(path / "000000.tar", samples)
    return str(path)


@pytest.fixture
def pair(tmp_path):
    """Folders of the same speech: with texts as people write them, and with their words."""
    return write(tmp_path / "written", WRITTEN * 4), write(tmp_path / "spoken", SPOKEN * 4)


@pytest.mark.parametrize("model", ["bytes", "chars", "phones:en-us", "subwords:{t5}"])
def test_tokens_and_lengths_are_those_of_the_words(model, pair, tmp_path, checkpoints):
    model, found = model.format_map(checkpoints), []
    for path, language in zip(pair, ("en", "")):
        given = [f"--encoder.model={model}", f"--encoder.normalize={language}"]
        given += ["--data.latent_channels=8", "--model.text_positions=none"]
        config = load_config([f"--data.path={path}", *given])
        config.job.dump_folder = str(tmp_path / (language or "off"))
        found.append((build_tokenizer(config), config, open_dataset(path, 8)))
    (ours, config, dataset), (plain, _, words) = found
    for written, said in zip(WRITTEN, SPOKEN):
        assert ours.spoken(written) == plain.spoken(said)
        assert np.array_equal(ours.spans(written), plain.spans(said))
        assert ours.unknown_characters(written) == plain.unknown_characters(said)
        if model != "chars":  # which keep the ids of the data's own "£" and digits, too
            assert ours.encode(written) == plain.encode(said)
    counts = ours.max_tokens(dataset)
    assert counts.tolist() == plain.max_tokens(words).tolist()
    if "subwords" not in model:  # which the doctor does not count
        limits = Limits(text_unit=model, normalize="en")
        assert text_tokens(dataset, limits).tolist() == counts.tolist()
    fit = fit_durations(dataset, config.encoder)
    (tmp_path / "durations.json").write_text(fit.to_json())
    same = fit_durations(words, load_config([f"--encoder.model={model}"]).encoder)
    assert stored_durations(tmp_path).estimate("In 1999", "s1") == same.estimate(SPOKEN[1], "s1")
