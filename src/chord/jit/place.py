"""The folder of compiled kernels: which it is, whether it can be used, and what of it is of use.

`cache` reads and writes entries; this module looks at the folder from outside, for `cache`, for
`chord doctor` and for `chord cache`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from chord import env

ENTRY_SUFFIX = ".kernel"
LOCK_SUFFIX = ".lock"
TEMPORARY_SUFFIX = ".tmp"


@dataclass(frozen=True)
class Place:
    """Where compiled kernels go.

    Attributes:
        folder: The folder, which need not exist; None keeps them in memory only.
        trouble: Why it is not what the environment asks for, or None.
    """

    folder: Path | None
    trouble: str | None = None


def find() -> Place:
    """Return the place that the environment names now."""
    named = env.cache_dir()
    if named is None:
        folder = _private_temporary_folder()
        place = f"kernels go to {folder}" if folder else "kernels stay in memory"
        return Place(folder, f"HOME names no usable folder, {place}")
    folder = named / "kernels"
    with contextlib.suppress(OSError):
        if folder.stat().st_mode & stat.S_IWOTH:
            return Place(
                None, f"{folder} can be written by everyone, so its kernels are not trusted"
            )
    return Place(folder)


def make(folder: Path) -> None:
    """Make a folder and its parents, all private; racing processes may make them too."""
    for part in (*reversed(folder.parents), folder):
        if not part.exists():
            part.mkdir(mode=0o700, exist_ok=True)


def refuse_to_write(folder: Path) -> str | None:
    """Return why nothing can be written to a folder, or None; makes no folder."""
    try:
        nearest = next(part for part in (folder, *folder.parents) if part.exists())
        if not nearest.is_dir():
            return f"{nearest} is not a folder"
        if not os.access(nearest, os.W_OK | os.X_OK):
            return f"{nearest} cannot be written"
        if nearest == folder:
            with tempfile.TemporaryFile(suffix=TEMPORARY_SUFFIX, dir=folder) as probe:
                probe.write(bytes(4096))
                probe.flush()
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return None


def trouble() -> str | None:
    """Return why kernels are not kept on disk at all, or None if they are."""
    place = find()
    if place.folder is None:
        return place.trouble
    return refuse_to_write(place.folder)


def _private_temporary_folder() -> Path | None:
    """Return this user's own folder below the temporary one, or None if it is not private."""
    try:
        folder = Path(tempfile.gettempdir()) / f"chord-{os.geteuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
    return folder if is_own and not state.st_mode & 0o077 else None
