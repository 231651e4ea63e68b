"""Extends the installed `torchtitan` package by this folder instead of replacing it.

Python imports `torchtitan` from here (the repository's root comes first on `sys.path`), and every
module that is not in this folder from the installed package.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

# Upstream chooses the accelerator when `torchtitan.tools.utils` is imported, so this comes first.
from importlib.metadata import version as _version  # noqa: E402

from torchtitan import _cpu as _cpu  # noqa: E402

_cpu.use_cpu_without_accelerator()

# `torchtitan.train.main` reads it: upstream's version, as only one model family is added.
__version__ = _version("torchtitan")
