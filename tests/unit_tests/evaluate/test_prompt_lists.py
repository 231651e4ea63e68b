"""Published test lists: what a line says, and what is wrong with it."""

from pathlib import Path

from tests.helpers.sentences import refused
from titan_tts.evaluate.prompt_lists import LIBRISPEECH_PC, SEED_TTS, find_list_format, read_list

SEED = (
    "c1-c2|We asked: why?|prompt-wavs/c1.wav|Get the fund.\r\n"
    "\n"
    "c3-c4|他说|prompt-wavs/c3.wav|简单地说|others/c4.wav\n"
)
PC = (
    "61-70968-0000\t4.905\tHe began, and.\t61-70968-0003\t2.6\tThe Five, left!\n"
    "908-31957-0009\t3.1\tI did.\t908-157963-0002\t9.9\tTo fade away.\n"
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
    assert find_list_format(str(path)) == SEED_TTS
    first, second = read_list(str(path), SEED_TTS)
    assert (first.id, first.text, first.speaker) == ("c1-c2", "Get the fund.", "")
    assert (first.reference.text, second.reference.text) == ("We asked: why?", "他说")
    assert first.reference.files == (str(tmp_path / "prompt-wavs/c1.wav"),)
    assert first.audio == {
        "file": str(tmp_path / "wavs/c1-c2.wav")
    }  # next to the list, by its name
    assert (second.text, second.audio["file"]) == ("简单地说", str(tmp_path / "others/c4.wav"))
    (tmp_path / "wavs/c1-c2.wav").unlink()
    assert read_list(str(path), SEED_TTS)[0].audio == {}


def test_a_list_of_librispeech_pc(tmp_path):
    root = tmp_path / "LibriSpeech/test-clean"
    touch(root, "61/70968/61-70968-0000.flac", "61/70968/61-70968-0003.flac")
    touch(root, "908/31957/908-31957-0009.flac")
    path = tmp_path / "cross_sentence.lst"
    path.write_text(PC)
    assert find_list_format(str(path)) == LIBRISPEECH_PC
    first, second = read_list(str(path), LIBRISPEECH_PC, str(root))
    assert (first.id, first.text, first.speaker) == ("61-70968-0003", "The Five, left!", "61")
    assert first.reference.files == (str(root / "61/70968/61-70968-0000.flac"),)
    assert first.audio == {"file": str(root / "61/70968/61-70968-0003.flac")}
    assert (first.reference.text, second.reference.text) == ("He began, and.", "I did.")
    assert second.reference.files[0].endswith("908-31957-0009.flac") and second.audio == {}
    refused(lambda: read_list(str(path), LIBRISPEECH_PC), "--audio-root = '', but for the list")
    Path(first.reference.files[0]).unlink()
    words = "cross_sentence.lst line 1: ", "61-70968-0000.flac does not exist"
    refused(lambda: read_list(str(path), LIBRISPEECH_PC, str(root)), *words)


def test_other_lines_and_files_are_refused(tmp_path):
    touch(tmp_path, "p.wav", "1/2/1-2-3.flac", "1/2/1-2-4.flac")
    path = tmp_path / "list.lst"
    for kind, line, sentence in (
        (SEED_TTS, "a|b|p.wav", "is 'a|b|p.wav', but name|prompt text"),
        (SEED_TTS, "a||p.wav|", "is"),
        (SEED_TTS, "a|b|p.wav|t|gone.wav", "gone.wav does not exist"),
        (LIBRISPEECH_PC, "1-2-3\t1\ta\t1-2-4\t1", "six tab-separated fields"),
        (LIBRISPEECH_PC, "1-2-3\t1\ta\t../../x-2-4\t1\tb", "is"),
    ):
        path.write_text("\n" + line)
        words = "list.lst line 2: ", sentence
        refused(lambda kind=kind: read_list(str(path), kind, str(tmp_path)), *words)
    for content in (
        b"audio,text\na.wav,b\n",
        b"a\tb\tc\td\te\tf\nx\ty\tz\t1\t2\t3\n",
        b"RIFF\xff\xfe|||\x00",
        b"",
    ):
        path.write_bytes(content)
        assert find_list_format(str(path)) is None, content
    assert find_list_format(str(tmp_path)) is None and find_list_format("/nowhere") is None
    refused(lambda: read_list(str(path), SEED_TTS), "is empty")
    refused(lambda: read_list("/nowhere", SEED_TTS), "cannot be read")
