"""`titan-tts finetune --only annotated`: which rows it takes; complete runs are in tests/integration_tests."""

import json

import numpy as np

from tests.helpers.collected import write_list
from titan_tts.annotate.segments import load_audio, read_segments
from titan_tts.cli import main
from titan_tts.finetune_command import write_annotated_only
from titan_tts.prepare.audio_reader import Loader
from titan_tts.prepare.formats.manifest import Manifest
from titan_tts.prepare.settings import Options


def test_annotated_rows_keep_their_keys_audio_and_references(tmp_path):
    path = write_list(tmp_path, 4, reference=["3.wav"])
    rows = list(map(json.loads, path.read_text().splitlines()))
    del rows[2]["key"]  # its path is its key
    for number, given in ((0, True), (1, False), (2, True)):
        rows[number]["annotated"] = given
    rows[2] |= {"offset": 0.1, "duration": 0.2, "audio_filepath": rows[2].pop("audio")}
    del rows[3]["reference"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = write_annotated_only(str(path), tmp_path / "elsewhere")
    first, second = Manifest(Options(str(out), "", speaker="x")).items()
    assert (first.key, second.key) == ("k0", "2-00000100") and second.text == "text 2"
    source = read_segments(path)
    for item in (first, second):
        loaded = Loader(str(out.parent))
        assert np.array_equal(
            loaded.load(item.audio, 0).samples, load_audio(path, source[item.key]).samples
        )
        [reference] = loaded.references(item.audio)
        assert len(reference.samples) == 8000


def test_a_list_without_annotations_is_refused_before_anything_runs(tmp_path, capsys):
    path = write_list(tmp_path, 2)
    for given in (path, tmp_path):
        arguments = ["finetune", str(tmp_path / "base"), str(given), str(tmp_path / "out")]
        assert main([*arguments, "--only", "annotated"]) == 2
    said = capsys.readouterr().err
    assert 'has no row with "annotated": true' in said and "is no .jsonl file" in said
    assert not (tmp_path / "out").exists()
