"""TensorBoard and Weights & Biases: what comes back from them, resumes, keys, and what is missing."""

import io
import json
import logging
import os
import sys
from itertools import count
from types import SimpleNamespace

import pytest
import soundfile
import torch
import wandb
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from torchtitan.models.dit_tts.config.manager import load_config
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.run.trackers import Trackers, check_trackers

KEY = "0123456789abcdef0123456789abcdef01234567"


def trackers(folder, *arguments: str) -> Trackers:
    config = load_config(["--metrics.no-enable-tensorboard", "--job.experiment=mine", *arguments])
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("[training]\nsteps = 20\n")
    (folder / "env.json").write_text('{"world_size": 1}')
    made = Trackers(config, folder)
    made.continue_after(0)
    return made


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), "red").save(file, "PNG")
    return file.getvalue()


def events(folder) -> EventAccumulator:
    return EventAccumulator(str(folder / "tb")).Reload()


# TensorBoard


@pytest.fixture(autouse=True)
def event_files_in_their_order(monkeypatch):
    """Those of one second are read by the writer's number in this process, 10 before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", SimpleNamespace(get=count(100).__next__))


def test_sound_pictures_and_numbers_come_back_from_tensorboard(tmp_path):
    made = trackers(tmp_path, "--metrics.enable-tensorboard")
    wave = torch.linspace(-1, 1, 800)
    made.log({"speech/one": (wave, 8000), "speech/spectrogram": png()}, 5)
    made.log({"loss": 0.5, "speed/mfu": None}, 5)
    made.close()
    found = events(tmp_path)
    assert found.Tags()["scalars"] == ["loss"] and found.Scalars("loss")[0].value == 0.5
    (audio,) = found.Audio("speech/one")
    samples, rate = soundfile.read(io.BytesIO(audio.encoded_audio_string))
    assert (audio.step, rate) == (5, 8000)
    assert torch.allclose(torch.tensor(samples).float(), wave, atol=1e-4)
    (picture,) = found.Images("speech/spectrogram")
    assert picture.step == 5
    found = Image.open(io.BytesIO(picture.encoded_image_string))
    assert found.size == (6, 4) and found.getpixel((5, 3)) == (255, 0, 0)


# Weights & Biases


class StandIn:
    """The part of the package wandb that is used; keeps what it is given."""

    Error = type("Error", (Exception,), {})

    def __init__(self):
        self.started, self.logged, self.exit_codes = [], [], []
        self.defined, self.disabled = [], False
        self.broken: Exception | None = None

    def init(self, **arguments):
        if self.broken is not None:
            raise self.broken
        self.started.append(arguments)
        return SimpleNamespace(
            **{name: arguments[name] or f"new {name}" for name in ("id", "entity", "project")},
            disabled=self.disabled,
            log=self.log,
            finish=lambda exit_code: self.exit_codes.append(exit_code),
            define_metric=lambda name, **options: self.defined.append((name, options)),
        )

    def log(self, values):
        if self.broken is not None:
            raise self.broken
        self.logged.append(values)

    Settings = staticmethod(lambda **settings: settings)
    Audio = staticmethod(lambda samples, sample_rate: (samples.tolist(), sample_rate))
    Image = staticmethod(lambda picture: picture.size)


@pytest.fixture
def stand_in(monkeypatch) -> StandIn:
    made = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", made)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return made


ENABLED = "--metrics.enable-wandb"


def test_what_wandb_is_given(tmp_path, stand_in):
    made = trackers(tmp_path, ENABLED, "--metrics.wandb_project=ours")
    sound = torch.tensor([0.5, -1.0]), 8000
    made.log({"loss": 0.5, "speed/mfu": None, "speech/one": sound, "speech/picture": png()}, 7)
    made.continue_after(6)  # a roll back opens no second run
    made.close()
    (start,) = stand_in.started
    assert (start["project"], start["name"], start["dir"]) == ("ours", "mine", str(tmp_path))
    quiet = {"console": "off", "quiet": True, "disable_git": True, "x_disable_meta": True}
    assert start["settings"] == {**quiet, "finish_timeout": 30.0}
    assert start["config"] == {"training": {"steps": 20}, "environment": {"world_size": 1}}
    assert stand_in.defined == [("step", {}), ("*", {"step_metric": "step"})]
    shown = {"speech/one": ([0.5, -1.0], 8000), "speech/picture": (6, 4)}
    assert stand_in.logged == [{"loss": 0.5, **shown, "step": 7}]
    made = trackers(tmp_path, ENABLED)
    try:
        raise RuntimeError
    except RuntimeError:
        made.close()
    assert stand_in.exit_codes == [0, 1]


def test_a_resume_continues_the_same_run_at_wandb(tmp_path, stand_in, monkeypatch):
    """Wherever it is started from: what is recorded wins over the config and the environment."""
    trackers(tmp_path, ENABLED).close()
    monkeypatch.setenv("WANDB_PROJECT", "another")
    trackers(tmp_path, ENABLED, "--metrics.wandb_project=ours").close()
    stand_in.disabled = True  # a run of no project, to which nothing may come back
    trackers(tmp_path / "other", ENABLED).close()
    assert not (tmp_path / "other/wandb.json").exists()
    found = [(each["id"], each["project"], each["entity"]) for each in stand_in.started]
    again = ("new id", "titan-tts", "new entity")
    assert found == [(None, "titan-tts", None), again, (None, "another", None)]
    assert all(each["resume"] == "allow" for each in stand_in.started)
    (tmp_path / "wandb.json").write_text('{"id": "a"}')
    with pytest.raises(InputError, match=r"wandb.json is corrupt; delete it to begin a new run"):
        trackers(tmp_path, ENABLED)
    stand_in.broken = stand_in.Error("Run initialization has timed out\nafter 90 s.")
    with pytest.raises(InputError, match=r"after 90 s\); correct that, or set WANDB_MODE"):
        trackers(tmp_path / "third", ENABLED)


def test_wandb_cannot_end_a_run(tmp_path, stand_in, caplog):
    """Its process may be ended before ours, by a signal to all processes of a job."""
    made = trackers(tmp_path, ENABLED, "--metrics.enable-tensorboard")
    stand_in.broken = ConnectionResetError("Connection lost")
    with caplog.at_level(logging.ERROR):
        for step in (1, 2):
            made.log({"loss": 0.5}, step)
        made.close()
    assert [each.step for each in events(tmp_path).Scalars("loss")] == [1, 2]
    [said] = [each.getMessage() for each in caplog.records if "W&B" in each.getMessage()]
    assert "Connection lost" in said


# Before a run starts


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A user without keys in an empty folder."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    wandb.teardown()
    yield here
    wandb.teardown()


def check(*arguments: str) -> None:
    check_trackers(load_config(list(arguments)))


@pytest.mark.long
def test_variables_of_dotenv(alone, monkeypatch):
    """Only W&B's, where it is enabled; and the environment wins."""
    with pytest.raises(InputError, match="no key for W&B was found; set WANDB_API_KEY"):
        check(ENABLED)
    monkeypatch.setenv("WANDB_API_KEY", KEY[:10])
    with pytest.raises(InputError, match=r"W&B refuses .*API key") as refused:
        check(ENABLED)
    assert KEY[:10] not in str(refused.value)
    wandb.teardown()  # it reads the environment once
    (alone / ".env").write_text("WANDB_MODE=offline\nWANDB_API_KEY=the file's\nNCCL_DEBUG=INFO\n")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    check()
    assert "WANDB_MODE" not in os.environ
    check(ENABLED)
    assert os.environ["WANDB_MODE"] == "offline" and os.environ["WANDB_API_KEY"] == KEY
    assert "NCCL_DEBUG" not in os.environ


@pytest.mark.long
def test_a_run_with_wandb(tmp_path, alone, train, monkeypatch):
    """The package itself, offline: a resume is in the same run, and no file has the key."""
    (alone / ".env").write_text(f"WANDB_MODE=offline\nWANDB_API_KEY={KEY}\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "--data.path=https://me:secret@a.com/a.tar"])
    for steps in (2, 4):
        assert train("mine", ENABLED, f"--training.steps={steps}") == 0
    wandb.teardown()  # as the end of a process: W&B's own may still be writing
    run = tmp_path / "mine"
    known = json.loads((run / "wandb.json").read_text())
    records = sorted(run.glob(f"wandb/offline-run-*/run-{known['id']}.wandb"))
    assert len(records) == len(list(run.glob("wandb/offline-run-*"))) == 2
    assert all(b"train/grad_norm" in each.read_bytes() for each in records)
    for each in run.rglob("*"):
        content = each.read_bytes() if each.is_file() else b""
        assert KEY.encode() not in content and b"me:secret" not in content, each
