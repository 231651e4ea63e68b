"""Lists with bars, each as its project's own tool writes it, and where each tool looks for the recordings."""

import csv
import io
from pathlib import Path

import pytest

from tests.helpers.corpus_items import items_of, write_tone
from titan_tts.prepare.formats import open_corpus
from titan_tts.prepare.settings import Options
from torchtitan.models.dit_tts.errors import InputError

A, B, C, D = 'He said, "one|two".', "Three, four.", '"Five" is a word', "six"
TEXTS = (A, B, C, D)


def csv_writer(*rows) -> str:
    """As Piper's recording studio, and pandas with sep="|", quote."""
    out = io.StringIO(newline="")
    csv.writer(out, delimiter="|").writerows(rows)
    return out.getvalue()


def plain(*rows) -> str:
    return "".join("|".join(row) + "\n" for row in rows)


PLAIN = ("one and two", B, C, D)


def rows(path, texts, speakers=(), language=()):
    for number, text in enumerate(texts):
        yield [path.format(number), *speakers[number : number + 1], *language, text]


# Peer -> (its list, whose {root} is the folder of the test; its content; the files that are there; and of each row the
# text and the speaker).
ONE, TWO = ["LJSpeech"] * 4, ["ann", "ann", "bob", "bob"]
HEADER = ["audio_file", "text"]
PEERS = {
    "F5-TTS, README: a header, absolute paths": (
        "metadata.csv", csv_writer(HEADER, *rows("{{root}}/clips/{}.wav", TEXTS)), "clips/{}.wav", TEXTS, ONE,
    ),
    "F5-TTS, prepare_csv_wavs: a header, relative paths, a byte-order mark": (
        "metadata.csv", "\ufeff" + csv_writer(HEADER, *rows("wavs/{}.wav", TEXTS)), "wavs/{}.wav", TEXTS, ONE,
    ),
    "F5-TTS, its page: names of segments": (
        "metadata.csv", "\ufeff" + plain(*rows("segment_{}", PLAIN)), "wavs/segment_{}.wav", PLAIN, ONE,
    ),
    "Piper, recording studio: paths in wav/": (
        "metadata.csv", csv_writer(*rows("en-US/{}.wav", TEXTS)), "wav/en-US/{}.wav", TEXTS, ONE,
    ),
    "Piper, several speakers": (
        "metadata.csv", csv_writer(*rows("{}", TEXTS, TWO)), "wavs/{}.wav", TEXTS, TWO,
    ),
    "Matcha-TTS and VITS: a list of paths from the project's folder": (
        "data/lists/train.txt", plain(*rows("data/LJ/wavs/{}.wav", PLAIN)), "data/LJ/wavs/{}.wav", PLAIN, ["given"] * 4,
    ),
    "Matcha-TTS, several speakers": (
        "lists/train.txt", plain(*rows("{{root}}/vctk/{}.wav", PLAIN, "0120")), "vctk/{}.wav", PLAIN, [*"0120"],
    ),
    "GPT-SoVITS: no line break at the end": (
        "output/asr_opt/ann.list", plain(*rows("output/slicer/{}.wav", PLAIN, TWO, ["EN"]))[:-1], "output/slicer/{}.wav",
        PLAIN, TWO,
    ),
    "LJSpeech: what is quoted are letters": (
        "metadata.csv",
        plain(["0", "Mr. 1", '"One," he said'], ["1", "2", '"All of it."'], ["2", B, B], ["3", D, ""]),
        "wavs/{}.wav", ('"One," he said', '"All of it."', B, D), ONE,
    ),
    "columns by name, in another order": (
        "metadata.csv", csv_writer(["id", "speaker", "transcription"], *rows("{}", TEXTS, TWO)), "wav/{}.wav", TEXTS, TWO,
    ),
}  # fmt: skip


@pytest.mark.parametrize("peer", PEERS)
def test_a_list_as_its_project_writes_it(peer, tmp_path):
    path, content, files, texts, speakers = PEERS[peer]
    wanted = [tmp_path / files.format(number) for number in range(4)]
    for each in wanted:
        write_tone(each)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_bytes(content.replace("{root}", str(tmp_path)).encode())
    is_folder = path == "metadata.csv"
    source = tmp_path if is_folder else tmp_path / path
    items = items_of(source, speaker="" if is_folder else "given")
    if speakers == ONE:  # an option goes before the folder's one speaker
        assert items_of(source, speaker_pattern="(.)")[0].speaker == items[0].id[0]
    assert [(item.text, item.speaker) for item in items] == list(zip(texts, speakers))
    root = Path(open_corpus(Options(str(source), "")).root)
    assert [root / item.audio["file"] for item in items] == wanted
    assert len({item.id for item in items}) == 4


def test_what_no_list_says_is_asked_for(tmp_path):
    for name in range(4):
        write_tone(tmp_path / f"wavs/{name}.wav")
    # StyleTTS2: the speaker comes last.
    last = [[f"{name}.wav", text, str(name % 2)] for name, text in enumerate(PLAIN)]
    (tmp_path / "metadata.csv").write_text(plain(*last))
    with pytest.raises(InputError, match="first line with the names of the columns"):
        items_of(tmp_path)
    (tmp_path / "metadata.csv").write_text("audio|text|speaker\n" + plain(*last))
    assert [item.speaker for item in items_of(tmp_path)] == ["0", "1", "0", "1"]
    (tmp_path / "list.txt").write_text(plain(*[row[:2] for row in last]))
    with pytest.raises(InputError, match="--speaker NAME"):
        items_of(tmp_path / "list.txt")
