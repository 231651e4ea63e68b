"""The card of an exported model: figures of its own run, voices, and what is to be installed."""

import json
from dataclasses import asdict

import pytest

from tests.helpers.exported_run import export
from titan_tts.export import model_card
from titan_tts.speak.load_run import load_run
from tools.harness.synthetic import make_samples
from torchtitan.models.dit_tts.config import exported
from torchtitan.models.dit_tts.config.manager import load_run_config
from torchtitan.models.dit_tts.data.shard_writer import write_shard

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed")]


def test_the_card_has_the_runs_figures_and_places_to_fill_in(trained, tmp_path, monkeypatch):
    def at_a_frame_per_100_seconds(*given):
        loaded = load_run(*given)
        loaded.config.data.frames_per_second = 0.01
        return loaded

    wer = {"value": 0.021, "low": 0.0, "high": 0.06}
    sampling = asdict(load_run_config(trained).sampling)
    row = {"step": 2, "weights": "raw", "run": "moved/run", "figures": {"wer": wer}}
    row["sampling"] = sampling | {"codec": "gone"}
    other = {"figures": {"wer": wer | {"value": 0.5}}}  # of other runs, steps and settings
    others = [{"run": "b"}, {"step": 1}, {"sampling": sampling | {"steps": 1}}]
    report = {
        "test": {"source": "/secret/place/heldout", "utterances": 9, "is_training_data": False},
        "scorers": {"recognizer": "the referee"},
        "rows": [{"name": "codec", "figures": {}}, row, *(row | other | each for each in others)],
    }
    train = {"source": "/secret/place/train", "utterances": 9, "is_training_data": True}
    of_train = json.dumps(report | {"test": train})
    for name, content in (("2", json.dumps(report)), ("3", of_train), ("broken", "{")):
        path = trained / "evaluation" / name / "evaluation.json"
        path.parent.mkdir(parents=True)
        path.write_text(content)
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
    assert "word errors" not in card and "license: unknown" in card
    voices = ["--voices=s1", "--voices=s0"]
    folder = export(trained, tmp_path / "two", "--weights=raw", "--license=mit", *voices)
    card = (folder / exported.CARD).read_text()
    assert "license: mit" in card
    errors = "2.1% (0.0% to 6.0%), 9 utterances, heard by the referee"
    assert f"| word errors on `place/heldout` | {errors} |" in card and "secret" not in card
    assert card.count("word errors") == 1
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
