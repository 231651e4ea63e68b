"""Plans are of a GPU: what they are held against runs without the CPU's own eager functions."""

import pytest

from torchtitan.models.dit_tts.model import cpu_kernels


@pytest.fixture(autouse=True)
def without_functions_of_a_cpu(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "use_cpu_kernels", lambda x: False)
