"""Every exception and warning class of Chord.

A message says what is wrong, the values that were seen, and what to do about it. The checks
themselves stand where the facts are known; this module holds only the classes.
"""

from __future__ import annotations


class ChordError(Exception):
    """Base of everything that Chord raises on purpose."""


class InputError(ChordError, ValueError):
    """An argument breaks a rule: the message names the argument, its value and the rule."""


class UnsupportedError(ChordError):
    """A weight format, shape or card that Chord does not do, refused before anything is written."""


class CompileError(ChordError, RuntimeError):
    """A kernel did not compile or load; the message carries the compiler's log."""


class CaptureError(ChordError, RuntimeError):
    """A call would have to compile or allocate inside CUDA graph capture: warm up first."""


class CacheWarning(UserWarning):
    """The kernel cache on disk cannot be used as asked; Chord goes on without it."""
