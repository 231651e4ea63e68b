"""An utterance said block by block."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.row_model import CHANNELS
from tests.helpers.sampled_run import HOP
from titan_tts import from_pretrained
from titan_tts.speak.blocks import AHEAD, CONTEXT, FIRST, Blocks
from titan_tts.speak.utterance import Speech, Utterance, part


def said(blocks, speak):
    """(what was asked for, the sound) of all blocks."""
    asked, sounds = [], []
    while (block := blocks.next) is not None:
        asked.append(block)
        sounds.append(blocks.add(speak(block)))
    return asked, sounds


@pytest.mark.parametrize("count", [1, 2])
def test_blocks_together_are_the_utterance(synthesizer, count):
    """Also with the fades of the first of several pieces. What a batch's end makes of its frames is made anew."""
    assert (FIRST, AHEAD, CONTEXT) == (24, 8, 3)
    whole = Utterance("one two", synthesizer.speaker("bob"), frames=150)
    pieces = [whole] * count
    [speech] = synthesizer.speak([whole], 3)

    def speak(block):
        [made] = synthesizer.speak([block], 3)
        made.latents[CONTEXT - AHEAD :] += 9 * (len(made.latents) < 150)
        return replace(made, waveform=synthesizer.codec.decode(made.latents))

    asked, sounds = said(synthesizer.blocks(pieces), speak)
    known = [0 if each.known is None else len(each.known) for each in asked]
    assert known == [0, 27, 51, 99] and [each.until for each in asked] == [32, 56, 104, 150]
    assert [len(each) for each in sounds] == [HOP * n for n in (24, 24, 48, 54)]
    wanted = part(speech.waveform, 0, count, 100)
    torch.testing.assert_close(torch.cat(sounds), wanted, atol=1e-5, rtol=0)


def test_short_ones_are_one_block_and_no_last_one_is_short():
    for frames, untils in (
        (1, [1]),
        (32, [32]),
        (33, [32, 33]),
        (56, [32, 56]),
        (57, [32, 56, 57]),
    ):
        blocks = Blocks(Utterance("a", frames=frames), HOP)
        asked, sounds = said(
            blocks, lambda u: Speech(torch.ones(HOP * u.until), 100, torch.ones(u.until, CHANNELS))
        )
        assert [each.until for each in asked] == untils
        assert torch.equal(torch.cat(sounds), torch.ones(HOP * frames))


def test_a_decoding_becomes_the_next_without_a_step():
    """Over a hundredth of a second, where they differ."""
    blocks, levels = Blocks(Utterance("a", frames=40), 160), iter((0.0, 1.0))
    speech = lambda u: Speech(  # noqa: E731
        torch.full((160 * u.until,), next(levels)), 4000, torch.ones(u.until, CHANNELS)
    )
    _, sounds = said(blocks, speech)
    steps = torch.cat(sounds).diff()
    assert steps.max() < 0.03 and float(steps.sum()) == pytest.approx(1)
    assert steps.nonzero().flatten().tolist() == list(range(24 * 160, 24 * 160 + 39))


@pytest.mark.long
def test_the_base_voice_says_in_blocks_what_it_says_at_once():
    """Each word where it is in the whole: a block is not an utterance of its own with all of the text."""
    model = from_pretrained("titan_tts:base", dtype="float32", sampling_steps=4)
    assert model.has_blocks
    text = "The old man walked slowly down the long road, and nobody in the village saw him go."
    [piece] = model.pieces(Utterance(text, model.default_voice))
    [whole] = model.speak([piece], 0)
    made = []
    _, sounds = said(
        model.blocks([piece]), lambda u: made.append(model.speak([u], 0)[0]) or made[-1]
    )
    latents, wanted = made[-1].latents, whole.latents
    assert len(sounds) >= 3 and len(torch.cat(sounds)) == len(whole.waveform)
    assert (latents - wanted).norm() < 0.2 * wanted.norm()
