"""Published test lists: what is wrong with a line or a file."""

from tests.helpers.sentences import refused
from titan_tts.evaluate.prompts import is_list, read_list


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


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
