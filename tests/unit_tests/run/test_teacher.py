"""Students of a tiny teacher: what they learn, how they resume, and which teachers are refused."""

import json
import shutil
from dataclasses import replace

import pytest

from tests.helpers.exported_run import as_by_a_stranger, export
from tests.helpers.sentences import refused
from tests.helpers.tiny_runs import Folder, killed
from titan_tts.plan.devices import Cluster, find_device
from titan_tts.plan.forecast import Planner
from torchtitan.models.dit_tts.config.exported import CONFIG, read_exported
from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.model.flops import training_flops
from torchtitan.models.dit_tts.run.teacher import distillation, with_teacher
from torchtitan.models.dit_tts.text.build_tokenizer import load_vocabulary
from torchtitan.models.dit_tts.text.vocabulary import to_json

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed")]

STUDENT = ["--sampling.steps=3", "--sampling.text_scale=0", "--distill.teacher_steps=2"]
# The teacher's own velocity at the start of each interval: what the student, its copy, predicts.
COPY = [*STUDENT, "--distill.teacher_steps=1", "--optimizer.lr=0", "--training.steps=2"]
COPY += ["--objective.text_dropout=0.5", "--objective.speaker_dropout=0.5"]


@pytest.fixture
def teacher(train, tmp_path, tmp_path_factory):
    kept = tmp_path_factory.getbasetemp() / "teacher-of-students"
    if not kept.exists():
        given = "--model.text_positions=aligned", "--data.conditioning=speaker"
        assert train("teacher", "--training.steps=2", *given) == 0
        export(tmp_path / "teacher", kept)
        shutil.rmtree(tmp_path / "teacher")
    return shutil.copytree(kept, tmp_path / "teacher")


@pytest.mark.parametrize("batching", [[], ["--data.batching=packed", "--data.longest_per_row=2"]])
def test_a_copy_of_its_teacher_has_nothing_to_learn_but_the_guidance(
    teacher, train, tmp_path, tiny_data, batching
):
    speaks_with(teacher, text_scale=0.0)
    held_out = f"--validation.path={tiny_data}", "--validation.samples=8"
    more = f"--distill.teacher={teacher}", *held_out
    assert train("copy", *COPY, *more, *batching) == 0
    assert max(Folder(tmp_path / "copy").losses().values()) < 1e-9
    [row] = Folder(tmp_path / "copy").validation()
    assert row["heldout_loss"] < 1e-9 and abs(row["text_gain"]) > 1e-6
    assert {"heldout_loss_at_1", "heldout_loss_at_0.666667"} <= row.keys()
    speaks_with(teacher, text_scale=50.0)
    assert train("guided", *COPY, *more, *batching) == 0
    assert min(Folder(tmp_path / "guided").losses().values()) > 1e-6
    assert Folder(tmp_path / "guided").validation()[0]["heldout_loss"] > 1e-6


def test_a_killed_student_ends_as_the_unbroken_one(teacher, train, tmp_path, after_step):
    given = [*STUDENT, "--training.steps=4"]
    assert train("unbroken", *given, f"--distill.teacher={teacher}") == 0
    unbroken, run = Folder(tmp_path / "unbroken"), Folder(tmp_path / "killed")
    after_step(steps := {3: killed})
    with pytest.raises(RuntimeError, match="killed"):
        train("killed", *given, f"--distill.teacher={teacher}")
    moved = teacher.rename(tmp_path / "moved")
    del steps[3]
    again = [f"--distill.teacher={moved}"]
    assert train("killed", *given, *again, "--distill.teacher_steps=3") == 2
    assert train("killed", *given, *again, "--sampling.steps=4") == 2
    assert train("killed", *given, *again) == 0
    assert run.losses() == unbroken.losses()
    wanted, found = unbroken.tensors(4), run.tensors(4)
    assert wanted.keys() == found.keys() and not any("teacher" in name for name in wanted)
    assert all(value.equal(found[name]) for name, value in wanted.items())
    # It is a model as any other, which needs no teacher.
    shutil.rmtree(moved)
    out = export(tmp_path / "killed", tmp_path / "student")
    sampling = read_exported(out)["config"]["sampling"]
    assert (sampling["steps"], sampling["text_scale"], sampling["solver"]) == (3, 0.0, "euler")


def speaks_with(teacher, **sampling):
    content = read_exported(teacher)
    content["config"]["sampling"] |= sampling
    as_by_a_stranger(teacher, CONFIG, content)


def config(teacher, *arguments):
    return load_config([*STUDENT, f"--distill.teacher={teacher}", *arguments])


def test_what_a_student_has_of_its_teacher(teacher):
    found = with_teacher(config(teacher))
    assert (found.data.max_frames, found.data.latent_channels, found.encoder.n_layers) == (32, 8, 1)
    assert found.data.conditioning == ["speaker"] and found.model.text_positions == "aligned"
    assert found.checkpoint.initial_load_path == str(teacher)
    assert found.distill.times == found.validation.times == pytest.approx([1, 2 / 3, 1 / 3])
    assert found.distill.passes == 2 * 2  # text is guided
    speaks_with(teacher, speaker_scale=1.0, steps=9, schedule="sway", solver="heun")
    again = with_teacher(config(teacher))
    assert again.distill.passes == 2 * 3 and again.distill.fingerprint != found.distill.fingerprint
    assert distillation(again).guidance.speaker_scale == 1.0
    assert with_teacher(again) == again  # as in the run's config.toml
    assert with_teacher(load_config([])) == load_config([])


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--data.max_frames=40", "[data] max_frames = 40, but with"),
        ("--model.flavor=60M", "[model] flavor = '60M'"),
        ("--data.latent_channels=64", "[data] latent_channels = 64"),
        ("--sampling.solver=heun --sampling.steps=4", "solver = 'heun', but distillation needs 'euler'"),
        ("--sampling.speaker_scale=1", "a student's [sampling] speaker_scale = 1.0"),
        ("--objective.prediction=noise", "[objective] prediction = 'noise'"),
        ("--checkpoint.initial_load_path=x", "[checkpoint] initial_load_path = 'x'"),
        ("--distill.fingerprint=0", "[distill] fingerprint = '0'"),
        ("--distill.passes=3", "[distill] passes = 3"),
        ("--benchmark.enable", "nor with [benchmark] enable = true"),
        ("--compile.enable --compile.mode=reduce-overhead", "go with [compile] mode = 'reduce-overhead'"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_with_a_teacher(teacher, arguments, words):
    refused(lambda: with_teacher(config(teacher, *arguments.split())), words)


@pytest.mark.parametrize(
    "section, key, value, words",
    [
        ("model", "flavor", "duration", "predicts lengths and generates no speech"),
        ("objective", "prediction", "noise", "its [objective] prediction = 'noise'"),
        ("sampling", "rescale_k", 1.5, "its [sampling] rescale_k = 1.5"),
        ("sampling", "guidance", "alternating", "its [sampling] guidance = 'alternating'"),
    ],
)
def test_teachers_that_cannot_teach(teacher, section, key, value, words):
    content = read_exported(teacher)
    content["config"][section][key] = value
    as_by_a_stranger(teacher, CONFIG, content)
    refused(lambda: with_teacher(config(teacher)), words, str(teacher))


def test_a_teacher_of_another_codec_vocabulary_or_form(teacher, train, tmp_path, capsys, tiny_data):
    record = {"settings": {"codec": "mel_dct", "codec_fingerprint": "other", "audio": {}}}
    (data := tmp_path / "data").mkdir()
    (data / "prepare.json").write_text(json.dumps(record))
    other = config(teacher, f"--data.path={data}")
    refused(lambda: with_teacher(other), "names another codec", "a teacher of the same codec")

    given = [*STUDENT, "--training.steps=1"]
    fewer = replace(load_vocabulary(teacher), conditioning={"speaker": ("s0", "s1", "s2")})
    as_by_a_stranger(teacher, "tokenizer.json", json.loads(to_json(fewer)))
    assert train("other", *given, f"--distill.teacher={teacher}") == 2
    assert "a teacher cannot teach what it does not know" in capsys.readouterr().err
    assert train("run", "--training.steps=1") == 0
    assert train("of_run", *given, f"--distill.teacher={tmp_path / 'run'}") == 2
    assert "run' is not an exported folder; write one from a trained run" in capsys.readouterr().err


def test_a_plan_counts_the_teacher(teacher):
    """Two steps with three branches are six passes."""
    speaks_with(teacher, speaker_scale=1.0)
    given = ["--training.local_batch_size=4", "--training.global_batch_size=8"]

    def planned(steps):
        own = with_teacher(config(teacher, *given, f"--distill.teacher_steps={steps}"))
        planner = Planner(own, Cluster(find_device("H100"), 2, 1))
        step = planner.step(planner.longest())
        plain = step.samples * training_flops(planner.model.args, step.batches.lengths)
        gathers = [each.volume for each in step.transfers if each.name == "all-gather, teacher"]
        return step.memory, step.flops - plain, sum(gathers)

    (memory, flops, gathered), (_, more_flops, more_gathered) = planned(2), planned(6)
    assert memory["teacher"] == memory["weights"] + memory["gathered weights"] > 0
    # Conditions are encoded once, so three times the passes are less than three times the FLOPs.
    assert 2.5 < more_flops / flops < 3
    assert more_gathered == pytest.approx(3 * gathered) and gathered > 0
