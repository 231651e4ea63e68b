"""The structure of the code: imports point down, without circles, and the documents name every part."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAMILY, COMMANDS = "torchtitan.models.dit_tts", "titan_tts"
FOLDERS = {building: ROOT / building.replace(".", "/") for building in (FAMILY, COMMANDS)}

# A module imports from its own room and from lines above its own; a room with a point is a part of a room.
FAMILY_LAYERS = [
    {"errors", "bounded"},
    {"files", "factories", "run.launcher", "speech.audio", "streams", "added_tokens"},
    {"config"},
    {"model", "flow", "run.factors", "run.manifest", "speech.codec"},
    {"data", "speech.scoring"},
    {"text"},
    {"model_config", "infra"},
    {"run.checkpoint_storage"},
    {
        "run.run_folder",
        "speech.sampling",
        "run.trackers",
        "run.resume_rules",
        "run.grown_vocabulary",
        "run.teacher",
    },
    {"metrics", "run.checkpointing", "run.benchmark", "run.rollback"},
    {"forward_pass", "run.messages"},
    {"validation"},
    {"train_spec", "trainer"},
    {"main"},
    {"__init__"},
]
COMMAND_LAYERS = [
    {"report", "records", "overlay"},
    {"launch.supervisor", "jobs"},
    {"plan", "prepare", "doctor", "annotate.store", "speak.long_text"},
    {"speak", "grids", "collect", "onnx_voice"},
    {"evaluate", "export", "serving", "share"},
    {"launch.torchrun", "convert", "annotate"},
    {
        "launch.train_command",
        "checkpoint_command",
        "configs_command",
        "finetune",
    },
    {"cli"},
    {"__init__"},
    {"__main__"},
]
LAYERS = {FAMILY: FAMILY_LAYERS, COMMANDS: COMMAND_LAYERS}
LEVEL = {
    building: {part: number for number, parts in enumerate(layers) for part in parts}
    for building, layers in LAYERS.items()
}


@cache
def all_imports(path: Path) -> set[str]:
    """Full names of all that a file imports, in functions too: of modules and of names in them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import in line {node.lineno}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imports(path: Path, package: str) -> set[str]:
    """The names of a package among them."""
    return {name for name in all_imports(path) if f"{name}.".startswith(f"{package}.")}


def product_imports() -> dict[str, set[str]]:
    """{module: the modules of the product it imports}, by their full names."""
    modules = {}
    for building, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            name = ".".join([building, *path.relative_to(folder).with_suffix("").parts])
            modules[name.removesuffix(".__init__")] = path
    graph = {}
    for module, path in modules.items():
        targets = set()
        for name in set().union(*(imports(path, building) for building in FOLDERS)):
            while name not in modules:
                name = name.rpartition(".")[0]
            targets.add(name)
        graph[module] = targets - {module}
    return graph


GRAPH = product_imports()


def place(module: str) -> tuple[str, str]:
    """(building, part that has a layer) of a module; `__init__` is the building's own file."""
    building = FAMILY if (module + ".").startswith(FAMILY + ".") else COMMANDS
    names = module.removeprefix(building).lstrip(".").split(".")
    part = ".".join(names[:2])
    return building, part if part in LEVEL[building] else names[0] or "__init__"


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_imports_point_down(module):
    building, part = place(module)
    for target in GRAPH[module]:
        other_building, other = place(target)
        if other_building != building:
            # The overlay alone, by which a spawned process finds the family.
            above = building == COMMANDS or target == f"{COMMANDS}.overlay"
            assert above, f"{module} of the family imports {target}"
        elif other != part:
            assert LEVEL[building][other] < LEVEL[building][part], f"{module} imports {target}"


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
    model = f"{FAMILY}.model"
    found = {t for m in GRAPH if m.startswith(model + ".") for t in GRAPH[m]}
    streams = f"{FAMILY}.streams"
    assert not GRAPH[streams]
    assert all((target + ".").startswith(model + ".") for target in found - {streams})
    for path in (FOLDERS[FAMILY] / "model").glob("*.py"):
        for forbidden in ("torch.distributed", "transformers", "pathlib", "os"):
            assert not imports(path, forbidden), f"{path} imports {forbidden}"


def test_what_others_have_written_is_printed_by_show():
    """It escapes what a terminal would obey: a stranger's folder and data have names of any kind."""
    rooms = "collect doctor evaluate export onnx_voice speak serving annotate share"
    for room in rooms.split():
        for path in (FOLDERS[COMMANDS] / room).rglob("*.py"):
            names = (
                node.id
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Name)
            )
            assert "print" not in names, f"{path} prints; use errors.show"


@pytest.mark.parametrize("folder", FOLDERS.values())
def test_readme_names_every_room(folder):
    text = (folder / "README.md").read_text()
    rooms = {path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    rooms |= {path.name for path in folder.glob("*.py") if not path.stem.startswith("__")}
    missing = {room for room in rooms if f"`{room}`" not in text and f"`{room}/`" not in text}
    assert not missing
    named = {name.rstrip("/") for name in re.findall(r"^\| `([a-z_]+(?:/|\.py))`", text, re.M)}
    assert named <= rooms, "the README names what is not there"


def test_who_imports_whom_outside_the_product():
    """No test imports a test, no benchmark, recipe or tool imports a test, recipes no benchmark, the product none of them."""
    for path in ROOT.glob("tests/**/*.py"):
        for name in imports(path, "tests"):
            allowed = ("tests.helpers", "tests.conftest", "tests.documents")
            assert name.startswith(allowed), f"{path} imports {name}"
    for folder in ("benchmarks", "recipes", "tools", "torchtitan", "titan_tts"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not imports(path, "tests"), path
    for folder in ("recipes", "tools", "torchtitan", "titan_tts"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not imports(path, "benchmarks"), path
