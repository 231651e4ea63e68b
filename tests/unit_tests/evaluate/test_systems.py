"""Systems under evaluation: their checkpoints, and how they synthesize each prompt."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.helpers.row_model import CHANNELS, RowModel, moved
from tests.helpers.sampled_run import SPEAKERS, TOKENIZER
from tests.helpers.sentences import refused
from titan_tts.evaluate.prompts import Prompt
from titan_tts.evaluate.systems import (
    Checkpoint,
    find_checkpoints,
    speak,
    untrained_tokens,
)
from titan_tts.records.utterance import Reference
from titan_tts.speak import open_run
from titan_tts.speak.lengths import Lengths
from titan_tts.speak.synthesizer import Synthesizer
from torchtitan.models.dit_tts.config.job_config import Sampling
from torchtitan.models.dit_tts.run import checkpoint_storage
from torchtitan.models.dit_tts.text.tokenizer import UnitTokenizer
from torchtitan.models.dit_tts.text.vocabulary import make_vocabulary


def prompt(number: int) -> Prompt:
    """One whose text, voice and length are its own; every fourth has no reference, others a long one."""
    reference = torch.full((number % 4 * 4, CHANNELS), float(number))
    return Prompt(
        str(number),
        chr(97 + number) * (1 + number % 3),
        SPEAKERS[number % 2],
        {"speaker": SPEAKERS[number % 2], "target_duration": 99.0},
        {},
        Reference((), "x" * (number % 5)),
        latents=torch.zeros(99, CHANNELS),
        voice=reference if number % 4 else None,
    )


def fitted(text: str, speaker: str, reference_text: str) -> int:
    return 2 + len(text) + 20 * SPEAKERS.index(speaker) + 3 * len(reference_text)


def test_each_prompt_is_said_in_its_voice_for_its_estimated_time(loaded, monkeypatch):
    """In several batches; duration tokens have the estimated length, not the recording's."""
    prompts = [prompt(number) for number in range(9)]
    limit = loaded.config.data.max_speaker_frames

    class Still(RowModel):
        def denoise_guided(self, rows, *args):
            return torch.zeros_like(rows)

    clock = [0.0]
    monkeypatch.setattr("titan_tts.speak.synthesizer.time.perf_counter", lambda: clock[0])

    def decode(row):
        clock[0] += 0.5
        return row

    # The speakers are known, so that nothing but the estimate hears the reference's text.
    lengths = Lengths(
        "",
        lambda said: [fitted(u.text, u.voice.speaker, u.voice.text) for u in said],
        known_speakers=SPEAKERS,
    )

    def speech(model, seed=5):
        codec, sampling = SimpleNamespace(decode=decode, sample_rate=25), Sampling(2, text_scale=0)
        run = replace(loaded, model=model)
        system = Synthesizer(run, codec, None, sampling, lambda: lengths)
        found = {}
        for index, sound in speak(system, prompts, seed, batch_size=4):
            found[index] = sound
            clock[0] += 1000.0  # spent on scoring, which is not the system's time
        assert sorted(found) == list(range(9)) and system.seconds_spent == 9 * 0.5
        return [found[index].latents for index in range(9)]

    noise = speech(Still())
    for each, start, found in zip(prompts, noise, speech(RowModel()), strict=True):
        frames = fitted(each.text, each.speaker, each.reference_text)
        conditions = {"speaker": each.speaker, "target_duration": frames / 25}
        reference = torch.zeros(0, CHANNELS) if each.voice is None else each.voice[:limit]
        assert found.shape == (frames, CHANNELS)
        way = moved(TOKENIZER.encode(each.text, conditions), reference, frames, mean_time=0.75)
        torch.testing.assert_close(found, start - way, atol=1e-2, rtol=1e-5)
    # No two start from one noise, nor do two seeds.
    assert len({float(start[0, 0]) for start in [*noise, *speech(Still(), seed=6)]}) == 18


def test_which_run_and_step(tmp_path, loaded, monkeypatch):
    for place, name, replacement in (
        (open_run, "load_run_config", lambda folder, args=(): loaded.config),
        (open_run, "find_folder", Path),
        (open_run, "checkpoint_steps", lambda folder: [100, 2000]),
        (open_run, "best_row", lambda *arguments: {"step": 100}),
        (checkpoint_storage, "read_table", lambda path: SimpleNamespace(state_dict_metadata=())),
        (open_run, "saved_prefixes", lambda table: ["decay-0.9."]),
    ):
        monkeypatch.setattr(place, name, replacement)
    assert find_checkpoints(["o/a"]) == [Checkpoint("o/a", 2000, "", "a@2000")]
    assert find_checkpoints(["o/a/"], 100, "raw") == [Checkpoint("o/a", 100, "raw", "a@100")]
    (tmp_path / "x@7").mkdir()
    assert find_checkpoints([str(tmp_path / "x@7")])[0].step == 2000
    assert find_checkpoints(["o/a@best:raw"])[0].weights == "raw"
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
        assert [each.name for each in find_checkpoints(texts, weights=weights)] == names
    for texts, sentence in (
        (["a@3"], "has no checkpoint step-3; it has steps: 100, 2000"),
        (["a@last"], "has no checkpoint step-last"),
        (["a", "a@2000"], "a: step 2000 is given twice"),
        (["a", "a@100:ema:0.8"], "holds no weights 'ema:0.8'"),
    ):
        refused(lambda texts=texts: find_checkpoints(texts), sentence)


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
