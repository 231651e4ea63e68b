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
        for text, error in (("not allowed", InputError), ("bad", ValueError)):
            if any(each.text == text for each in utterances):
                raise error(text)
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
    last = batcher.submit(say("d", "e"))
    assert batcher.waiting == 5
    third[0].cancel()  # of one who went away
    gate.open.set()
    assert [each.result(20) for each in (*first, second[0], *last)] == ["a7", "b7", "d7", "e7"]
    with pytest.raises(ValueError, match="bad"):
        second[1].result(20)
    # One that cannot be said does not spoil the others of its batch.
    assert gate.batches == [["a"], ["b", "bad", "d"], ["b"], ["bad"], ["d"], ["e"]]


def test_how_much_may_be_asked_for(batcher):
    """One text may be of any length; others wait for it."""
    with batcher.admitted(100):
        with pytest.raises(Refusal, match="100 pieces of texts"), batcher.admitted(1):
            pass
    with batcher.admitted(3), batcher.admitted(1):
        with pytest.raises(Refusal, match="4 pieces") as refusal, batcher.admitted(1):
            pass
    assert refusal.value.status_code == 429 and refusal.value.headers == {"Retry-After": "1"}
    with batcher.admitted(4):
        pass


def test_what_waits_at_the_end_is_cancelled(gate):
    batcher = Batcher(gate)
    batcher.submit(say("a"))
    wait_for(lambda: gate.batches)
    [last] = batcher.submit(say("b"))
    threading.Timer(0.1, gate.open.set).start()
    batcher.close()
    assert last.cancelled() and gate.batches == [["a"]]


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
