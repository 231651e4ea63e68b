"""What job_config.py declares of each key is as recorded: defaults, bounds and marks.

A default that changes is another run for whoever does not give the key, and for a checkpoint that is older
than the key it is what it was trained with.
"""

import json
from dataclasses import asdict, astuple, fields
from pathlib import Path

from torchtitan.models.dit_tts.config import job_config
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.keys import declared, marked
from torchtitan.models.dit_tts.config.marks import Bounds, Mark

RECORDED = json.loads(Path(__file__).with_name("declared.json").read_text())


def test_defaults_bounds_and_marks_are_the_recorded_ones():
    values = asdict(JobConfig())
    ours = [field for field in fields(JobConfig) if field.type.__module__ == job_config.__name__]
    assert {
        each.name: {key: values[each.name][key] for key in each.type.__annotations__}
        for each in ours
    } == RECORDED["defaults"]
    bounds = [(name, each) for name, given in declared() for each in given]
    assert {
        name: list(astuple(each)) for name, each in bounds if isinstance(each, Bounds)
    } == RECORDED["bounds"]
    assert {mark.name: list(marked(mark)) for mark in Mark} == RECORDED["marks"]
