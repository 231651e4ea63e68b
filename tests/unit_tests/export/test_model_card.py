"""The card of an exported model: its sizes, data and voices."""

import pytest

from tests.helpers.exported_run import export
from titan_tts.export import model_card
from titan_tts.speak.load_run import load_run
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.data.shard_writer import write_shard

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed")]


def test_the_card_has_the_runs_sizes_and_places_to_fill_in(trained, tmp_path, monkeypatch):
    def at_a_frame_per_100_seconds(*given):
        loaded = load_run(*given)
        loaded.config.data.frames_per_second = 0.01
        return loaded

    card = (export(trained, tmp_path / "one") / exported.CARD).read_text()
    parameters = sum(p.numel() for p in load_run(trained).model.parameters())
    for row in (
        'generate one --reference voice.wav --text "..."',
        f"| parameters | {parameters:,} |",
        "| weights | ema:0.999 |",
        "| training data | 0.0 h in 42 utterances |",
        "| voices | of its 4 speakers: 's0', 's1', 's2', 's3'; too few",
        "| conditioning tokens | speaker |",
    ):
        assert row in card, row
    assert "license: unknown" in card
    voices = ["--voices=s1", "--voices=s0"]
    folder = export(trained, tmp_path / "two", "--weights=raw", "--license=mit", *voices)
    card = (folder / exported.CARD).read_text()
    assert "license: mit" in card
    assert "generate two --speaker s1 --text" in card
    # Of another step, with a voice of other shards: 16 utterances of an hour each.
    samples = make_samples(16, channels=8, frames=lambda _: 36)
    for number, sample in enumerate(samples):
        sample.metadata.update(speaker="s9", language=("en", "de")[number % 2])
    write_shard(tmp_path / "new.tar", samples)
    other = ["--step=1", f"--data={tmp_path / 'new.tar'}", "--voices=s9"]
    monkeypatch.setattr("titan_tts.export.exporter.load_run", at_a_frame_per_100_seconds)
    card = (export(trained, tmp_path / "three", *other) / exported.CARD).read_text()
    assert "| training steps | 1 |" in card
    assert "| training data | 16.0 h in 16 utterances |" in card
    assert "| languages | 'de', 'en' |" in card


def test_what_the_card_says_of_voices():
    many = model_card.voices([f"s{n}" for n in range(150)])
    assert many.startswith("of its 150 speakers: 's0', 's1', 's10'")
    assert many.endswith("others from a reference")
    assert "name no speakers" in model_card.voices([])
