"""Runs upstream's own unit tests with upstream's package alone and through our tree, and compares which pass.

    git clone --depth 1 --branch v0.2.2 https://github.com/pytorch/torchtitan /tmp/torchtitan
    .venv/bin/pip install expecttest
    .venv/bin/python scripts/upstream_tests.py /tmp/torchtitan

Both ways test the installed package; of the checkout only the tests and their files are used. Exit status 1
where a test passes one way only.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USED = ("assets", "scripts", "tests", "torchtitan/models/llama3/train_configs")
"""of the checkout: what its tests read by relative paths, without the package itself"""


def passing(checkout: Path, python_path: str) -> set[str]:
    """Names of the passing tests with `python_path` before the installed packages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for used in USED:
            (folder / used).parent.mkdir(parents=True, exist_ok=True)
            (folder / used).symlink_to(checkout.resolve() / used)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-c", os.devnull]
        options = ["--rootdir", ".", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        subprocess.run(
            [*command, *options, "--tb=short", "--junitxml=results.xml", "tests/unit_tests"],
            cwd=folder,
            # Downloads fail now and then; a difference should be ours.
            env={**os.environ, "PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"},
        )
        cases = ElementTree.parse(folder / "results.xml").iter("testcase")
        return {f"{case.get('classname')}.{case.get('name')}" for case in cases if not len(case)}


def main(checkout: Path) -> int:
    alone, ours = passing(checkout, ""), passing(checkout, str(ROOT))
    print(f"{len(alone)} tests pass with upstream alone, {len(ours)} through {ROOT}")
    for name in sorted(alone ^ ours):
        print(
            f"passes {'with upstream alone' if name in alone else 'through our tree'} only: {name}"
        )
    return 0 if alone and alone == ours else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
