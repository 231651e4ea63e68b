"""Plans are of a GPU: what they are held against runs without the CPU's own eager functions."""

import pytest

from torchtitan.models.dit_tts.infra import kernels


@pytest.fixture(autouse=True)
def without_functions_of_a_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "CPUKernels", kernels.Operations)
