"""Recordings cut within speech are told from whole and from tightly trimmed ones, by the command's own result."""

import numpy as np
import pytest
import torch

from tests.helpers.speech_corpora import CHANNELS, RATE, read_corpus
from titan_tts.doctor.doctor_command import Options, examine
from titan_tts.prepare.processing import speech_span
from torchtitan.models.dit_tts.data.dataset import open_dataset
from torchtitan.models.dit_tts.data.shard_writer import Triplet, write_shard
from torchtitan.models.dit_tts.speech.codec import build_codec

SECONDS = round(0.3 * RATE)


@pytest.fixture(scope="module")
def recordings():
    """120 of two voices, of three digits and more"""
    found = read_corpus(
        wanted=lambda item: item.speaker in ("slt", "awb") and item.split == "train"
    )
    return [one for one in found if len(one.text.split()) > 2][::6][:120]


def found_in(folder, recordings, cut):
    """code -> (count, keys of examples) of the findings of both cuts; `cut(number, samples)` -> samples."""
    codec, samples = build_codec("mel_dct", "cpu"), []
    for number, one in enumerate(recordings):
        sound = np.ascontiguousarray(cut(number, one.samples))
        latents = codec.encode(torch.from_numpy(sound)).numpy().astype(np.float16)
        metadata = {"text": one.text, "speaker": one.speaker, "target_duration": len(sound) / RATE}
        samples.append(Triplet(f"{number:03d}", latents, latents[:0], metadata))
    write_shard(folder / "a.tar", samples)
    dataset = open_dataset(str(folder / "a.tar"), CHANNELS)
    findings = examine(dataset, Options([str(folder)]))["findings"]
    return {
        one["code"]: (one["count"], [int(each["where"].split(":")[1]) for each in one["examples"]])
        for one in findings
        if one["code"].startswith("cut_")
    }


@pytest.mark.long
@pytest.mark.parametrize("side", ["start", "end"])
def test_recordings_without_their_first_or_last_third_of_a_second(tmp_path, recordings, side):
    part = slice(SECONDS, None) if side == "start" else slice(0, -SECONDS)
    found = found_in(tmp_path, recordings, lambda n, sound: sound[part] if n % 2 else sound)
    [(code, (count, examples))] = found.items()
    assert code == f"cut_{side}" and 20 < count <= 60
    assert len(examples) == 20 and all(number % 2 for number in examples)


@pytest.mark.long
@pytest.mark.parametrize("tight", [False, True])
def test_whole_recordings_are_not_taken_for_cut_ones(tmp_path, recordings, tight):
    def trimmed(number, sound):
        start, stop = speech_span(sound, RATE, 0.0)
        return sound[start:stop] if tight else sound

    assert found_in(tmp_path, recordings, trimmed) == {}
