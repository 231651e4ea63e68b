"""Utterances of several requests, said together."""

import threading
import time

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from titan_tts.serving.batcher import Batcher
from titan_tts.serving.refusals import Refusal
from titan_tts.speak.utterance import Utterance
from torchtitan.models.dit_tts.errors import InputError


class Gate:
    """A synthesizer that waits to be let through, and refuses some texts."""

    def __init__(self):
        self.open = threading.Event()
        self.batches = []

    def synthesize(self, utterances, seed):
        self.batches.append([each.text for each in utterances])
        assert self.open.wait(20)
        if any(each.text == "not allowed" for each in utterances):
            raise InputError("not allowed")
        if any(each.text == "bad" for each in utterances):
            raise ValueError("bad")
        return [f"{each.text}{seed}" for each in utterances]


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def batcher(gate):
    made = Batcher(gate, max_batch=3, max_waiting=4, seed=7)
    yield made
    gate.open.set()
    made.close()
    assert not made.alive
    with pytest.raises(Refusal, match="shutting down"):
        made.submit(say("a"))


def say(*texts):
    return [Utterance(text) for text in texts]


def wait_for(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_what_waits_is_said_together_in_order_and_not_too_much(gate, batcher):
    first = batcher.submit(say("a"))
    wait_for(lambda: gate.batches)
    second = batcher.submit(say("b", "bad"))
    third = batcher.submit(say("c"))
    last = batcher.submit(say("d"))
    assert batcher.waiting == 4
    more = batcher.submit(say("e"))
    third[0].cancel()  # of one who went away
    gate.open.set()
    futures = (*first, second[0], *last, *more)
    assert [future.result(20) for future in futures] == ["a7", "b7", "d7", "e7"]
    with pytest.raises(ValueError, match="bad"):
        second[1].result(20)
    # One that cannot be said does not spoil the others of its batch.
    assert gate.batches == [["a"], ["b", "bad", "d"], ["b"], ["bad"], ["d"], ["e"]]


def test_clients_take_turns(gate, batcher):
    batcher.submit(say("first"))
    wait_for(lambda: gate.batches)
    long = batcher.submit(say("a", "b", "c", "d"), "long")
    other = batcher.submit(say("e", "f"), "other")
    batcher.submit(say("g"), "third")
    long[1].cancel()
    gate.open.set()
    for future in (*other, long[3]):
        future.result(20)
    assert gate.batches[1:] == [["a", "e", "g"], ["c", "f", "d"]]
    assert batcher.waiting == 0


def test_how_much_a_client_may_ask_for(batcher):
    """One text may be of any length; others of the same client wait for it, those of others do not."""
    with batcher.admitted("long", 100), batcher.admitted("other", 3):
        with (
            pytest.raises(Refusal, match="100 pieces of your texts"),
            batcher.admitted("long", 1),
        ):
            pass
        with pytest.raises(Refusal, match="3 pieces"), batcher.admitted("other", 2):
            pass
        with batcher.admitted("other", 1), batcher.admitted("c", 1), batcher.admitted("d", 1):
            with pytest.raises(Refusal, match="4 clients"), batcher.admitted("e", 1):
                pass
    with batcher.admitted("long", 4), batcher.admitted("e", 1):
        pass


def test_it_is_alive_unless_all_that_is_asked_for_fails(gate, batcher):
    """And that not for a mistake of who asked."""
    gate.open.set()
    for texts, alive in (
        (["not allowed"], True),
        (["bad", "bad"], False),
        (["not allowed"], False),
        (["bad", "a"], True),
    ):
        for future in batcher.submit(say(*texts)):
            future.exception(20)
        wait_for(lambda: batcher.alive == alive)
