"""The commands in the documents exist, with the options, keys and files that they name."""

import dataclasses
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_tts import cli
from tools import api_page
from torchtitan.models.dit_tts.config.job_config import JobConfig
from torchtitan.models.dit_tts.config.old_keys import OLD_KEYS
from torchtitan.models.dit_tts.config.shipped import find_config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented_lines() -> list[str]:
    """Lines of the documents' shell blocks; a synopsis with [options] is none."""
    lines = []
    for path in DOCUMENTS:
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.S):
            lines += [line for line in block.replace("\\\n", " ").splitlines() if "[" not in line]
    return lines


LINES = documented_lines()
COMMANDS = [line for line in LINES if line.startswith(("titan-tts ", "torchrun "))]


def has_key(flag: str) -> bool:
    kind = JobConfig
    for part in flag.removeprefix("--").partition("=")[0].replace("-", "_").split("."):
        types = {each.name: each.type for each in dataclasses.fields(kind)}
        kind = types.get(part, types.get(part.removeprefix("no_")))
        if kind is None:
            return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_parses(command, monkeypatch):
    seen, load = [], cli._load

    def load_without_running(target: str) -> SimpleNamespace:
        module = vars(load(target))
        return SimpleNamespace(**module | {"run": lambda options: seen.append(options) or 0})

    monkeypatch.setattr(cli, "_load", load_without_running)
    words = shlex.split(command.split("&&")[0], comments=True)
    words = words[words.index("titan_tts") + 1 :] if words[0] == "torchrun" else words[1:]
    assert cli.main(words) == 0
    (options,) = seen
    config = getattr(options, "config", None)
    if config and not str(config).startswith(("outputs/", "voice/")):
        find_config(str(config))


@pytest.mark.parametrize("line", [line for line in LINES if re.search(r" --\w+\.\w", line)])
def test_documented_keys_exist(line):
    for flag in re.findall(r"--\w[\w-]*\.[\w.-]+", line):
        assert has_key(flag), flag


def test_what_replaces_an_old_key_exists():
    for old, instead in OLD_KEYS.items():
        for section, keys in re.findall(r"\[([\w.]+)\] ?(\w*)", instead):
            assert has_key(f"--{section}.{keys}" if keys else f"--{section}"), old


def test_the_api_page_has_the_codes_signatures_and_docstrings():
    page = api_page.PAGE.read_text()
    assert page.count("<!-- api ") > 8
    assert page == api_page.filled(page), "python -m tools.api_page writes them anew"


def test_links_lead_somewhere():
    pages = [*DOCUMENTS, ROOT / "benchmarks/README.md", ROOT / "titan_tts/README.md"]
    for path in [*pages, ROOT / "torchtitan/models/dit_tts/README.md", ROOT / "CHANGELOG.md"]:
        for target, anchor in re.findall(r"\]\(([^):#]*)(?:#([^)]*))?\)", path.read_text()):
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), f"{path.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
                known = [
                    re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings
                ]
                assert anchor in known, f"{path.name}: {target}#{anchor}"


def test_documented_files_exist():
    for line in LINES:
        for path in re.findall(
            r"(?:^|[ =])((?:scripts|train_configs|benchmarks)/[\w/]+\.(?:sh|slurm|py|toml))", line
        ):
            assert (ROOT / path).is_file(), line
