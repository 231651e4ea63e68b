"""The list of mutants fits the product; scripts/mutants.py tries them."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts/mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.read_mutants()


@pytest.mark.long
def test_each_can_still_be_made(mutants):
    """Its text stands in the product exactly once, and what replaces it is Python."""
    assert len(mutants) >= 100
    for mutant in mutants:
        changed = mutant.source()
        compile(changed, mutant.file, "exec")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name.split('[')[0]}" in (ROOT / "tests/unit_tests" / file).read_text(), (
                test
            )
