"""The arithmetic of benchmarks/time_to_quality.py, and its runs kept and made."""

import json
from dataclasses import asdict

import pytest

from benchmarks import time_to_quality
from benchmarks.quality import figures, jobs, recipes
from torchtitan.models.dit_tts.errors import InputError


def test_seconds_to_a_rate():
    """Between the budgets evenly in their logarithm; the first crossing counts."""
    points = [(10.0, 0.5), (40.0, 0.1), (160.0, 0.02)]
    for rate, seconds in ((0.3, 20.0), (0.1, 40.0), (0.06, 80.0), (0.02, 160.0)):
        assert figures.seconds_to(points[::-1], rate) == (pytest.approx(seconds), "")
    points = [(10.0, 0.08), (40.0, 0.04)]
    assert figures.seconds_to(points, 0.1) == (10.0, "at most")
    assert figures.seconds_to(points, 0.02) == (None, "not reached")
    assert figures.seconds_to([], 0.1) == (None, "not reached")
    rises = [(10.0, 0.2), (20.0, 0.05), (40.0, 0.15), (80.0, 0.05)]
    assert figures.seconds_to(rises, 0.1)[0] < 20


def test_a_seed_that_never_arrives_leaves_the_upper_end_open():
    reaches, never = [(10.0, 0.2), (20.0, 0.1)], [(10.0, 0.4), (20.0, 0.3)]
    both = figures.seconds_over_seeds([reaches, reaches, never], 0.1)
    assert both["median"] == pytest.approx(20.0) and both["max"] is None
    assert (both["reached"], both["seeds"]) == (2, 3)
    mostly_not = figures.seconds_over_seeds([reaches, never, never], 0.1)
    assert mostly_not["median"] is None and mostly_not["min"] == pytest.approx(20.0)
    assert figures.seconds_over_seeds([never], 0.1)["min"] is None


def test_a_difference_inside_the_seeds_range_is_a_tie():
    wide, near = figures.spread([0.05, 0.15]), figures.spread([0.18, 0.20])
    assert figures.verdict(wide, near) == "tie"  # 0.09 apart, the range is 0.10
    assert figures.verdict(figures.spread([0.05, 0.06]), near) == "better"
    assert figures.verdict(near, figures.spread([0.05, 0.06])) == "worse"
    assert figures.verdict(figures.spread([0.05]), near) == "one seed"


def _run(recipe="shipped", budget="300", seed=0, lr=1e-3, wer=0.5, seconds=20.0, **more):
    return {
        "job": asdict(jobs.Job(recipe, budget, int(budget), seed, lr)),
        "wer": {"value": wer},
        "wer_by_noise_seed": [wer, wer],
        "cer": wer,
        "seconds": seconds,
        "heldout_loss": 0.6,
        "text_gain": 0.1,
        "cpu_fraction": 1.0,
        "wall_seconds": seconds + 10,
        **more,
    }


def test_the_best_rate_is_that_of_the_lowest_error_and_then_of_the_lowest_loss():
    runs = [_run(lr=1.0, wer=0.9), _run(lr=2.0, wer=0.4), _run(lr=4.0, wer=0.5)]
    assert figures.best_rate(runs) == 2.0
    tied = [_run(lr=1.0, wer=1.0), _run(lr=2.0, wer=1.0, heldout_loss=0.5)]
    assert figures.best_rate(tied) == 2.0


def _report(seconds_of_peer, last_wer_of_peer):
    def both(recipe, seconds, wer):
        runs = [_run(recipe, "300", seed, 1e-3, 0.5, seconds / 2) for seed in (0, 1)] + [
            _run(recipe, "600", seed, 1e-3, wer, seconds) for seed in (0, 1)
        ]
        return figures.of_recipe(runs, [runs[0]])

    found = {
        "shipped": both("shipped", 40.0, 0.05),
        "f5": both("f5", seconds_of_peer, last_wer_of_peer),
    }
    return {
        "recipes": found,
        "against_shipped": figures.against(found),
        "against_peers": figures.against_peers(found, ["f5", "irodori"]),
    }


def test_the_aim_beside_a_peer():
    found = _report(200.0, 0.05)
    peers = found["against_peers"]
    assert peers["peer"] == "f5" and peers["ratio"] == pytest.approx(0.2)
    assert peers["verdict"] == "reached" and peers["peer_arrives"]
    assert found["against_shipped"]["f5"][-1]["verdict"] == "tie"
    assert _report(80.0, 0.05)["against_peers"]["verdict"] == "missed"
    # Beside a peer that does not arrive it is a bound.
    peers = _report(200.0, 0.4)["against_peers"]
    assert not peers["peer_arrives"] and peers["peer_seconds"] == 200.0
    assert peers["ratio"] < 0.2 and peers["verdict"] == "reached"
    assert _report(80.0, 0.4)["against_peers"]["verdict"] == "not shown"


def test_recipes_change_only_keys_that_the_schema_has():
    for recipe in recipes.RECIPES.values():
        if not recipe.why_not():
            assert all(map(recipes.has_key, recipe.settings(300)))
    assert set(recipes.PEERS) < set(recipes.RECIPES)
    assert recipes.RECIPES["irodori"].settings(300)["lr_scheduler.warmup_steps"] == 6
    assert recipes.has_key("objective.logit_mean") and not recipes.has_key("objective.nothing")


@pytest.fixture
def place(tmp_path):
    return jobs.Place(tmp_path / "runs", tmp_path / "data", "float32")


def _result(job, place, core=0):
    folder = place.run_folder(job)
    folder.mkdir(parents=True)
    found = _run(job.recipe, job.budget, job.seed, job.lr)
    found |= {"job": asdict(job), "arguments": jobs._identity(job, place)}
    (folder / jobs.RESULT).write_text(json.dumps(found))
    return found


def test_finished_runs_are_kept_and_others_made(place, capsys):
    first, second = jobs.Job("f5", "20", 20, 0, 1e-3), jobs.Job("shipped", "20", 20, 0, 1e-3)
    _result(first, place)
    made = []

    def work(job, place, core):
        made.append(job)
        return _result(job, place, core)

    progress = jobs.Progress([("f5", 20), ("shipped", 20)], 1)
    found = jobs.run_all([first, second, first], place, [0], progress, work)
    assert made == [second] and set(found) == {first, second}
    said = capsys.readouterr().out
    assert "[1/2] f5/20-lr-0.001-seed-0" in said and "(kept)" in said
    assert said.rstrip().endswith("ETA 0:00:00")
    assert len(jobs.collect(place)) == 2


def test_a_result_of_other_settings_is_not_taken(place):
    job = jobs.Job("shipped", "20", 20, 0, 1e-3)
    _result(job, place)
    assert jobs.finished(job, place) is not None
    other = jobs.Place(place.folder, place.data, "bfloat16")
    assert jobs.finished(job, other) is None and not jobs.collect(other)
    other = jobs.Place(place.folder, place.data, "float32", utterances=4)
    assert jobs.finished(job, other) is None
    moved = place.folder.rename(place.folder.with_name("moved"))
    assert jobs.finished(job, jobs.Place(moved, place.data, "float32")) is not None


def test_budgets_are_steps_or_seconds(place, monkeypatch):
    monkeypatch.setattr(
        time_to_quality,
        "run_all",
        lambda jobs, *rest, work: {j: {"seconds_per_step": 0.1} for j in jobs},
    )
    options = time_to_quality.parse(["--budgets", "60s", "500"])
    steps = time_to_quality.budget_steps(["f5"], options, place, [0])
    assert steps == {("f5", "60s"): 600, ("f5", "500"): 500, ("f5", "300"): 300}
    options = time_to_quality.parse(["--budgets", "1m"])
    with pytest.raises(InputError, match="1m"):
        time_to_quality.budget_steps(["f5"], options, place, [0])
