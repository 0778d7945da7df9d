"""The import root `humming`, for where humming-kernels is not installed: Chord's W4A16 experts.

A single file on purpose. Python prefers a folder `humming/` to a `humming.py` beside it, so an
installed humming-kernels is `humming` by itself, and none of its files is touched. Where this file
comes first all the same (PYTHONPATH), it steps aside for humming-kernels.

Submodules are those of chord/compat/humming; what Chord does not do raises and says so
(docs/vllm.md).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import chord


def _installed_humming() -> ModuleType | None:
    """Load humming-kernels, if it lies anywhere on the import path, in this module's place."""
    for entry in sys.path:
        folder = Path(entry or ".", "humming")
        if not (folder / "__init__.py").is_file():
            continue
        spec = importlib.util.spec_from_file_location(
            __name__, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None, "a file has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[__name__] = module  # the import system takes what it finds here
        spec.loader.exec_module(module)
        return module
    return None


if _installed_humming() is None:
    __version__ = chord.__version__
    __path__ = [str(Path(chord.__file__).parent / "compat" / "humming")]
