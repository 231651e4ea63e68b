"""The models that come with the package: titan_tts:NAME, and the one that speaks where none is named."""

from pathlib import Path

import pytest
import soundfile
import torch

from tests.helpers.exported_run import CONDITIONED, export
from tests.helpers.sentences import refused
from titan_tts import from_pretrained
from titan_tts.cli import main
from titan_tts.speak.open_run import find_folder
from titan_tts.speak.sampling_options import SamplingOptions, load_synthesizer
from titan_tts.speak.utterance import Utterance, Voice
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.config import shipped
from torchtitan.models.dit_tts.config.manager import load_config, load_run_config

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed")]

ONE_STEP = "--sampling-steps=2"


@pytest.fixture
def voices(train, tmp_path, tmp_path_factory, monkeypatch) -> Path:
    """The folder of two models, base and base_fast, whose first voices are neither the first by name nor the same."""
    made = tmp_path_factory.getbasetemp() / "shipped-voices"
    if not made.exists():
        make_shards(tmp_path / "data", 16, channels=128, frames=lambda _: 16)
        real = [f"--data.path={tmp_path / 'data'}", "--data.latent_channels=128"]
        assert train("run", "--training.steps=1", *real, *CONDITIONED) == 0
        for name, speakers in (("base", "s2 s0 s1"), ("base_fast", "s1 s3")):
            chosen = [f"--voices={each}" for each in speakers.split()]
            export(tmp_path / "run", made / name, "--weights=raw", "--dtype=bfloat16", *chosen)
        (made / "README.md").write_text("no model")
    monkeypatch.setattr(shipped, "voices_folder", lambda: made)
    monkeypatch.chdir(tmp_path)
    find_folder.cache_clear()
    yield made
    find_folder.cache_clear()


def said(*arguments: str) -> tuple:
    assert main(["generate", *arguments, "--text=one two", ONE_STEP, "--out=a.wav"]) == 0
    return soundfile.read("a.wav")[0].tolist()


def test_one_speaks_where_none_is_named(voices, capsys):
    """The first of the --voices of its export, which the log names, with all others."""
    speech = said()
    assert "voice: s2; --speaker chooses another: s0, s1\n" in capsys.readouterr().err
    assert speech == said(str(voices / "base"), "--speaker=s2")
    assert speech != said("--speaker=s0") == said("titan_tts:base", "--speaker=s0")
    assert "voice:" not in capsys.readouterr().err
    assert speech != said("titan_tts:base_fast") == said("titan_tts:base_fast", "--speaker=s1")
    assert "voice: s1; --speaker chooses another: s3\n" in capsys.readouterr().err

    # Three lines of Python; whoever wants no particular voice says so.
    model = from_pretrained(sampling_steps=2)
    [own, nobody] = model.synthesize(["one two"] * 2, [None, Voice()])
    own.save("b.WAV")
    assert soundfile.read("b.WAV")[0].tolist() == speech
    assert not torch.equal(own.waveform, nobody.waveform)
    refused(lambda: own.save("b.doc"), "b.doc: a sound's name ends with one of .wav")


def test_a_list_says_each_text_in_its_own_voice(voices, tmp_path, capsys):
    lines = ['{"text": "one"}', '{"text": "one", "speaker": "s0"}']
    lines.append('{"text": "one", "conditions": {"speaker": "s3"}}')
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    assert main(["generate", "--text-list=list.jsonl", "--out=said", ONE_STEP]) == 0
    assert capsys.readouterr().err.count("voice: s2") == 1
    model = from_pretrained(sampling_steps=2)
    # A token of its own takes no other's reference.
    token = Utterance("one", conditions={"speaker": "s3"})
    for number, speech in enumerate(model.synthesize(["one", "one", token], [None, "s0", None]), 1):
        speech.save("a.wav")
        assert Path("a.wav").read_bytes() == Path(f"said/00000{number}.wav").read_bytes()
    [without] = model.synthesize([Utterance("one")])
    assert not torch.equal(speech.waveform, without.waveform)


@pytest.mark.parametrize(
    "command",
    [
        "generate titan_tts:other --text=one",
        "evaluate titan_tts:base titan_tts:other@best --test=data --recognizer=words:one",
        "serve titan_tts:other --port=0",
        "export titan_tts:other new",
        "convert titan_tts:other new --to=echo",
        "checkpoint verify titan_tts:other",
        "finetune titan_tts:other data new",
        "train debug --checkpoint.initial_load_path=titan_tts:other",
        "train distill --distill.teacher=titan_tts:other",
    ],
)
def test_an_unknown_name_is_refused_with_the_known(voices, command, capsys):
    assert main(command.split()) == 2
    known = "it has: titan_tts:base, titan_tts:base_fast"
    expected = f"error: the package has no model 'titan_tts:other'; {known}\n"
    assert capsys.readouterr().err == expected


def test_all_commands_find_the_folder(voices, tmp_path, monkeypatch, capsys):
    base = str(voices / "base")
    config = ["--checkpoint.initial_load_path=titan_tts:base", "--distill.teacher=titan_tts:base"]
    resolved = load_config(config)
    assert resolved.checkpoint.initial_load_path == resolved.distill.teacher == base
    assert main(["checkpoint", "verify", "titan_tts:base"]) == 0
    assert main(["export", "titan_tts:base", "new"]) == 2
    streams = capsys.readouterr()
    assert streams.out == f"{base}: valid\n" and f"{base} is an exported folder" in streams.err
    served = load_synthesizer(SamplingOptions())
    assert served.run.folder == voices / "base" and served.default_voice.speaker == "s2"
    monkeypatch.setattr(shipped, "voices_folder", lambda: tmp_path / "nothing")
    find_folder.cache_clear()
    assert main(["generate", "--text=one"]) == 2
    assert "no model 'titan_tts:base'; it has: none" in capsys.readouterr().err


def test_the_base_speaks_in_few_steps():
    """As was measured, and so do the voices that are fine-tuned from it."""
    folder = Path(shipped.shipped_path(shipped.BASE))
    own = load_run_config(folder).sampling
    assert (own.steps, own.schedule, own.sway) == (8, "sway", -0.5)
    tuned = load_config(["--job.config_file", str(folder / "fine_tune.toml")]).sampling
    assert (tuned.steps, tuned.schedule, tuned.sway) == (8, "sway", -0.5)
