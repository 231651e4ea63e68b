"""The world of the documents' commands: recordings, prepared data, runs, models of the hub, all small.

A page is followed in a folder of its own, like a checkout whose reader has done what the page takes for
granted. Only what `as_here` names is changed in the printed commands, and trainings are small (SMALL).
"""

import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet
import soundfile
import torch
from safetensors.torch import save_file

from tests.helpers import speech_corpora as corpora
from tests.helpers.benchmark_runs import combinations, write_grid
from tests.helpers.echo_style import Sizes, random_weights
from tests.helpers.pretrained_checkpoints import gemma_tokenizer, write_tiny_t5gemma2
from tests.helpers.speech_checkpoints import write_tiny_wavlm, write_tiny_whisper
from tools.harness.dac_vae_checkpoints import write_tiny_dac_vae
from tools.harness.forked import ROOT, environment

# The size of every training, whatever the page says. The later of two equal options counts.
SMALL = (
    "--model.flavor=debug --training.global_batch_size=8 --training.local_batch_size=4 --data.batch_multiple=4"
    " --data.num_buckets=2 --data.max_dropped_fraction=1 --training.mixed_precision_param=float32"
    " --compile.no-enable --activation_checkpoint.mode=none --checkpoint.interval=2 --validation.freq=2"
    " --validation.samples=4 --sampling.steps=2 --samples.count=1 --metrics.log_freq=1"
    " --lr_scheduler.warmup_steps=1 --sampling.codec=mel_dct"
)
STEPS = 2  # of a training on a page
BASE_STEPS = 16  # of the run that pages start from

_SHIPPED = SMALL.replace("--model.flavor=debug ", "")  # a base that has a size of its own
_DURATION = SMALL.replace("--model.flavor=debug", "--model.flavor=duration")
_PROGRAM = f"""#!/bin/sh
case " $* " in
" plan "*) exec {{program}} "$@" --model.flavor=debug --compile.no-enable --activation_checkpoint.mode=none ;;
" finetune titan_tts:"*) exec {{program}} "$@" {_SHIPPED} --steps={STEPS} --max-utterances=2 ;;
" finetune "*) exec {{program}} "$@" {SMALL} --steps={STEPS} --max-utterances=2 ;;
*" --dry-run"* | *" --help"*) exec {{program}} "$@" ;;
" train duration "*) exec {{program}} "$@" {_DURATION} --training.steps={STEPS} ;;
" train "*) exec {{program}} "$@" {SMALL} --training.steps=${{{{STEPS:-{STEPS}}}}} ${{{{STEPS:+--validation.freq=8}}}} ;;
esac
exec {{program}} "$@"
"""
_HUB = {
    "openai/whisper-large-v3": write_tiny_whisper,
    "openai/whisper-small": write_tiny_whisper,
    "microsoft/wavlm-base-plus-sv": write_tiny_wavlm,
    "google/t5gemma-2-270m-270m": write_tiny_t5gemma2,
    "google/t5gemma-2-1b-1b": write_tiny_t5gemma2,
    "facebook/dacvae-watermarked": write_tiny_dac_vae,
}


def as_here(command: str, folder: Path, last_step: int) -> str:
    """A command as printed, with the paths, sizes, steps and devices that are here."""
    command = re.sub(r"(?<![\w./])/(data|models|tmp)/", rf"{folder}/root/\1/", command)
    steps = r"(?<=step-)\d{3,}|(?<=@)\d{4,}"
    for saved, step in enumerate(sorted(set(re.findall(steps, command)), key=int, reverse=True)):
        command = re.sub(rf"(?:{steps})(?<=\D{step})\b", str(last_step - 2 * saved), command)
    command = re.sub(r"(?<=--nproc )8|(?<=--nproc-per-node )8", "2", command)
    command = command.replace("..000099}.tar", "..000001}.tar")
    command = re.sub(r"(--benchmark.steps) \d+", r"\1 3", command)
    command = re.sub(r"(--heldout-fraction) 0\.[01]\d?\b", r"\1 0.3", command)
    command = command.replace("--device cuda", "--device cpu").replace('"..."', '"two four"')
    return command.replace("| aplay", "| cat > played.wav")


@dataclass(frozen=True)
class World:
    """The small things, made once."""

    folder: Path
    program: Path  # the command without the seconds of its start
    hub: dict[str, str]  # variables of the environment

    def page(self, folder: Path, assumed: Sequence[str]) -> "Reader":
        """A folder in which a page can be followed; `assumed` are paths there."""
        for entry in _tracked():
            if entry not in ("assets", "benchmarks"):  # which write beside themselves
                (folder / entry).symlink_to(ROOT / entry)
        shutil.copytree(ROOT / "benchmarks", folder / "benchmarks")
        shutil.copytree(self.folder / "assets", folder / "assets", copy_function=os.link)
        programs = folder / ".venv/bin"
        programs.mkdir(parents=True)
        installed = ROOT / ".venv"
        for entry in [*(installed / "bin").iterdir(), *installed.iterdir()]:
            if entry.name != "bin" and not entry.name.startswith("ready-"):
                (folder / ".venv" / entry.relative_to(installed)).symlink_to(entry)
        for extras in ("speech", "speech,pretrained", "speech,whisper-tiny", "dev"):
            shutil.copy(ROOT / "pyproject.toml", folder / ".venv" / f"ready-{extras}")
        own = programs / "titan-tts"
        own.unlink(missing_ok=True)
        own.write_text(_PROGRAM.format(program=self.program))
        own.chmod(0o755)
        for path in assumed:
            place = folder / "root" / path[1:] if path.startswith("/") else folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            _copy(self.folder / _source(path), place)
        starts_from_a_run = any(path.startswith("outputs/") for path in assumed)
        last_step = BASE_STEPS if starts_from_a_run else STEPS
        return Reader(folder, self._environment(folder), last_step)

    def _environment(self, folder: Path) -> dict[str, str]:
        places = {"HOME": f"{folder}/home", "XDG_CACHE_HOME": f"{folder}/home/.cache"}
        (folder / "home").mkdir()
        found = f"{folder}/.venv/bin:{os.environ['PATH']}"
        own = environment(PATH=found, **places, **self.hub)
        own.pop("PYTHON", None)  # which scripts/setup.sh was given
        return own


@dataclass(frozen=True)
class Reader:
    """Who follows a page in its folder."""

    folder: Path
    environment: dict[str, str]
    last_step: int  # of the checkpoints that the page names

    def path(self, printed: str) -> Path:
        return Path(self.folder, as_here(printed, self.folder, self.last_step))

    def run(self, script: str, **variables: str) -> str:
        """Runs commands in bash, which must succeed. Returns what they printed."""
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", as_here(script, self.folder, self.last_step)],
            cwd=self.folder,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=600,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-6000:]}"
        return done.stdout

    def start(self, script: str) -> subprocess.Popen:
        """Starts a server."""
        return subprocess.Popen(
            ["bash", "-ec", f"exec env {as_here(script, self.folder, self.last_step)}"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )


def write_hub(folder: Path) -> dict[str, str]:
    """Makes a cache of the hub in `folder`. Returns the environment in which it is used."""
    for name, write in _HUB.items():
        model = folder / "hub" / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True)
        (model / "refs/main").write_text("0" * 40)
        (model / "snapshots" / ("0" * 40)).mkdir(parents=True)
        write(model / "snapshots" / ("0" * 40))
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}


def build(folder: Path, program: Path, hub: dict[str, str]) -> World:
    folder.mkdir(parents=True)
    utterances = corpora.speech(each=12)
    _write_list(folder / "recordings", utterances, {"kal16": "anna"})
    one_voice = [each for each in utterances if each.speaker == "awb"]
    _write_podcast(folder / "podcasts", utterances)
    _write_list(folder / "one_voice", one_voice, {"awb": "new"})
    corpora.write_ljspeech(folder / "ljspeech", one_voice)
    corpora.write_libritts_r(folder / "libritts_r", utterances)
    [table] = corpora.write_parquet(folder / "parquet", utterances).iterdir()
    rows = pyarrow.parquet.read_table(table).rename_columns({"speaker_id": "voice"})
    pyarrow.parquet.write_table(rows, table)
    tars = corpora.write_webdataset(folder / "tars", utterances)
    for number, tar in enumerate(sorted(tars.iterdir())):
        tar.rename(tar.with_name(f"EN-B{number:06d}.tar"))
    _write_list(folder / "patterned", utterances, {}, speakers=False)
    (folder / "dacvae").mkdir()
    write_tiny_dac_vae(folder / "dacvae")
    gemma_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "irodori").mkdir()
    header = {"text_tokenizer_repo": "some/tokenizer", "fixed_target_latent_steps": 100}
    weights = random_weights(Sizes(channels=128, vocabulary=700), torch.float32)
    save_file(weights, folder / "irodori/model.safetensors", {"config_json": json.dumps(header)})
    write_grid(folder / "grid", combinations(batch=[8, 16], compile=["off", "default"]), 2, 0.01)
    shutil.copytree(ROOT / "assets", folder / "assets")
    _shorten(folder / "assets/spoken_digits/spoken_digits.tar")
    world = World(folder, program, hub)
    page = folder / "maker"
    page.mkdir()
    reader = world.page(page, ())
    (page / "made").symlink_to(folder)
    digits = "outputs/data/spoken_digits"
    reader.run(f"titan-tts prepare made/recordings {digits} --heldout-fraction 0.2")
    reader.run("titan-tts prepare made/one_voice made/one_voice_ready --heldout-fraction 0.3")
    reader.run("titan-tts train debug", STEPS=str(BASE_STEPS))
    reader.run("titan-tts train duration")
    reader.run("titan-tts export outputs/debug voice --voices slt --voices rms")
    return world


def files_of_the_checkout() -> str:
    """Changed and new files of the repository, as git sees them."""
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _tracked() -> list[str]:
    """Top-level files and folders of the repository."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return sorted({line.partition("/")[0] for line in listed})


def _source(path: str) -> str:
    """Where the world has what a page takes for granted at `path`."""
    known = {
        "/data/LJSpeech-1.1": "ljspeech",
        "/data/LibriTTS_R": "libritts_r",
        "/data/podcasts": "podcasts",
        "/data/recordings": "recordings",
        "/data/speech": "recordings",
        "/data/mine/train.jsonl": "recordings/manifest.jsonl",
        "/data/vctk.jsonl": "patterned/manifest.jsonl",
        "/data/emilia": "tars",
        "/data/hub/datasets--x--y/snapshots/1a2b/data": "parquet",
        "recordings.jsonl": "recordings/manifest.jsonl",
        "voice.jsonl": "one_voice/manifest.jsonl",
        "/models/dacvae": "dacvae",
        "dacvae": "dacvae",
        "/models/irodori": "irodori",
        "/models/tokenizer": "tokenizer",
        "outputs/my_grid": "grid",
        "outputs/data": "maker/outputs/data",
        "outputs/duration": "maker/outputs/duration",
        "voice": "maker/voice",
    }
    if path in known:
        return known[path]
    if path.startswith("outputs/"):
        return "maker/outputs/debug"
    if path.startswith(("/data/voice", "/data/new")):
        return "one_voice_ready"
    if path.startswith("/data/"):
        return "maker/outputs/data/spoken_digits"
    return f"recordings/wavs/{path}"


def _copy(source: Path, place: Path) -> None:
    if source.is_dir():
        # Checkpoints are replaced and never written into, so that their files can be the same.
        shutil.copytree(source, place, copy_function=os.link)
    else:
        shutil.copy(source, place)


def _shorten(corpus: Path) -> None:
    """Leaves every sixth utterance of each voice."""
    whole = corpus.rename(corpus.with_suffix(".whole"))
    with tarfile.open(whole) as tar, tarfile.open(corpus, "w") as short:
        for member in tar:
            if int(re.search(r"-(\d+)\.", member.name)[1]) % 6 == 0:
                short.addfile(member, tar.extractfile(member))
    whole.unlink()


def _write_podcast(folder: Path, utterances: list[corpora.Speech]) -> None:
    """Two recordings of all voices in turn, with pauses of a second."""
    pause = np.zeros(corpora.RATE, np.float32)
    folder.mkdir()
    for number in range(2):
        parts = [part for one in utterances[number::6] for part in (pause, one.samples)]
        soundfile.write(folder / f"{number}.wav", np.concatenate([*parts, pause]), corpora.RATE)


def _write_list(
    folder: Path, utterances: list[corpora.Speech], names: dict[str, str], speakers: bool = True
) -> None:
    """manifest.jsonl with absolute paths to wavs/, and the first recording as wavs/voice.wav."""
    (folder / "wavs").mkdir(parents=True)
    lines = []
    for number, one in enumerate(utterances):
        path = folder / "wavs" / (f"{one.key}.wav" if speakers else f"p{number % 4}_{number}.wav")
        soundfile.write(path, one.samples, corpora.RATE, subtype="PCM_16")
        # A key from the path would hold out other recordings in each of pytest's folders.
        row = {"key": path.stem, "audio": str(path), "text": one.text}
        row |= {"speaker": names.get(one.speaker, one.speaker)} if speakers else {}
        lines.append(json.dumps(row) + "\n")
    (folder / "manifest.jsonl").write_text("".join(lines))
    first = json.loads(lines[0])["audio"]
    for name in ("voice.wav", "someone.wav"):
        shutil.copy(first, folder / "wavs" / name)
