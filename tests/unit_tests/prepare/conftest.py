import pytest

from tests.helpers import speech_corpora as corpora


@pytest.fixture(scope="session")
def recordings():
    return corpora.speech(each=2)
