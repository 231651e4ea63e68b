"""Writes the signatures and docstrings into docs/api.md: python -m tools.api_page

What stands between `<!-- api MODULE:NAME -->` and `<!-- end -->` is of the code; all else is written by hand.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs/api.md"
_PART = re.compile(r"<!-- api (\S+):(\S+) -->\n.*?<!-- end -->", re.S)


def filled(page: str) -> str:
    """The page with the code's own signatures and docstrings."""
    return _PART.sub(lambda part: _described(part[1], part[2]), page)


def _described(module: str, path: str) -> str:
    found = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    source = textwrap.dedent(inspect.getsource(found))
    function = ast.parse(source).body[0]
    lines = source.splitlines()[
        function.lineno - 1 : function.body[0].end_lineno
    ]  # to its docstring's end
    text = "\n".join(lines)
    return f"<!-- api {module}:{path} -->\n```python\n{text}\n```\n<!-- end -->"


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    from titan_tts.overlay import install_overlay

    install_overlay()
    sys.exit(main())
