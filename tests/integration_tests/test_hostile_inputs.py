"""Hostile and careless inputs: each ends in one plain sentence and status 2, or in a counted skip.

In all rows nothing hangs, no traceback is shown, no file that was there is lost or changed, no run
folder is left by a start that cannot train, and no secret or control sequence reaches the terminal.
"""

import hashlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hostile_files import (
    ESCAPE,
    fifo,
    float_wav,
    gz,
    latents,
    link,
    npy_header,
    put,
    recordings,
    resized,
    sample,
    shard,
    special,
    tar,
    wav,
)
from tests.helpers.tiny_runs import tiny_data, train  # noqa: F401
from titan_tts import cli
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts.data import remote

LIMIT_SECONDS = 20
SECRET = "hunter2"
KEPT = ("s/s.tar.idx", "in/s.tar.idx", "in/t.tar.idx", "out.partial")
"""what a command that fails may leave: indexes, and finished work"""


@dataclass
class Row:
    name: str
    given: Any
    """what stands at {in}; for a run, the files that are changed in a copy"""
    args: list[str]
    """of titan-tts; {in}, {out}, {data}, {run} and {d}, the folder of all, are filled in"""
    words: str
    """a pattern of the sentence, or of the report"""
    status: int = 2


ROWS: list[Row] = []


def row(*values: Any, **named: Any) -> None:
    ROWS.append(Row(*values, **named))


# fmt: off
SKIP = ["--on-error=skip", "--max-corrupt-fraction=1", "--workers=1", "--device=cpu"]
LEFT_OUT = "left out: 1 of 2 recordings.*undecodable: 1.*"
MANIFEST = ["prepare", "{in}/manifest.jsonl", "{out}", *SKIP]

for _name, _bad, _words in [  # of one recording of two, which is left out and counted
    ("fifo", fifo, "not a regular file"),
    ("dev zero", link("/dev/zero"), "not a regular file"),
    ("id3 tag with a huge size", b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f" + b"x" * 99, "decoded"),
    ("wav of 0 Hz", wav(rate=0), "decoded|Hz"),
    ("wav of 65535 channels", wav(channels=65535, samples=9), "decoded"),
    ("wav with inf", float_wav(float("-inf")), "infinite"),
    ("wav that states 2 GB more", wav(lie=2 * 10**9), "cut short"),
]:
    row(f"recording: {_name}", recordings(_bad), MANIFEST, LEFT_OUT + _words, 0)

for _name, _values, _words in [  # of a row of a manifest beside a good one
    ("path with a NUL", {"audio": "a\0b.wav"}, "cannot be read"),
    ("path with terminal escapes", {"audio": ESCAPE + ".wav"}, "No such file"),
    ("text as a number", {"text": 7}, "a string is needed"),
    ("text with half a surrogate pair", {"text": "a\ud800"}, "surrogate"),
    ("duration behind the end", {"offset": 0, "duration": 99, "audio": "good.wav"}, "ends after"),
]:
    row(f"manifest: {_name}", recordings(None, **_values), MANIFEST, LEFT_OUT + _words, 0)

GOOD_ROW = '{"audio": "good.wav", "text": "one", "speaker": "ann"}\n'
HEADER = "audio,text,speaker\n"
for _name, _file, _content, _words, _status in [
    ("of deep nesting", "m.jsonl", GOOD_ROW + "[" * 100000 + "\n", LEFT_OUT + "not a JSON object", 0),
    ("empty", "m.jsonl", "", "0 usable recordings", 2),
    ("csv with a field of 200 kB", "m.csv", HEADER + "good.wav," + "x" * 200000 + ",ann\n", "field", 2),
    ("arrow that is cut", "m.arrow", b"ARROW1\0\0" + bytes(99), "cannot be read as a table", 2),
    ("dev zero", "m.jsonl", link("/dev/zero"), "no known layout", 2),
]:
    row(f"list: {_name}", {_file: _content, "good.wav": wav()}, ["prepare", "{in}/" + _file, "{out}", *SKIP], _words, _status)

AUDIO = [("a.wav", wav()), ("a.json", b'{"text": "one", "speaker": "ann"}')]
for _name, _tar, _words, _status in [
    ("with a hard link", tar(AUDIO, special("b.wav", tarfile.LNKTYPE, "a.wav"), [("b.json", b"{}")]), LEFT_OUT + "or one that is a link", 0),
    ("that is cut", tar(AUDIO, [("b.wav", wav())])[:20000], LEFT_OUT + "truncated", 0),
    ("that states a huge member", resized(tar(AUDIO), 1 << 60), "0 usable recordings", 2),
]:
    row(f"audio tar: {_name}", {"c.tar": _tar}, ["prepare", "{in}/c.tar", "{out}", *SKIP], _words, _status)

LISTED = recordings(wav())
for _name, _args, _words in [
    ("a source with terminal escapes", ["{in}/" + ESCAPE, "{out}"], r"\\x1b.*no known layout"),
    ("an output below a file", ["{in}/manifest.jsonl", "{in}/good.wav/out"], "cannot be written"),
    ("an output that is a folder of others", ["{in}/manifest.jsonl", "{in}"], "not replaced"),
    ("a corrupt recording, not skipped", ["{in}/bad.jsonl", "{out}", "--workers=1"], "bad: .*NaN.*--on-error skip"),
    ("too many corrupt ones", ["{in}/bad.jsonl", "{out}", "--workers=1", "--on-error=skip"], "1 of 2 recordings are corrupt"),
]:
    row(f"prepare: {_name}", LISTED | {"nan.wav": float_wav(float("nan")), "bad.jsonl": GOOD_ROW + GOOD_ROW.replace("good", "nan").replace("{", '{"key": "bad", ')}, ["prepare", *_args], _words)
for _file, _bad in [("w.pth", fifo), ("w.pth", b"cos\nsystem\n(S'true'\ntR."), ("w.safetensors", b"\xff" * 99)]:
    row(f"prepare: a codec in {_file} of {str(_bad):.9}", LISTED | {_file: _bad}, ["prepare", "{in}/manifest.jsonl", "{out}", "--codec={in}/" + _file], _file)

for _name, _bad, _words in [  # beside twenty good samples: a start refuses it
    ("with a shape of 2^62", sample(array=npy_header("{'descr': '<f2', 'fortran_order': False, 'shape': (4611686018427387904, 8), }\n")), "shape"),
    ("with deep brackets as its header", sample(array=npy_header("(" * 3000)), "not an npy array"),
    ("of json of 17 MB", sample(text=b" " * (17 << 20)), "at most"),
    ("with a fifo as its latents", special("bad.npy", tarfile.FIFOTYPE) + sample()[1:], "lacks .npy"),
    ("with terminal escapes in its key", sample(key=ESCAPE, array=b""), r"\\x1b"),
]:
    row(f"sample: {_name}", {"s.tar": shard(_bad)}, ["train", "--data.path={in}"], f"s.tar: .*{_words}")
row("skipped sample", {"s.tar": shard(sample(array=b""))}, ["data", "inspect", "{in}", "--latent-channels=8"], "problems in the shards: 1", 0)

SHARD = shard()
for _name, _tar, _words in [
    ("with a huge size", resized(SHARD, 1 << 60), "truncated"),
    ("fifo", fifo, "matches no .tar|not a regular file"),
]:
    row(f"shard: {_name}", {"s.tar": _tar, "t.tar": SHARD}, ["train", "--data.path={in}/s.tar"], _words)

for _name, _toml, _words in [
    ("that is binary", bytes(range(256)), "not valid TOML"),
    ("of deep nesting", "a = " + "[" * 100000, "not valid TOML"),
    ("with terminal escapes", f'["{ESCAPE}"]\n'.replace("\x1b", "\\u001b").replace("\x07", "\\u0007"), r"unknown section \[\\x1b"),
    ("that is endless", link("/dev/zero"), "not a regular file|cannot read"),
]:
    row(f"config: {_name}", _toml, ["train", "--job.config_file={in}"], _words)

for _args, _words in [  # rules of single keys are in unit_tests/config
    (f"--training.steps={2**70}", "steps = 11805"), ("--training.global_batch_size=7", "is not a multiple of local_batch_size"),
    ("--encoder.model={data}", "data"), ("--checkpoint.load_step=7", "step-7"), ("--data.path=/dev/zero", "matches no .tar"), ("--data.path={d}/a\0b", "matches no .tar"),
    ("--data.path={{1..", "matches no .tar|not a pattern"), ("--data.path={data}/000000.tar,{data}", "twice"),
    ("--data.max_frames=4", "none of the 42 samples fits"), ("--data.max_frames=9", "leaves out"), ("--data.latent_channels=64", "8 wide"), ("--data.balance_by=quality", "no sample's JSON"),
    ("--job.experiment=" + "x" * 300, "at most 255 bytes"), ("--job.experiment=" + ESCAPE, "experiment"), ("--job.dump_folder={data}/000000.tar", "cannot be written"), ("--job.dump_folder=/dev/full", "cannot be written"),
]:
    row(f"train {_args[:40]!a}", None, ["train", _args], _words)

RESUME = ["train", "--data.latent_channels=128", "--data.path={wide}", "--job.dump_folder={d}", "--job.experiment=copy"]
CHARS = "--encoder.model=chars"
WIDE = [CHARS, "--data.latent_channels=128"]
for _name, _given, _args, _words in [
    ("other conditioning", {}, [CHARS, "--training.steps=4", "--data.conditioning=speaker"], "conditioning|tokens|tokenizer"),
    ("other data", {"../s/s.tar": tar(*(sample(f"k{n}", latents(width=128), latents(width=128)) for n in range(20)))}, [CHARS, "--training.steps=4", "--data.path={d}/s"], "dataset|data"),
]:
    row(f"resume: {_name}", _given, [*RESUME, *_args, "{copy}"], _words)

SAY = ["generate", "{copy}", "--text=one", "--speaker=s1", "--seconds=1", "--out={d}/x.wav"]
REFER = ["generate", "{copy}", "--text=one", "--seconds=1", "--out={d}/x.wav", "--reference={d}/r.wav"]
for _name, _given, _args, _words in [
    ("a duration of 1e9", {}, ["--seconds=1e9"], "--seconds = 1000000000.0"), ("a text of control characters", {}, ["--text=" + ESCAPE], "not trained with"),
    ("a text of half a surrogate pair", {}, ["--text=\udcff"], "not trained with"), ("a text of 1 MB", {}, ["--text=" + "one " * 250000], "999999 characters"),
    ("an output that is a folder", {"../x.wav/y": b""}, [], "cannot be written"), ("an output with a NUL", {}, ["--out={d}/a\0.wav"], "cannot be written"),
    ("a binary config", {"config.toml": b"\0\xff"}, [], "not valid TOML"), ("a tokenizer that is a list", {"tokenizer.json": "[]"}, [], "tokenizer.json"),
    ("a manifest that is cut", {"checkpoint/step-2/manifest.json": "{"}, [], "manifest.json is corrupt"),
    ("a manifest with a path outside", {"checkpoint/step-2/manifest.json": '{"files": {"../../config.toml": {"bytes": 1, "xxh3": ""}}, "trained_with": {}}'}, [], "does not list .metadata"),
    ("weights that are cut", {"checkpoint/step-2/__0_0.distcp": b"x"}, [], "other bytes"), ("a table that is a pickle", {"checkpoint/step-2/.metadata": b"cos\nsystem\n(S'true'\ntR."}, [], "other bytes"),
]:
    row(f"generate: {_name}", _given, [*SAY, *_args], _words)
for _name, _bad, _words in [("fifo", fifo, "no such file"), ("with nan", float_wav(float("nan")), "NaN")]:
    row(f"reference: {_name}", {"../r.wav": _bad}, REFER, _words)

WORDS = "--recognizer=words:one,two"
for _name, _given, _args, _words, _status in [
    ("generate of nothing", None, ["generate", "{d}/nowhere", "--text=a", "--speaker=b", "--out={d}/x.wav"], "nowhere does not exist", 2),
    ("generate of a binary list", {"../l": b"\0\xff"}, ["generate", "{copy}", "--text-list={d}/l", "--out={d}/o"], "give utf-8 text", 2),
    ("evaluate on a bad list", {"x.lst": "a|b|c|d\na|b"}, ["evaluate", "{copy}", "--test={copy}/x.lst", WORDS], "x.lst line 1: .* does not exist", 2),
    ("verify without checkpoints", {"config.toml": ""}, ["checkpoint", "verify", "{in}"], "has no checkpoints", 2),
    ("verify of a changed byte", {"checkpoint/step-2/__0_0.distcp": b"x"}, ["checkpoint", "verify", "{copy}"], "step-2: .*other bytes", 1),
    ("inspect of another width", {"s.tar": SHARD}, ["data", "inspect", "{in}"], "8 wide", 2),
    ("doctor of all at once", {"s.tar": shard(sample(key=ESCAPE, array=b"")), "t.tar": b"", "u.tar": gz(SHARD)}, ["data", "doctor", "{in}", "--latent-channels=8", "--output={d}/out"], "empty file", 1),
    ("doctor onto another file", {"s.tar": SHARD}, ["data", "doctor", "{in}", "--output={in}/s.tar"], "is not overwritten", 2),
]:
    row(_name, _given, _args, _words, _status)

for _name, _url, _words in [
    ("an unknown scheme", "banana://user:hunter2@host/x.tar", "banana"), ("a refusing host", "http://user:hunter2@127.0.0.1:1/x.tar", "127.0.0.1:1.*tried 5 times"),
    ("a broken address", "http://[::1/x.tar", "URL"),
]:
    row(f"url: {_name}", None, ["train", "--data.path=" + _url], _words)
row("a recording of a url", recordings(None, name="http://user:hunter2@127.0.0.1:1/a.wav"), MANIFEST, LEFT_OUT, 0)
# fmt: on


_made: dict[str, Path] = {}


@pytest.fixture
def trained(train, tmp_path, tmp_path_factory):  # noqa: F811
    """A run of two steps and its data, made once; not to be changed."""
    if not _made:  # by a fixture of one test
        folder = tmp_path_factory.mktemp("trained")
        _made["wide"] = make_shards(
            folder / "wide", 40, frames=lambda generator: int(generator.integers(8, 33))
        )
        assert train("run", "--training.steps=2", *WIDE, f"--data.path={folder}/wide") == 0
        _made["run"] = Path(shutil.move(tmp_path / "run", folder))
    return _made


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Kind and content of everything below a folder."""
    found = {}
    for path in folder.rglob("*"):
        state = path.lstat()
        kind, size = stat.S_IFMT(state.st_mode), 0
        if kind == stat.S_IFREG:
            size = state.st_size
        content = path.read_bytes() if 0 < size < 1 << 26 else b""
        found[str(path.relative_to(folder))] = (kind, size, hashlib.sha256(content).hexdigest())
    return found


class TooLong(BaseException):
    """No handler of the product takes it."""


def ring(*_: object) -> None:
    raise TooLong(f"still at work after {LIMIT_SECONDS} s")


@pytest.mark.long
@pytest.mark.parametrize("case", ROWS, ids=[each.name for each in ROWS])
def test_hostile_input(case, train, trained, tiny_data, tmp_path, capfd, monkeypatch):  # noqa: F811
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.with_name(tmp_path.name + "-cache")))
    monkeypatch.chdir(tmp_path)
    places = {"d": tmp_path, "in": tmp_path / "in", "out": tmp_path / "out", "data": tiny_data}
    places |= {"run": trained["run"], "wide": trained["wide"]}
    if "{copy}" in " ".join(case.args):
        places["copy"] = shutil.copytree(trained["run"], tmp_path / "copy")
        for name, content in case.given.items():
            put(tmp_path / "copy" / name, content)
    elif case.given is not None:
        put(tmp_path / "in", case.given)
    args = [arg.format(**places) for arg in case.args if arg != "{copy}" or case.args[0] != "train"]
    before = snapshot(tmp_path)
    capfd.readouterr()
    handler = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    try:
        status = (
            train("out", "--training.steps=1", *args[1:]) if args[0] == "train" else cli.main(args)
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    out, err = capfd.readouterr()
    after = snapshot(tmp_path)
    shown = out + err
    assert status == case.status, shown
    assert "Traceback" not in shown and SECRET not in shown and "\x1b" not in shown, shown
    assert {name: after.get(name) for name in before} == before
    if status == 2:
        added = {name for name in after if not name.startswith(KEPT) and name not in before}
        assert not added, added
        sentences = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(sentences) == 1 and err.splitlines()[-1] == sentences[0], shown
        shown = sentences[0]
    shown = " ".join(shown.split())
    assert re.search(case.words, shown), shown


FEW_FILES = """
import os, resource, sys
from titan_tts import cli
from titan_tts.doctor import page, summary
first = os.dup(0)
os.close(first)
resource.setrlimit(resource.RLIMIT_NOFILE, (first + int(sys.argv[1]), 99))
sys.exit(cli.main(["data", "inspect", sys.argv[2], "--latent-channels=8"]))
"""


@pytest.mark.long
@pytest.mark.parametrize("files, status", [(1, 2), (64, 0)])
def test_few_file_descriptors(tmp_path, files, status):
    for number in range(40):
        put(tmp_path / f"{number}.tar", SHARD)
    command = [sys.executable, "-c", FEW_FILES, str(files), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    assert ("Too many open files" in done.stderr) == bool(status)
