"""The kernels of a layer, compiled while vLLM builds and loads the model, all cores at once.

`begin` starts in the background when a layer is created; `load_kernels` waits for it when the
weights are there, and loads what the layer needs.

Which kernel runs depends on the number of tokens, so every number up to 64 is asked for, then steps
of an eighth up to the largest batch. A number in between that needs yet another kernel compiles it
at its first use; vLLM runs every size once before it captures it. Nothing is launched and no memory
of torch is taken: what is allocated here would belong to vLLM's pool of weights, whose content is
lost while it sleeps.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from chord import device as devices
from chord.jit import cache, launch
from chord.jit.launch import KernelKey
from chord.plan.legality import SWIGLU_ADDRESSINGS

_EXACT = 64
_STEPS = 8

# Kernels that the background has begun with, and whether it is done with them.
_begun: dict[KernelKey, threading.Event] = {}
_begun_lock = threading.Lock()


def token_counts(largest: int) -> Iterator[int]:
    """Yield the numbers of tokens to ask for, ascending, from 1 to `largest`."""
    count = 1
    while count < largest:
        yield count
        count += max(1, count // _STEPS) if count >= _EXACT else 1
    if largest > 0:
        yield largest


def begin(keys: Iterable[KernelKey]) -> None:
    """Begin to compile in the background what no layer of this process has begun with.

    The largest come first, for they take longest. What goes wrong is left for `load_kernels` to
    find again; threads end with the process.
    """
    importlib.import_module("cuda.core")  # which is not made to be imported by several threads
    waiting: queue.SimpleQueue[tuple[KernelKey, threading.Event]] = queue.SimpleQueue()
    with _begun_lock:
        # SwiGLU makes the longest epilogue.
        for key in sorted(
            set(keys) - _begun.keys(),
            key=lambda key: (key.config.tile_rows, key.addressing in SWIGLU_ADDRESSINGS),
            reverse=True,
        ):
            _begun[key] = threading.Event()
            waiting.put((key, _begun[key]))
    if waiting.empty():
        return

    def work() -> None:
        while True:
            try:
                key, done = waiting.get_nowait()
            except queue.Empty:
                return
            # Any error, not Chord's own alone: if all threads end, `load_kernels` waits for ever.
            with contextlib.suppress(Exception):
                _compile(key)
            done.set()

    for number in range(min(waiting.qsize(), os.cpu_count() or 1)):
        threading.Thread(target=work, name=f"chord-compile-{number}", daemon=True).start()


def load_kernels(keys: Iterable[KernelKey]) -> None:
    """Compile the kernels that the cache has not, side by side, and load all onto their device.

    Raises:
        CompileError: One does not compile, or CHORD_JIT=cached forbids compiling.
    """
    distinct = sorted(set(keys), key=lambda key: (key.addressing, key.config.label()))
    if not distinct:
        return
    importlib.import_module("cuda.core")  # which is not made to be imported by several threads
    for done in tuple(_begun.values()):  # all: what follows may fork with no thread at work
        done.wait()
    with ThreadPoolExecutor(min(len(distinct), os.cpu_count() or 1)) as pool:
        list(pool.map(_compile, distinct))  # list: raise what a thread raised
    for key in distinct:
        with torch.cuda.device(key.index):
            launch.load(key.config, key.addressing, key.index)


def _compile(key: KernelKey) -> None:
    cache.cubin_for(key.config, devices.facts_of(key.index).arch, key.addressing)
