#!/usr/bin/env python
"""Breaks the product in one place at a time and asks whether the tests see it.

    python scripts/mutants.py [NAME ...] [--jobs N] [--list]

A mutant is a small change that would ruin a user's run: clipping off, the loss divided by padded
frames, guidance ignored. tests/mutants/*.toml holds them, a table each:

    [[mutant]]
    name = "clipping_off"
    in = "trainer.py:DiTTTSTrainer._step"     # below torchtitan/models/dit_tts, or titan_tts/...
    old = "self.job_config.training.max_norm, foreach=True"
    new = "float('inf'), foreach=True"
    tests = ["./test_trainer.py"]  # below tests/unit_tests; the file's own `tests` by default

`old` must stand exactly once in that function (or class, or file if none is named); white space, line
breaks and a comma before a closing bracket do not matter. Further lines of `new` are indented relative
to its first. A mutant that nothing can catch has a
sentence in `survives`. No file is changed: this process imports what the tests need except the product, forks
for each mutant, and the child's import system compiles the changed source. Processes that a test
starts by itself import the product as it is.

A mutant is caught if a test failed. Afterwards each of these tests runs alone without a mutant, so that
none counts that fails anyway. A child that does not end in time, or in which no test ran, counts as
missed.

Exit status: 0 if every mutant is caught or explained, 1 otherwise.
"""

import argparse
import ast
import importlib
import importlib.machinery
import json
import os
import re
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAMILY = ROOT / "torchtitan/models/dit_tts"
OURS = ("torchtitan.models.dit_tts", "tests", "tools", "titan_tts")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Mutant:
    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    @property
    def file(self) -> str:
        return self.where.partition(":")[0]

    @property
    def path(self) -> Path:
        return (ROOT if self.file.startswith("titan_tts/") else FAMILY) / self.file

    def source(self) -> str:
        """The file with the change.

        Raises:
            ValueError: `old` does not stand exactly once where it should.
        """
        text = self.path.read_text()
        start, end = find_definition(text, self.where.partition(":")[2])
        found = list(tokens_pattern(self.old).finditer(text, start, end))
        if len(found) != 1:
            raise ValueError(f"{self.name}: `old` stands {len(found)} times in {self.where}")
        [match] = found
        shift = _indent(text[text.rfind("\n", 0, match.start()) + 1 :]) - _indent(self.new)
        first, *others = self.new.strip().split("\n")
        new = "\n".join(
            [first, *(" " * (_indent(each) + shift) + each.lstrip() for each in others)]
        )
        return text[: match.start()] + new + text[match.end() :]


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def find_definition(text: str, name: str) -> tuple[int, int]:
    """Start and end, in characters, of the function or class `A.b` in a source; without a name, of all."""
    if not name:
        return 0, len(text)
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        named = (each for each in ast.walk(node) if getattr(each, "name", "") == part)
        node = next((each for each in named if isinstance(each, DEFINITIONS)), node)
        if getattr(node, "name", "") != part:
            raise ValueError(f"there is no {name}")
    assert isinstance(node, DEFINITIONS)
    first = min(each.lineno for each in (node, *node.decorator_list))
    lines = text.splitlines(keepends=True)
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


def tokens_pattern(source: str) -> re.Pattern[str]:
    """A pattern for the same tokens with any white space between them."""
    pattern, before = "", ""
    for token in re.findall(r"\w+|[^\w\s]", source):
        if before:
            pattern += r"\s+" if re.match(r"\w", before) and re.match(r"\w", token) else r"\s*"
        if token in ")]}" and before != ",":
            pattern += r"(?:,\s*)?"
        pattern += re.escape(token)
        before = token
    start = r"\b" if source.strip()[0].isidentifier() else ""
    end = r"\b" if re.search(r"\w\s*$", source) else ""
    return re.compile(start + pattern + end)


@dataclass
class Result:
    status: int
    """pytest's: 0 if all passed, 1 if a test failed; negative: the signal that ended the child"""

    seconds: float
    test: str
    """the first that failed"""

    def outcome(self, mutant: Mutant) -> str:
        if self.test:
            return "caught"
        if self.status == 0:
            return "explained" if mutant.survives else "SURVIVED"
        return "TIMEOUT" if self.seconds > TIMEOUT_SECONDS else f"BROKEN ({self.status})"


def read_mutants() -> list[Mutant]:
    mutants = []
    for path in sorted((ROOT / "tests/mutants").glob("*.toml")):
        table = tomllib.loads(path.read_text())
        for entry in table["mutant"]:
            tests = tuple(entry.pop("tests", table.get("tests", ())))
            mutants.append(Mutant(where=entry.pop("in"), tests=tests, **entry))
    names = [mutant.name for mutant in mutants]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise ValueError(f"several mutants are named {', '.join(sorted(duplicates))}")
    return mutants


def compile_instead(mutant: Mutant) -> None:
    """From now on the mutant's file is imported with its change."""
    path, source = str(mutant.path), mutant.source()
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


def run_all(
    jobs: dict[str, tuple[tuple[str, ...], Mutant | None]], at_once: int, logs: Path, seconds: float
) -> Iterator[tuple[str, Result]]:
    """Runs jobs, name -> (tests, mutant), each for at most so many seconds; yields (name, result) as
    each ends."""
    waiting, running = list(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                pid, pipe = fork(*jobs[name], logs / f"{name}.log")
                running[pid] = (name, pipe, time.monotonic())
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in running:
                name, pipe, began = running.pop(pid)
                os.set_blocking(pipe, False)  # what a test has left running may hold the other end
                try:
                    test = os.read(pipe, 10_000).decode()
                except BlockingIOError:
                    test = ""
                os.close(pipe)
                code = os.waitstatus_to_exitcode(status)
                yield name, Result(code, time.monotonic() - began, test)
                continue
            for pid, (_, _, began) in running.items():
                if time.monotonic() - began > seconds:
                    kill_group(pid)
            time.sleep(0.02)
    finally:
        for pid in running:
            kill_group(pid)


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def import_what_tests_need(mutants: list[Mutant]) -> None:
    """Imports every module that the tests import, but for the product's: a child starts with them."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            for file in sorted(
                {test.split("::")[0] for mutant in mutants for test in mutant.tests}
            ):
                module = Path(file).with_suffix("").as_posix().replace("/", ".").lstrip(".")
                importlib.import_module(f"tests.unit_tests.{module}")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        names = [name for name in sys.modules if not name.startswith(OURS)]
        with os.fdopen(writing, "w") as pipe:
            json.dump(names, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        content = pipe.read()
    if os.waitpid(pid, 0)[1]:
        sys.exit("error: the tests cannot be imported; see above")
    names = json.loads(content)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # parts of packages that make their own modules
            continue


def failing_alone(tests: set[str], jobs: int, logs: Path) -> set[str]:
    """Those of the tests that fail by themselves without a mutant."""
    unchanged = {f"unchanged-{n}": ((test,), None) for n, test in enumerate(sorted(tests))}
    failing = set()
    for name, result in run_all(unchanged, jobs, logs, TIMEOUT_SECONDS):
        if result.status:
            [test] = unchanged[name][0]
            failing.add(test)
            print(f"fails without a mutant: {test}; {logs}/{name}.log", flush=True)
    return failing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="mutants to try; all by default")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="children at once")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    parser.add_argument("--logs", help="folder for pytest's output; a new one by default")
    options = parser.parse_args()
    mutants = [m for m in read_mutants() if not options.names or m.name in options.names]
    unknown = set(options.names) - {mutant.name for mutant in mutants}
    if unknown or options.jobs < 1:
        parser.error(f"no mutant is named {', '.join(unknown)}" if unknown else "--jobs is below 1")
    for mutant in mutants:
        compile(mutant.source(), mutant.file, "exec")
        if options.list:
            print(f"{mutant.name:40} {mutant.where}")
    if options.list:
        return 0

    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    import tests.conftest  # noqa: F401 before torch: the environment that every test has

    logs = Path(options.logs or tempfile.mkdtemp(prefix="mutants-"))
    logs.mkdir(parents=True, exist_ok=True)
    import_what_tests_need(mutants)

    began = time.monotonic()
    by_name = {mutant.name: mutant for mutant in mutants}
    jobs = {mutant.name: (mutant.tests, mutant) for mutant in mutants}
    outcomes, caught_by = {}, {}
    for name, result in run_all(jobs, options.jobs, logs, TIMEOUT_SECONDS):
        outcomes[name] = outcome = result.outcome(by_name[name])
        if outcome == "caught":
            caught_by[name] = str(Path(result.test).relative_to("tests/unit_tests"))
        shown = caught_by.get(name) or by_name[name].survives
        print(
            f"{len(outcomes):4}/{len(mutants)} {outcome:10}{result.seconds:6.1f} s  {name:40} {shown}",
            flush=True,
        )
    failing = failing_alone(set(caught_by.values()), options.jobs, logs)
    for name, test in caught_by.items():
        if test in failing:
            outcomes[name] = "NOT SEEN"
    missed = {n: o for n, o in outcomes.items() if o not in ("caught", "explained")}
    for name, outcome in missed.items():
        print(f"{outcome:10} {name}")
    counts = Counter(outcomes.values())
    print(
        f"{len(mutants)} mutants: {counts['caught']} caught, {counts['explained']} explained, "
        f"{len(missed)} missed; {time.monotonic() - began:.0f} s; logs in {logs}"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
