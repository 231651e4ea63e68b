"""Extends the installed `torchtitan` package by this folder instead of replacing it.

Python imports `torchtitan` from here (the repository's root comes first on `sys.path`), and every
module that is not in this folder from the installed package.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

from importlib.metadata import version as _version  # noqa: E402

from torchtitan._imports import adapt_imports as _adapt_imports  # noqa: E402

_adapt_imports()

# `torchtitan.train.main` reads it: upstream's version, as only one model family is added.
__version__ = _version("torchtitan")
