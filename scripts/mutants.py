#!/usr/bin/env python
"""Breaks the product in one place at a time and asks whether the tests see it.

    python scripts/mutants.py [NAME ...] [--jobs N] [--list]

A mutant is a small change that would ruin a user's run: clipping off, the loss divided by padded
frames, guidance ignored. tests/mutants/*.toml holds them, a table each:

    [[mutant]]
    name = "clipping_off"
    file = "trainer.py"             # below torchtitan/models/dit_tts
    old = "self.job_config.training.max_norm, foreach=True"
    new = "float('inf'), foreach=True"
    tests = ["test_train_step.py"]  # below tests/unit_tests; the file's own `tests` by default

`old` must stand exactly once in the file. A mutant that nothing can catch has a sentence in
`survives`. No file is changed: this process imports what the tests need except the product, forks
for each mutant, and the child's import system compiles the changed source. A child fails if it
imports a broken module; it counts only if a test ran and failed.

Exit status: 0 if every mutant is caught or explained, 1 otherwise.
"""

import argparse
import importlib
import importlib.machinery
import json
import os
import signal
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ROOT / "torchtitan/models/dit_tts"
OURS = ("torchtitan.models.dit_tts", "tests", "titan_tts")
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    def source(self) -> str:
        """The file with the change.

        Raises:
            ValueError: `old` does not stand in the file exactly once.
        """
        text = (PRODUCT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: `old` stands {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass
class Result:
    status: int
    """pytest's: 0 if all passed, 1 if a test failed; negative: the signal that ended the child"""

    seconds: float
    test: str
    """the first that failed"""


def read_mutants() -> list[Mutant]:
    mutants = []
    for path in sorted((ROOT / "tests/mutants").glob("*.toml")):
        table = tomllib.loads(path.read_text())
        for entry in table["mutant"]:
            tests = tuple(entry.pop("tests", table.get("tests", ())))
            mutants.append(Mutant(tests=tests, **entry))
    names = [mutant.name for mutant in mutants]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"mutants of one name: {', '.join(sorted(twice))}")
    return mutants


def compile_instead(mutant: Mutant) -> None:
    """From now on the mutant's file is imported with its change."""
    path, source = str(PRODUCT / mutant.file), mutant.source()
    get_code = importlib.machinery.SourceFileLoader.get_code

    def changed(loader, name):
        if loader.get_filename(name) == path:
            return compile(source, path, "exec")
        return get_code(loader, name)

    importlib.machinery.SourceFileLoader.get_code = changed


class FirstFailure:
    """A plugin of pytest: the first test that failed."""

    test = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.test:
            self.test = report.nodeid


def fork(tests: tuple[str, ...], mutant: Mutant | None, log: Path) -> tuple[int, int]:
    """Starts pytest in a child. Returns its pid and a pipe from which its first failure comes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 3
    try:
        import pytest

        if mutant is not None:
            compile_instead(mutant)
        seen = FirstFailure()
        paths = [str(ROOT / "tests/unit_tests" / test) for test in tests]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
        status = int(pytest.main([*options, *paths], plugins=[seen]))
        os.write(writing, seen.test.encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # without the exit handlers of the parent


def run_all(jobs: dict[str, tuple[tuple[str, ...], Mutant | None]], at_once: int, logs: Path):
    """Runs jobs, name -> (tests, mutant); yields (name, result) as each ends."""
    waiting, running = list(jobs), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            tests, mutant = jobs[name]
            pid, pipe = fork(tests, mutant, logs / f"{name}.log")
            running[pid] = (name, pipe, time.monotonic())
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            name, pipe, began = running.pop(pid)
            with os.fdopen(pipe) as failure:
                test = failure.read()
            code = os.waitstatus_to_exitcode(status)
            yield name, Result(code, time.monotonic() - began, test)
            continue
        for pid, (_, _, began) in running.items():
            if time.monotonic() - began > TIMEOUT_SECONDS and jobs[running[pid][0]][1] is not None:
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)


def import_what_tests_need(mutants: list[Mutant]) -> None:
    """Imports every module that the tests import, but for the product's: a child starts with them."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        files = sorted({test.split("::")[0] for mutant in mutants for test in mutant.tests})
        for file in files:
            importlib.import_module(f"tests.unit_tests.{Path(file).stem}")
        names = [name for name in sys.modules if not name.startswith(OURS)]
        os.write(writing, json.dumps(names).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        names = json.loads(lines.read())
    os.waitpid(pid, 0)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # parts of packages that make their own modules
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="mutants to try; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="children at once")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    parser.add_argument("--logs", default="/tmp/mutants", help="folder for pytest's output")
    options = parser.parse_args()
    mutants = [m for m in read_mutants() if not options.names or m.name in options.names]
    unknown = set(options.names) - {mutant.name for mutant in mutants}
    if unknown or not mutants:
        parser.error(f"no mutant is named {', '.join(sorted(unknown)) or 'anything'}")
    for mutant in mutants:
        compile(mutant.source(), mutant.file, "exec")
        if options.list:
            print(f"{mutant.name:40} {mutant.file}")
    if options.list:
        return 0

    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    logs = Path(options.logs)
    logs.mkdir(parents=True, exist_ok=True)
    import_what_tests_need(mutants)

    # All of their tests once, a file's together.
    wanted = sorted({test for mutant in mutants for test in mutant.tests})
    files = sorted({test.split("::")[0] for test in wanted})
    selections = {
        f"unchanged-{n}": (
            tuple(test for test in wanted if test.split("::")[0] in files[n :: options.jobs]),
            None,
        )
        for n in range(min(options.jobs, len(files)))
    }
    broken = False
    for name, result in run_all(selections, options.jobs, logs):
        if result.status:
            broken = True
            print(f"the tests fail without a mutant: {result.test or selections[name][0]}; {logs}/{name}.log")
    if broken:
        return 1

    caught = explained = 0
    by_name = {mutant.name: mutant for mutant in mutants}
    began = time.monotonic()
    for name, result in run_all({m.name: (m.tests, m) for m in mutants}, options.jobs, logs):
        mutant, said = by_name[name], "caught"
        if result.test or result.status == -signal.SIGKILL:
            caught += 1
        elif result.status == 0:
            said, explained = ("explained", explained + 1) if mutant.survives else ("SURVIVED", explained)
        else:
            said = "BROKEN"  # no test ran: the change breaks an import
        print(f"{said:10}{result.seconds:6.1f} s  {name:40} {result.test or mutant.survives}", flush=True)
    print(
        f"{len(mutants)} mutants: {caught} caught, {explained} explained, "
        f"{len(mutants) - caught - explained} missed; {time.monotonic() - began:.0f} s; logs in {logs}"
    )
    return 0 if caught + explained == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
