"""Private names of other libraries are there in the installed versions."""

import ast
import pkgutil
from pathlib import Path

import torchtitan.models.dit_tts

COMPAT = Path(torchtitan.models.dit_tts.__file__).parent / "infra/compat.py"


def test_private_names_exist():
    """Reads the file instead of importing it: the import would stop at the first missing name."""
    body = ast.parse(COMPAT.read_text()).body
    names = [
        f"{node.module}:{alias.name}"
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    [attributes] = [
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ATTRIBUTES"
    ]
    names += [name for of_version in attributes.values() for name in of_version]
    assert len(names) > 30
    missing = []
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert not missing, "\n".join(missing)
