"""From a configuration to a launched kernel: render, compile, keep, load, launch."""

from chord.jit.cache import cubin_for
from chord.jit.source import kernel_digest, render

__all__ = ["cubin_for", "kernel_digest", "render"]
