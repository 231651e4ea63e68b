"""The shell blocks of the documents, and what of them this machine cannot run.

A comment in a page's source, before a block, says what is not run and why:

    <!-- not run (network) -->              the next block
    <!-- not run (GPU): titan-tts serve --> lines of the next block that begin so
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tools.harness.forked import ROOT

REASONS = ("network", "GPU", "machines", "here: it is this", "minutes")
_BLOCK = re.compile(r"((?:^<!-- [^\n]* -->\n)*)^```bash\n(.*?)^```$", re.S | re.M)
_MARK = re.compile(r"<!-- not run \(([^)]*)\)(?:: (.*?))? -->")


@dataclass(frozen=True)
class Block:
    """Commands that stand together."""

    commands: list[str]  # to run, in order
    left_out: list[tuple[str, str]]  # command, and why it is not run


def documents() -> list[str]:
    """Paths of the pages with commands, below the root."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in pages if "```bash\n" in page.read_text()]


def blocks(page: str, root: Path = ROOT) -> list[Block]:
    found = []
    for marks, text in _BLOCK.findall((root / page).read_text()):
        left_out, commands, rules = [], [], _MARK.findall(marks)
        for command in _commands(text):
            reasons = [why for why, start in rules if command.startswith(start)]
            if reasons:
                left_out.append((command, reasons[0]))
            else:
                commands.append(command)
        for why, start in rules:
            assert why in REASONS, f"{page}: not run ({why})"
            assert any(line.startswith(start) for line, _ in left_out), f"{page}: {start!r}"
        found.append(Block(commands, left_out))
    return found


def _commands(text: str) -> list[str]:
    """Lines that are commands; one that ends in a backslash goes on in the next."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]
