"""Runs the kernel sources on the CPU, with checks that a GPU does not make.

`runner` runs one launch on torch CPU tensors; `build` compiles a kernel for the host; `include`
holds the second implementation of kernels/ptx, and `runtime` the machine that it runs on.
docs/emulator.md says what is modelled and what is not.
"""

from chord.emulator.runner import EmulatorError, run

__all__ = ["EmulatorError", "run"]
