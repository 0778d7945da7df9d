"""The environment variables that Chord reads. No other module looks at `os.environ`.

`VARIABLES` documents each name once; `chord doctor` prints it. Values are read at each call, so a
test or a launcher may set them after `import chord`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from chord.errors import InputError

JitMode = Literal["auto", "cached"]


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what an unset one means, and what it does."""

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable(
        "CHORD_CACHE_DIR",
        "$XDG_CACHE_HOME/chord, else ~/.cache/chord",
        "folder of compiled kernels; without a usable one they are kept in memory only",
    ),
    Variable(
        "CHORD_JIT",
        "auto",
        "auto compiles a kernel at its first use; cached makes a kernel that is not in the cache "
        "an error (fill it with `chord compile`)",
    ),
    Variable(
        "XDG_CACHE_HOME", "~/.cache", "parent of the cache folder; a relative path is ignored"
    ),
    Variable(
        "CHORD_VLLM",
        "1",
        "0 keeps Chord's plugin out of vLLM: every layer is served as without Chord",
    ),
    Variable(
        "HOME",
        "a private chord-UID in the temporary folder",
        "home of ~/.cache, used if it exists and is not /",
    ),
)


def cache_dir() -> Path | None:
    """Return the folder for compiled kernels, or None where the environment offers no place.

    CHORD_CACHE_DIR is taken as it stands (a leading ~ is expanded, and a relative path counts from
    the current folder). Otherwise the folder is
    `chord` under XDG_CACHE_HOME or under ~/.cache. Containers often run with HOME unset, `/` or
    a folder that is not there: none of these may become `/.cache`, so they give None.
    The folder itself need not exist yet.

    Raises:
        InputError: CHORD_CACHE_DIR begins with a ~ of nobody.
    """
    named = os.environ.get("CHORD_CACHE_DIR", "")
    if named:
        try:
            return Path(named).expanduser().absolute()  # so that what is printed names one place
        except RuntimeError:
            raise InputError(
                f"CHORD_CACHE_DIR={named!r} begins with a ~ that stands for no home here; name the "
                f"folder by its full path"
            ) from None
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if xdg and Path(xdg).is_absolute():
        return Path(xdg) / "chord"
    home = os.environ.get("HOME", "")
    # normpath keeps a leading "//", hence the comparison after stripping slashes.
    if not home.strip("/") or not Path(home).is_absolute() or not Path(home).is_dir():
        return None
    return Path(home) / ".cache" / "chord"


def jit_mode() -> JitMode:
    """Return "auto" (compile at first use) or "cached" (a kernel not in the cache is an error).

    Raises:
        InputError: CHORD_JIT holds another word.
    """
    mode = os.environ.get("CHORD_JIT", "") or "auto"
    if mode not in ("auto", "cached"):
        raise InputError(f"CHORD_JIT={mode!r} is not a mode; set it to auto or cached, or unset it")
    return cast(JitMode, mode)


def vllm_enabled() -> bool:
    """Return whether Chord's vLLM plugin takes part, which is so unless CHORD_VLLM=0.

    Raises:
        InputError: CHORD_VLLM holds anything but 0 and 1.
    """
    value = os.environ.get("CHORD_VLLM", "") or "1"
    if value not in ("0", "1"):
        raise InputError(f"CHORD_VLLM={value!r} is not a switch; set it to 0 or 1, or unset it")
    return value == "1"
