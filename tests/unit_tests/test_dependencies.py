"""The product imports exactly the packages that pyproject.toml installs, in the extra that the docs name."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

from torchtitan.models.dit_tts.errors import _EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"titan_tts", "tomllib", *sys.stdlib_module_names}

# Distributions that have another name than their module, and modules that come with one.
NAMES = {
    "pillow": "PIL",
    "python_dotenv": "dotenv",
    "nvidia_ml_py": "pynvml",
    "megatron_core": "megatron",
}
WITH = {"torch": ["functorch", "triton"], "fsspec[s3,http]": ["aiohttp", "s3fs"]}


@cache
def modules(requirements: tuple[str, ...]) -> set[str]:
    """The modules that requirements install, those of their extras of titan-tts included."""
    found = set()
    for requirement in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", requirement).groups()
        if name == "titan-tts":
            for extra in extras.split(","):
                found |= modules(tuple(PROJECT["optional-dependencies"][extra]))
        else:
            name = name.replace("-", "_")
            found |= {NAMES.get(name, name), *WITH.get(requirement.partition(">")[0], ())}
    return found


BASE = modules(tuple(PROJECT["dependencies"]))
EXTRAS = {name: modules(tuple(given)) for name, given in PROJECT["optional-dependencies"].items()}


def product() -> list[Path]:
    return [*(ROOT / "titan_tts").rglob("*.py"), *(ROOT / "torchtitan").rglob("*.py")]


@cache
def used(path: Path) -> tuple[set[str], set[str]]:
    """(modules that a file imports, all its literals)."""
    imported, literals = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            literals.add(node.value)
    return imported - OURS, literals


def test_every_import_is_declared_and_nothing_else():
    imports, literals = (set().union(*parts) for parts in zip(*map(used, product())))
    declared = BASE.union(*(EXTRAS[name] for name in EXTRAS if name != "dev"))
    assert imports - declared == set()
    # Some are loaded by name, or by another package.
    by_name = {re.split(r"[.:]", each)[0] for each in literals}
    unused = declared - imports - by_name - {"aiohttp", "s3fs", "functorch", "pynvml"}
    assert unused == set()


def test_a_missing_module_names_an_extra_that_has_it():
    for module, extra in _EXTRAS.items():
        assert module in (EXTRAS[extra] if extra else {module}), module
