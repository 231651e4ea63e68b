"""Systems under evaluation: their checkpoints, and how they synthesize each prompt."""

from pathlib import Path
from types import SimpleNamespace

import torch

from tests.helpers.row_model import CHANNELS
from tests.helpers.sentences import refused
from titan_tts.evaluate.evaluate import find_systems, speak, untrained_tokens
from titan_tts.evaluate.options import Options
from titan_tts.evaluate.prompts import Prompt
from titan_tts.records.utterance import Reference
from titan_tts.speak import open_run
from titan_tts.speak.utterance import Utterance, Voice
from torchtitan.models.dit_tts.config import manager
from torchtitan.models.dit_tts.run import checkpoint_storage
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary


def test_each_prompt_is_said_in_its_voice(synthesizer):
    """As from Python, in several batches; duration tokens have the estimated length, not the recording's."""
    prompts, same = [], []
    for number in range(7):
        text = ("one two one", "two", "one")[number % 3]
        speaker = ("ann", "", "bob")[
            number // 3
        ]  # the text of a reference counts where none is known
        voice = torch.full((number % 4 * 4, CHANNELS), float(number)) if number % 4 else None
        reference, labels = Reference((), "one"), {"speaker": speaker} if speaker else {}
        given = text, speaker, labels | {"target_duration": 99.0}, {}, reference
        prompts.append(Prompt(str(number), *given, voice=voice))
        same.append(Utterance(text, Voice(voice, speaker, reference.text), labels))
    spoken = dict(speak(synthesizer, prompts, 5, batch_size=4))
    for number, wanted in enumerate(synthesizer.synthesize(same, seed=5)):
        torch.testing.assert_close(spoken[number].waveform, wanted.waveform, atol=1e-5, rtol=0)
    other = dict(speak(synthesizer, prompts, 6, batch_size=4))
    assert not torch.equal(other[0].waveform, spoken[0].waveform)


def test_which_run_and_step(tmp_path, loaded, monkeypatch):
    for place, name, replacement in (
        (manager, "load_run_config", lambda folder, args=(): loaded.config),
        (open_run, "find_folder", Path),
        (open_run, "checkpoint_steps", lambda folder: [100, 2000]),
        (open_run, "best_row", lambda *arguments: {"step": 100}),
        (checkpoint_storage, "read_table", lambda path: SimpleNamespace(state_dict_metadata=())),
        (open_run, "saved_prefixes", lambda table: ["decay-0.9."]),
    ):
        monkeypatch.setattr(place, name, replacement)

    def found(*texts: str, step=None, weights: str = "") -> dict[str, tuple]:
        first, *more = texts
        options = Options(run=first, more=tuple(more), test="", step=step, weights=weights)
        return {n: (str(r.folder), r.step, r.weights) for n, r in find_systems(options).items()}

    assert found("o/a") == {"a@2000": ("o/a", 2000, "")}
    assert found("o/a/", step=100, weights="raw") == {"a@100": ("o/a", 100, "raw")}
    (tmp_path / "x@7").mkdir()
    assert [*found(str(tmp_path / "x@7"))] == ["x@7@2000"]
    assert found("o/a@best:raw") == {"a@100": ("o/a", 100, "raw")}
    for texts, weights, names in (
        # The best step has the weights that it was measured with.
        (["o/a", "o/a@best", "p/b"], "", ["a@2000", "a@100:ema", "b@2000"]),
        (["o/a", "p/a"], "", ["o/a@2000", "p/a@2000"]),
        (
            ["a@100:raw", "a@100:ema:0.9", "a@100"],
            "ema",
            ["a@100:raw", "a@100:ema:0.9", "a@100:ema"],
        ),
    ):
        assert [*found(*texts, weights=weights)] == names
    for texts, sentence in (
        (["a@3"], "has no checkpoint step-3; it has steps: 100, 2000"),
        (["a@last"], "has no checkpoint step-last"),
        (["a", "a@2000"], "a: step 2000 is given twice"),
        (["a", "a@100:ema:0.8"], "holds no weights 'ema:0.8'"),
    ):
        refused(lambda texts=texts: found(*texts), sentence)


def test_tokens_that_the_run_was_not_trained_with():
    vocabulary = make_vocabulary("chars", "no", ["speaker"], {"speaker": ["ann"]})
    run = SimpleNamespace(tokenizer=UnitTokenizer(vocabulary))

    def found(*pairs):
        items = [Prompt("k", t, s, {"text": t, "speaker": s}, {}) for t, s in pairs]
        return untrained_tokens(run, items)

    assert found(("no", "ann"), ("on", "ann")) == []
    assert found(("one", "bob"), ("no", "eve")) == [
        "1 characters that the run was not trained with ('e')",
        "2 values of 'speaker' that the run was not trained with ('bob', 'eve')",
    ]
    data = SimpleNamespace(max_caption_tokens=0)
    run.config = SimpleNamespace(data=data)
    given = [Prompt("k", "no", "", {"caption": each}, {}) for each in ("old", "wild", " ", 3)]
    assert untrained_tokens(run, given) == [
        "2 captions that the run was not trained with ('old', 'wild')"
    ]
    data.max_caption_tokens = 9
    assert untrained_tokens(run, given) == []
