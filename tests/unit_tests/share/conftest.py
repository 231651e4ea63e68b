import json

import pytest

from tests.helpers import speech_corpora as corpora


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """14 recordings of two speakers, two of them held out, in shards of 5 samples."""
    folder = tmp_path_factory.mktemp("share")
    listed = corpora.write_tones(folder / "wavs", [f"utt{n}" for n in range(14)], seconds=0.71)
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"speaker": f"s{number % 2}", "split": "test" if number > 11 else "train"}
        row |= {"language": ("en", "de")[number % 2], "weight": 1.5 - number % 3 / 2}
        row["text_verbatim"] = f"er {row['text']}"
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpora.prepare(listed, folder / "data", samples_per_shard=5)
    return folder / "data"
