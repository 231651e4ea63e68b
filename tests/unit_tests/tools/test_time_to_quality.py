"""The arithmetic of benchmarks/time_to_quality.py, its runs kept and resumed, and the in-fill model."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from benchmarks import time_to_quality
from benchmarks.quality import figures, jobs, padded_run, recipes
from benchmarks.quality.infill_model import SIZES, InfillModel, characters
from benchmarks.quality.infill_task import (
    MIN_MASKED,
    Prompted,
    dropped,
    fill_in,
    masked_spans,
    sway_times,
)
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.flow.counter_rng import normal, stream_keys
from torchtitan.models.dit_tts.model.model import DiTTTSModel
from torchtitan.models.dit_tts.model_config import model_flavors
from torchtitan.models.dit_tts.sampling.sampler import SAMPLING_STREAM, SpeechRequest
from torchtitan.models.dit_tts.text.tokenizer import byte_tokenizer

# ---- seconds, ranges, ties


def test_seconds_to_a_rate_lie_between_the_budgets_evenly_in_their_logarithm():
    points = [(10.0, 0.5), (40.0, 0.1), (160.0, 0.02)]
    assert figures.seconds_to(points, 0.3) == (pytest.approx(20.0), "")
    assert figures.seconds_to(points, 0.1) == (pytest.approx(40.0), "")
    assert figures.seconds_to(points, 0.06) == (pytest.approx(80.0), "")
    assert figures.seconds_to(points[::-1], 0.02)[0] == pytest.approx(160.0)


def test_a_rate_is_reached_at_most_at_the_first_budget_or_not_at_all():
    points = [(10.0, 0.08), (40.0, 0.04)]
    assert figures.seconds_to(points, 0.1) == (10.0, "at most")
    assert figures.seconds_to(points, 0.02) == (None, "not reached")
    assert figures.seconds_to([], 0.1) == (None, "not reached")


def test_the_first_crossing_counts_where_the_rate_rises_again():
    points = [(10.0, 0.2), (20.0, 0.05), (40.0, 0.15), (80.0, 0.05)]
    assert figures.seconds_to(points, 0.1)[0] < 20


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
        "job": {
            "recipe": recipe,
            "budget": budget,
            "steps": int(budget),
            "seed": seed,
            "lr": lr,
        },
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


def test_the_aim_beside_a_peer_that_arrives():
    found = _report(200.0, 0.05)
    peers = found["against_peers"]
    assert peers["peer"] == "f5" and peers["ratio"] == pytest.approx(0.2)
    assert peers["verdict"] == "reached" and peers["peer_arrives"]
    assert found["against_shipped"]["f5"][-1]["verdict"] == "tie"
    assert _report(80.0, 0.05)["against_peers"]["verdict"] == "missed"


def test_the_aim_beside_a_peer_that_does_not_arrive_is_a_bound():
    peers = _report(200.0, 0.4)["against_peers"]
    assert not peers["peer_arrives"] and peers["peer_seconds"] == 200.0
    assert peers["ratio"] < 0.2 and peers["verdict"] == "reached"
    assert _report(80.0, 0.4)["against_peers"]["verdict"] == "not shown"


def test_a_shipped_recipe_that_does_not_arrive_misses_the_aim_beside_one_that_does():
    found = _report(80.0, 0.05)["recipes"]
    swapped = {"shipped": _report(80.0, 0.4)["recipes"]["f5"], "f5": found["shipped"]}
    peers = figures.against_peers(swapped, ["f5"])
    assert peers["ratio"] is None and peers["verdict"] == "missed"
    assert figures.against_peers({"f5": found["f5"]}, ["f5"])["verdict"] == "not shown"


def test_the_table_has_a_line_per_recipe_and_names_what_was_not_reached():
    found = _report(200.0, 0.4)
    lines = figures.table(found).splitlines()
    assert len(lines) == 4 and all(line.count("|") == lines[0].count("|") for line in lines)
    assert "not reached" in lines[3] and "worse" in lines[3]
    assert "WER at 300 steps" in lines[0]


def test_the_picture_has_every_recipe():
    from benchmarks.quality.picture import picture

    drawn = picture(_report(200.0, 0.0))
    assert ">shipped<" in drawn["svg"] and ">f5<" in drawn["svg"]
    assert drawn["png"].startswith(b"\x89PNG")


def test_training_seconds_are_those_of_the_logged_steps():
    rows = [{"step": 50, "seconds_per_step": 0.2}, {"step": 1, "seconds_per_step": 1.0}]
    assert jobs.training_seconds(rows) == pytest.approx(1.0 + 49 * 0.2)


# ---- runs


def test_recipes_change_only_keys_that_the_schema_has():
    for recipe in recipes.RECIPES.values():
        if not recipe.why_not():
            assert all(map(recipes.has_key, recipe.settings(300)))
    assert set(recipes.PEERS) < set(recipes.RECIPES)
    assert recipes.RECIPES["irodori"].settings(300)["lr_scheduler.warmup_steps"] == 6
    assert recipes.has_key("objective.logit_mean") and not recipes.has_key("objective.nothing")


def test_a_switch_that_is_off_is_no_recipe():
    assert recipes.RECIPES["adamw"].why_not()
    assert not recipes.RECIPES["logit_mean_0"].why_not()
    unknown = recipes.Recipe("new", "", {"data.no_such_key": 1})
    assert "data.no_such_key" in unknown.why_not()


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


def test_a_failed_run_ends_the_call_with_its_reason(place):
    def work(job, place, core):
        raise InputError("no such thing")

    with pytest.raises(InputError, match="no such thing"):
        jobs.run_all([jobs.Job("f5", "20", 20, 0, 1e-3)], place, [0], work=work)


def test_arguments_of_a_run_end_its_schedule_at_the_budget(place):
    job = jobs.Job("irodori", "300", 300, 2, 4e-3)
    arguments = jobs.train_arguments(job, place)
    given = dict(zip(arguments, arguments[1:], strict=False))
    assert given["--training.steps"] == given["--validation.freq"] == "300"
    assert given["--debug.seed"] == given["--data.seed"] == "2"
    assert given["--optimizer.lr"] == "0.004" and "--objective.loss_on_padding" in arguments


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


# ---- in-filling


def _args():
    args = model_flavors()["debug"]
    args.text_vocab_size, args.text_n_layers, args.text_n_heads = 259, 2, 2
    return args


def _count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_infill_model_has_the_parameters_of_the_debug_flavor():
    with torch.device("meta"):
        ours, theirs = DiTTTSModel(_args()), InfillModel(_args())
    assert abs(_count(theirs) / _count(ours) - 1) < 0.03


def test_spans_are_contiguous_and_most_of_the_frames():
    frames = torch.arange(1, 201)
    row = torch.arange(200)
    spans = masked_spans(frames, 200, 3, torch.tensor(5), row)
    counts = spans.sum(1)
    assert (counts >= (MIN_MASKED * frames - 0.5)).all() and (counts <= frames).all()
    assert counts.min() >= 1
    edges = spans.int().diff(dim=1, prepend=torch.zeros(200, 1), append=torch.zeros(200, 1))
    assert (edges == 1).sum(1).eq(1).all()
    inside = torch.arange(200) < frames[:, None]
    assert not (spans & ~inside).any()
    assert not torch.equal(spans, masked_spans(frames, 200, 3, torch.tensor(6), row))
    assert 0.8 < (counts / frames).mean() < 0.9  # of 0.7 to 1


def test_dropping_the_text_drops_the_given_frames_too():
    keep_given, keep_text = dropped(0, torch.tensor(0), torch.arange(20000))
    assert not (keep_given & ~keep_text).any()
    assert keep_text.float().mean() == pytest.approx(0.8, abs=0.02)
    assert keep_given.float().mean() == pytest.approx(0.8 * 0.7, abs=0.02)


def test_sway_sampling_goes_from_noise_to_data_with_small_steps_first():
    times = sway_times(32)
    assert times[0] == 1 and times[-1] == pytest.approx(0) and len(times) == 33
    steps = [a - b for a, b in zip(times, times[1:], strict=False)]
    assert steps == sorted(steps) and steps[0] < 1 / 32 / 10
    # s = -1 leaves 1 - f = cos(pi u / 2).
    assert times[16] == pytest.approx(math.cos(math.pi / 4))


def _small_infill():
    torch.manual_seed(0)
    model = InfillModel(_args()).eval()
    model.init_weights()
    for parameter in model.parameters():  # AdaLN and the output start at zero
        torch.nn.init.normal_(parameter, std=0.05)
    return model


def _prompted():
    ids = characters(torch.tensor([byte_tokenizer().encode("one two")]))
    return Prompted(torch.randn(1, 6, 128), torch.tensor([5]), ids)


def test_a_row_does_not_depend_on_its_padding():
    model, prompts = _small_infill(), _prompted()
    mask = torch.ones(1, 9, dtype=torch.bool)
    rows = prompts.rows(torch.randn(1, 9, 128), mask)
    assert rows.latents.shape[1] == 14 and rows.mask.all()
    given, t = prompts.given(14), torch.tensor([0.7])
    alone = model(rows.latents, t, rows.mask, given, rows.ids)

    def padded(x):
        return torch.nn.functional.pad(x, (0, 0, 0, 7))

    longer = torch.nn.functional.pad(rows.mask, (0, 7))
    output = model(padded(rows.latents), t, longer, padded(given), rows.ids)
    assert torch.allclose(output[:, :14], alone, atol=1e-5)
    assert alone.abs().max() > 1e-3


def test_utterances_stand_behind_their_references_and_come_back():
    prompts = _prompted()
    latents = torch.randn(1, 9, 128)
    rows = prompts.rows(latents, torch.arange(9)[None] < 7)
    assert int(rows.mask.sum()) == 12
    assert torch.equal(rows.latents[0, :5], prompts.reference[0, :5])
    assert torch.equal(prompts.behind(rows.latents, 7)[0], latents[0, :7])
    given = prompts.given(rows.latents.shape[1])
    assert torch.equal(given[0, :5], prompts.reference[0, :5]) and not given[0, 5:].any()


def test_text_and_given_frames_matter_unless_they_are_dropped():
    model, prompts = _small_infill(), _prompted()
    rows = prompts.rows(torch.randn(1, 9, 128), torch.ones(1, 9, dtype=torch.bool))
    t, given = torch.tensor([0.7]), prompts.given(14)
    other = characters(torch.tensor([byte_tokenizer().encode("six six")]))

    def output(ids, keep):
        return model(rows.latents, t, rows.mask, given, ids, torch.tensor([keep]))

    assert not torch.allclose(output(rows.ids, True), output(other, True), atol=1e-4)
    assert torch.equal(output(rows.ids, False), output(other, False))


def test_sampling_is_of_a_request_whatever_its_batch():
    model = _small_infill()
    requests = [
        SpeechRequest("one", torch.randn(4, 128), 6),
        SpeechRequest("two", torch.randn(7, 128), 9),
    ]
    encode = byte_tokenizer().encode
    ids = characters(torch.tensor([encode("six one"), encode("six two")]))
    references = torch.nn.utils.rnn.pad_sequence([r.reference for r in requests], batch_first=True)
    both = Prompted(references, torch.tensor([4, 7]), ids)
    one = Prompted(requests[0].reference[None], torch.tensor([4]), ids[:1])
    cpu = torch.device("cpu")
    found = fill_in(model, both, requests, 0, cpu)
    assert [len(each) for each in found] == [6, 9]
    assert torch.allclose(found[0], fill_in(model, one, requests[:1], 0, cpu)[0], atol=1e-4)


class _Constant:
    """Velocity 5 with text and prompt, 2 without both."""

    args = _args()

    def __call__(self, noisy, t, frame_mask, given, ids, keep_text):
        assert given[keep_text].any() and not given[~keep_text].any()
        return torch.where(keep_text, 5.0, 2.0)[:, None, None].expand_as(noisy)


def test_guidance_leads_away_from_what_is_said_without_text_and_prompt():
    prompts = _prompted()
    request = SpeechRequest("two", prompts.reference[0, :5], 9)
    [one] = fill_in(_Constant(), prompts, [request], 0, torch.device("cpu"))
    noise = stream_keys(0, torch.tensor(0), torch.tensor([request.noise_row()]), SAMPLING_STREAM)
    expected = normal(noise, (14, 128))[0, 5:] - (5 + 2 * (5 - 2))
    assert torch.allclose(one, expected, atol=1e-4)


def test_characters_have_no_begin_and_no_end():
    text_ids = torch.tensor([[*byte_tokenizer().encode("ab"), 0]])
    assert characters(text_ids).tolist() == [[ord("a") + 3, ord("b") + 3, 0, 0]]


def test_sizes_of_the_infill_model_fit_together():
    assert SIZES.dim % SIZES.n_heads == 0 and SIZES.dim % SIZES.position_groups == 0


def test_speech_ends_at_the_last_frame_that_is_not_silent():
    latents = torch.zeros(10, 128)
    latents[2:5] = 1.0
    assert padded_run.speech_end(latents) == 5
    assert padded_run.speech_end(torch.zeros(4, 128)) == 1
