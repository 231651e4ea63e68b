"""Published test lists: what a line says, and what is wrong with it."""

from tests.helpers.sentences import refused
from titan_tts.evaluate.prompt_lists import is_list, read_list

SEED = (
    "c1-c2|We asked: why?|prompt-wavs/c1.wav|Get the fund.\r\n"
    "\n"
    "c3-c4|他说|prompt-wavs/c3.wav|简单地说|others/c4.wav\n"
)


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_a_list_of_seed_tts_eval(tmp_path):
    touch(tmp_path, "prompt-wavs/c1.wav", "prompt-wavs/c3.wav", "others/c4.wav", "wavs/c1-c2.wav")
    path = tmp_path / "meta.lst"
    path.write_text(SEED, encoding="utf-8-sig")
    assert is_list(str(path))
    first, second = read_list(str(path))
    assert (first.id, first.text, first.speaker) == ("c1-c2", "Get the fund.", "")
    assert (first.reference.text, second.reference.text) == ("We asked: why?", "他说")
    assert first.reference.files == (str(tmp_path / "prompt-wavs/c1.wav"),)
    beside = str(tmp_path / "wavs/c1-c2.wav")  # next to the list, by its name
    assert first.audio == {"file": beside}
    assert (second.text, second.audio["file"]) == ("简单地说", str(tmp_path / "others/c4.wav"))
    (tmp_path / "wavs/c1-c2.wav").unlink()
    assert read_list(str(path))[0].audio == {}


def test_other_lines_and_files_are_refused(tmp_path):
    touch(tmp_path, "p.wav")
    path = tmp_path / "list.lst"
    for line, sentence in (
        ("a|b|p.wav", "is 'a|b|p.wav', but name|prompt text"),
        ("a||p.wav|", "is"),
        ("a|b|p.wav|t|p.wav|c", "is"),
        ("a|b|gone.wav|t", "gone.wav does not exist"),
        ("a|b|p.wav|t|gone.wav", "gone.wav does not exist"),
    ):
        path.write_text("\n" + line)
        refused(lambda: read_list(str(path)), "list.lst line 2: ", sentence)
    for content in (b"audio,text\na.wav,b\n", b"RIFF\xff\xfe|||\x00", b""):
        path.write_bytes(content)
        assert not is_list(str(path)), content
    assert not is_list(str(tmp_path)) and not is_list("/nowhere")
    refused(lambda: read_list(str(path)), "is empty")
    refused(lambda: read_list("/nowhere"), "cannot be read")
