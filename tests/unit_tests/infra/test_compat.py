"""Private names of other libraries exist in the installed versions."""

import ast
import pkgutil
from pathlib import Path

import torchtitan.models.dit_tts


def test_private_names_exist():
    """Reads the file, since its import would stop at the first missing name."""
    path = Path(torchtitan.models.dit_tts.__file__).parent / "infra/compat.py"
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}:{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ATTRIBUTES":
            names += [name for version in ast.literal_eval(node.value).values() for name in version]
    assert len(names) > 20
    missing = []
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert not missing, "\n".join(missing)
