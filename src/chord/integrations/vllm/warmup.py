"""The kernels of a layer, compiled and loaded while vLLM loads weights, all cores at once.

Which kernel runs depends on the number of tokens, so every number up to 64 is asked for, then steps
of an eighth up to the largest batch. A number in between that needs yet another kernel compiles it
at its first use; vLLM runs every size once before it captures it. Nothing is launched and no memory
of torch is taken: what is allocated here would belong to vLLM's pool of weights, whose content is
lost while it sleeps.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from chord import device as devices
from chord.jit import cache, launch
from chord.jit.launch import KernelKey

_EXACT = 64
_STEPS = 8


def token_counts(largest: int) -> Iterator[int]:
    """Yield the numbers of tokens to ask for, ascending, from 1 to `largest`."""
    count = 1
    while count < largest:
        yield count
        count += max(1, count // _STEPS) if count >= _EXACT else 1
    if largest > 0:
        yield largest


def load_kernels(keys: Iterable[KernelKey]) -> None:
    """Compile the kernels that the cache has not, side by side, and load all onto their device.

    Raises:
        CompileError: One does not compile, or CHORD_JIT=cached forbids compiling.
    """
    distinct = sorted(set(keys), key=lambda key: (key.addressing, key.config.label()))
    if not distinct:
        return
    importlib.import_module("cuda.core")  # which is not made to be imported by several threads
    with ThreadPoolExecutor(min(len(distinct), os.cpu_count() or 1)) as pool:
        list(pool.map(_compile, distinct))  # list: raise what a thread raised
    for key in distinct:
        with torch.cuda.device(key.index):
            launch.load(key.config, key.addressing, key.index)


def _compile(key: KernelKey) -> None:
    cache.cubin_for(key.config, devices.facts_of(key.index).arch, key.addressing)
