"""The structure of the code: imports point down, without circles, and the documents name every part."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAMILY = "torchtitan.models.dit_tts"
PRODUCT = ROOT / FAMILY.replace(".", "/")

# A module imports from its own package and from lines above its own.
LAYERS = [
    {"errors"},
    {"files", "compat", "factors", "html_page", "audio"},
    {"config", "supervisor", "analysis"},
    {"model", "flow", "codec"},
    {"data", "scoring"},
    {"text"},
    {"model_config", "infra"},
    {"run_folder", "sampling", "trackers", "resume_rules"},
    {"metrics", "checkpointing", "benchmark", "rollback"},
    {"forward_pass"},
    {"validation"},
    {"train_spec", "trainer"},
    {"plan", "prepare", "doctor"},
    {"inference", "ablate"},
    {"evaluation", "export", "serving"},
    {"main", "torchrun"},
    {"train_command", "checkpoint_command", "launch"},
    {"cli"},
]
LEVEL = {part: number for number, parts in enumerate(LAYERS) for part in parts}


def imports(path: Path, package: str) -> set[str]:
    """Full names of all that a file imports, in functions too: of modules and of names in them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import in line {node.lineno}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name == package or name.startswith(package + ".")}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PRODUCT).with_suffix("").parts)


def product_imports() -> dict[str, set[str]]:
    """{module: the modules of the product it imports}, as `package.module`."""
    modules = {module_name(path): path for path in PRODUCT.rglob("*.py")}
    graph = {}
    for module, path in modules.items():
        names = {name.removeprefix(FAMILY + ".") for name in imports(path, FAMILY)}
        targets = set()
        for name in names:
            while name and name not in modules and f"{name}.__init__" not in modules:
                name = name.rpartition(".")[0]
            targets.add(name if name in modules else f"{name}.__init__".lstrip("."))
        graph[module] = targets - {module}
    return graph


GRAPH = product_imports()


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_imports_point_down(module):
    part = module.split(".")[0]
    if part == "__init__":  # serves names of train_spec when they are asked for
        return
    for target in GRAPH[module]:
        other = target.split(".")[0]
        if other not in (part, "__init__"):
            assert LEVEL[other] < LEVEL[part], f"{module} imports {target}"


def test_no_circle_of_imports():
    done, under_way = set(), []

    def visit(module):
        assert module not in under_way, " -> ".join([*under_way, module])
        if module not in done:
            under_way.append(module)
            for target in GRAPH[module]:
                visit(target)
            done.add(under_way.pop())

    for module in GRAPH:
        visit(module)


def test_model_is_pure():
    """It knows of no configuration, text encoder, data, path or process group."""
    assert {t.split(".")[0] for m in GRAPH if m.startswith("model.") for t in GRAPH[m]} <= {"model"}
    for path in (PRODUCT / "model").glob("*.py"):
        for forbidden in ("torch.distributed", "transformers", "pathlib", "os"):
            assert not imports(path, forbidden), f"{path} imports {forbidden}"


def test_what_others_have_written_is_printed_by_show():
    """It escapes what a terminal would obey: a stranger's folder and data have names of any kind."""
    for package in ("doctor", "evaluation", "export", "inference", "serving"):
        for path in (PRODUCT / package).rglob("*.py"):
            names = (
                node.id
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Name)
            )
            assert "print" not in names, f"{path} prints; use errors.show"


def test_readme_names_every_part():
    text = (PRODUCT / "README.md").read_text()
    parts = {path.name for path in PRODUCT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    parts |= {path.name for path in PRODUCT.glob("*.py") if path.stem != "__init__"}
    missing = {part for part in parts if f"`{part}`" not in text and f"`{part}/`" not in text}
    assert not missing
    named = {name.rstrip("/") for name in re.findall(r"^\| `([a-z_]+(?:/|\.py))`", text, re.M)}
    assert named <= parts, "the README names what is not there"


def test_unit_tests_mirror_the_packages():
    packages = {path.name for path in PRODUCT.iterdir() if path.is_dir()} | {"tools"}
    for path in (ROOT / "tests/unit_tests").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert path.name in packages


def test_who_imports_whom_outside_the_product():
    """No test imports a test, no benchmark or tool imports a test, the product imports none of them."""
    for path in ROOT.glob("tests/**/*.py"):
        for name in imports(path, "tests"):
            allowed = ("tests.helpers", "tests.conftest", "tests.documents")
            assert name.startswith(allowed), f"{path} imports {name}"
    for folder in ("benchmarks", "tools", "torchtitan"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not imports(path, "tests"), path
    for folder in ("tools", "torchtitan"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not imports(path, "benchmarks"), path


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + [each for group in extras.values() for each in group]
    names = {re.split(r"[\[<>=!~; ]", each)[0].lower().replace("-", "_") for each in declared}
    modules = {"tomli_w", "aiohttp"}  # comes with fsspec[http]
    modules |= {"dotenv", "PIL", "pynvml"}  # of python-dotenv, pillow, nvidia-ml-py
    modules |= {"megatron"}  # of megatron-core
    names |= modules | {"torchtitan", "titan_tts", "functorch"}  # the last is part of torch
    for path in PRODUCT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [node.module or ""]
            for name in found:
                top = name.split(".")[0]
                assert top in names or top in sys.stdlib_module_names, f"{path} imports {top}"
