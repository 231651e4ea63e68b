"""The card of an exported model: its sizes, data and voices."""

import pytest

from tests.helpers.exported_run import export
from titan_tts.export.exporter import whose_voices
from titan_tts.speak.load_run import load_run
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.data.shard_writer import write_shard

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed")]


def test_the_card_has_the_runs_sizes_and_places_to_fill_in(trained, tmp_path):
    card = (export(trained, tmp_path / "one") / exported.CARD).read_text()
    parameters = sum(p.numel() for p in load_run(trained).model.parameters())
    for row in (
        'pip install "$(ls dist/titan_tts-*.whl)[speech]"\ntitan-tts generate one --reference voice.wav --text "..."',
        f"| parameters | {parameters:,} |",
        "| weights | ema:0.999 |",
        "| training data | 0.0 h in 42 utterances |",
        "| voices | of its 4 speakers: 's0', 's1', 's2', 's3'; too few",
        "| conditioning tokens | speaker |",
        "license: unknown",
    ):
        assert row in card, row
    # Of another step, with a voice of other shards: 150 utterances of 24 s, 1 h.
    samples = make_samples(150, channels=8, frames=lambda _: 600)
    for number, sample in enumerate(samples):
        sample.metadata.update(speaker=f"s{number}", language=("en", "de")[number % 2])
    write_shard(tmp_path / "new.tar", samples)
    other = ["--step=1", f"--data={tmp_path / 'new.tar'}", "--voices=s9", "--license=mit"]
    card = (export(trained, tmp_path / "two", *other) / exported.CARD).read_text()
    for row in (
        "license: mit",
        "generate two --speaker s9 --text",
        "| training steps | 1 |",
        "| training data | 1.0 h in 150 utterances |",
        "| languages | 'de', 'en' |",
        "| voices | of its 150 speakers: 's0', 's1', 's10'",
        "others from a reference",
    ):
        assert row in card, row
    assert "name no speakers" in whose_voices([])
