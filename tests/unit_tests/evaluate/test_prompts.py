"""Test sets: prepared folders, corpora and lists."""

import json
from dataclasses import replace

import numpy as np
import soundfile

from tests.helpers.evaluated_run import LengthCodec, frames_of, write_tree
from tests.helpers.row_model import CHANNELS
from tests.helpers.sampled_run import SPEAKERS
from tests.helpers.sentences import refused
from tests.helpers.speech_corpora import AS_IS, tone, write_tones
from titan_tts.evaluate.options import Options
from titan_tts.evaluate.prompts import (
    PREPARED,
    Corpus,
    encode_prompts,
    evenly,
    find_kind,
    read_prompts,
)
from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard


def read(source, max_utterances=0, **options):
    given = Options(run="", test=str(source), max_utterances=max_utterances, **options)
    return read_prompts(given, Data(latent_channels=CHANNELS))


def test_held_out_utterances_are_read_with_what_is_theirs(shards):
    assert find_kind(str(shards)) == PREPARED
    found = read(shards)
    assert [p.file_name for p in found.prompts] == [f"s{n // 3}_a_{n % 3}" for n in range(6)]
    for number, prompt in enumerate(found.prompts):
        assert prompt.speaker == SPEAKERS[number % 2]
        assert prompt.text == prompt.labels["text"] == " ".join(["one", "two"] * (number + 1))
        assert prompt.latents.shape == (number + 2, CHANNELS)
        assert (prompt.latents == number).all() and (prompt.voice == number + 10).all()
    assert [p.id for p in read(shards / "s1.tar").prompts] == ["a/0", "a/1", "a/2"]
    # Voices alternate: a stride over them would take one of the two.
    assert {p.speaker for p in read(shards, 3).prompts} == set(SPEAKERS)
    encode_prompts(found, LengthCodec(), AS_IS)
    assert found.prompts[0].load_reference().seconds == len(found.prompts[0].voice) / 25


def test_which_references_of_a_prepared_folder_are_used(tmp_path):
    """No empty one, no part of the recording; and its text only where it is whole."""
    generator = np.random.default_rng(0)
    one, two, three = (
        generator.normal(size=(20 + n, CHANNELS)).astype(np.float16) for n in range(3)
    )
    samples = [
        Triplet("whole", one, two, {"text": "one", "reference_key": "cropped"}),
        Triplet("cropped", two, three[3:], {"text": "two", "reference_key": "none"}),
        Triplet("none", three, one[:0], {"text": "three", "reference_key": "whole"}),
        Triplet("part", three, three[5:15], {"text": "four"}),
    ]
    (tmp_path / "data/heldout").mkdir(parents=True)
    write_shard(tmp_path / "data/heldout/a.tar", samples)
    (tmp_path / "data/prepare.json").write_text("{}")
    found = read(tmp_path / "data", language="en")  # all that prepare wrote
    assert [prompt.reference_text for prompt in found.prompts] == ["two", "", "", ""]
    encode_prompts(found, LengthCodec(), AS_IS)
    assert [len(prompt.voice) for prompt in found.prompts[:2]] == [21, 19]
    for prompt in found.prompts[2:]:
        assert prompt.voice is None and prompt.load_reference is None and prompt.speaker == ""
        assert prompt.language == prompt.labels["language"] == "en"


def test_a_corpus_gives_texts_recordings_and_another_utterance_of_the_speaker(tmp_path):
    tree = write_tree(tmp_path)
    found = read(tree)
    assert [p.speaker for p in found.prompts] == ["84"] * 3 + ["9"] * 2
    again = {p.id: p.load_reference().seconds for p in read(tree, 2).prompts}
    encode_prompts(found, LengthCodec(), AS_IS)
    for number, prompt in enumerate(found.prompts):
        assert len(prompt.latents) == frames_of(number)
        assert frames_of(number) == round(25 * prompt.load_recording().seconds)
        others = set(range(3) if number < 3 else range(3, 5)) - {number}
        assert len(prompt.voice) in map(frames_of, others)
        seconds = prompt.load_reference().seconds
        assert len(prompt.voice) == round(25 * seconds)
        assert again.get(prompt.id, seconds) == seconds  # whatever else is chosen
    assert len(again) == 2


def test_a_corpus_with_references_of_its_own_is_prepared_first(tmp_path):
    for name in ("a.wav", "b.wav"):
        soundfile.write(tmp_path / name, tone(0.5), 16_000)
    row = '{"audio": "a.wav", "text": "a", "speaker": "s", "reference": "b.wav"}'
    (tmp_path / "m.jsonl").write_text(row)
    refused(lambda: read(tmp_path / "m.jsonl"), "a: has references of its own", "prepare it")
    (tmp_path / "m.jsonl").write_text('{"audio": "a.wav", "text": "a"}')
    refused(lambda: read(tmp_path / "m.jsonl"), "no recording can be used; a: has no speaker")


def test_only_the_held_out_part_of_a_corpus_is_taken(tmp_path):
    tree = write_tree(tmp_path)
    (tree / "train-clean").mkdir()
    (tree / "test-clean/9").rename(tree / "train-clean/9")
    assert {p.speaker for p in read(tree).prompts} == {"84"}
    # A speaker's other held-out utterances come before those of training.
    lone = next((tree / "train-clean/9").rglob("*3_000000.wav"))
    (tree / "test-clean/9/7").mkdir(parents=True)
    for path in (lone, lone.with_suffix(".normalized.txt")):
        path.rename(tree / "test-clean/9/7" / path.name)
    references = [round(25 * p.load_reference().seconds) for p in read(tree).prompts]
    assert references[3] == frames_of(4)
    assert set(references[:3]) <= set(map(frames_of, range(3)))
    (tree / "test-clean").rename(tree / "train-other")
    assert len(read(tree).prompts) == 5  # nothing is held out


def test_what_is_silent_is_left_out_and_a_lone_speaker_has_no_reference(tmp_path):
    tree = write_tree(tmp_path)
    first, second = sorted((tree / "test-clean/9").rglob("*.wav"))
    soundfile.write(second, np.zeros(24_000), 24_000)
    for path in sorted((tree / "test-clean/84").rglob("*.wav"))[1:]:
        path.with_suffix(".normalized.txt").unlink()
    found = read(tree)
    assert found.left_out == {"undecodable": 2}
    encode_prompts(found, LengthCodec(), AS_IS)
    assert [p.speaker for p in found.prompts] == ["84", "9"]
    assert found.left_out == {"undecodable": 2, "silent": 1}
    # The only other utterance is silent, or there is none.
    assert [p.voice for p in found.prompts] == [None, None]
    first.write_bytes(b"RIFF")
    words = "9_7_000003_000000: ", "; correct or remove it"
    refused(lambda: encode_prompts(read(tree), LengthCodec(), AS_IS), *words)


def test_a_list_has_its_own_references(tmp_path):
    (tmp_path / "wavs").mkdir()
    for name, seconds in (("p", 1.0), ("q", 2.0), ("wavs/b", 3.0)):
        soundfile.write(tmp_path / f"{name}.wav", tone(seconds, rate=24_000), 24_000)
    lines = "a|x|p.wav|O\u0308ne.\r\n\nb|y|q.wav|Two.\nb|y|p.wav|Three.|q.wav\n"
    (tmp_path / "meta.lst").write_text(lines, encoding="utf-8-sig")
    found = read(tmp_path / "meta.lst", language="en")
    encode_prompts(found, LengthCodec(), AS_IS)
    keys = [(p.id, p.text, p.reference_text) for p in found.prompts]
    assert keys == [("a", "\u00d6ne.", "x"), ("b", "Two.", "y"), ("b-2", "Three.", "y")]
    assert [len(p.voice) for p in found.prompts] == [25, 50, 25]
    assert [None if p.latents is None else len(p.latents) for p in found.prompts] == [None, 75, 50]
    assert found.prompts[0].labels == {"text": "O\u0308ne.", "language": "en"}


def test_recordings_of_a_prepared_folder_come_from_its_corpus(tmp_path):
    tree = write_tree(tmp_path / "tree")
    keys = [item.id for item in Corpus(str(tree)).items]
    latents = np.ones((3, CHANNELS), np.float16)
    samples = [Triplet(key, latents, latents, {"text": "one"}) for key in reversed(keys)]
    write_shard(tmp_path / "a.tar", samples)
    found = read(tmp_path / "a.tar", recordings=str(tree))
    for prompt in found.prompts:
        frames = round(25 * prompt.load_recording().seconds)
        assert frames == frames_of(keys.index(prompt.id))
    samples[1] = replace(samples[1], key="other")
    write_shard(tmp_path / "a.tar", samples)
    words = "lacks 1 of the 5 utterances of --test, the first is other"
    refused(lambda: read(tmp_path / "a.tar", recordings=str(tree)), words)


def test_recordings_are_read_by_the_columns_that_the_shards_were_prepared_with(tmp_path):
    write_tones(tmp_path / "wavs", "a")
    write_tones(tmp_path / "wavs", "b", seconds=1.5)
    table = tmp_path / "manifest.csv"
    table.write_text("audio,Satz,Wer\nwavs/a.wav,Hallo,eva\nwavs/b.wav,Guten Tag,eva\n")
    ones = np.ones((3, CHANNELS), np.float16)
    shard = tmp_path / "ready/heldout/s.tar"
    shard.parent.mkdir(parents=True)
    write_shard(shard, [Triplet("wavs/b", ones, ones, {"text": "Guten Tag"})])
    settings = {"codec": "mel_dct", "codec_fingerprint": "x", "speaker": "", "speaker_pattern": ""}
    settings |= {"text_column": "Satz", "speaker_column": "Wer", "audio": {}, "seed": 3}
    record = tmp_path / "ready/prepare.json"
    record.write_text(json.dumps({"settings": settings | {"format": "manifest"}}))
    (tmp_path / "metadata.csv").write_text("a|Nein\n")  # another layout
    for test, corpus in ((tmp_path / "ready", table), (shard, tmp_path)):
        found = read(test, recordings=str(corpus))
        assert found.prompts[0].load_recording().seconds == 1.5
    record.unlink()
    words = ("lacks 1 of the 1", "the columns Satz, Wer", "keep the prepare.json")
    refused(lambda: read(shard, recordings=str(table)), *words)


def test_kinds_and_even_selections(tmp_path):
    for source, sentence in ((tmp_path, "has no known layout"), ("/nowhere", "does not exist")):
        refused(lambda source=source: find_kind(str(source)), f"--test {source}: {sentence}")
    for speakers, wanted, chosen in (
        ("a" * 5, 0, [0, 1, 2, 3, 4]),
        ("a" * 5, 9, [0, 1, 2, 3, 4]),
        ("a" * 10, 3, [0, 3, 6]),
        ("ab" * 10, 4, [0, 1, 10, 11]),  # two of each, spread
        ("abcdef", 2, [0, 3]),  # fewer than speakers
    ):
        assert evenly(speakers, wanted) == chosen
