"""CPU time of one launch on the ways there are, and of a whole warm chord.indexed call.

    python benchmarks/launch_overhead.py

The kernel is a decode configuration on a problem without work, so that the card keeps up with the
CPU. Each line is the median over blocks of calls, in microseconds a call.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import torch

import chord
from chord import device as devices
from chord.jit import compiler, driver, launch
from chord.plan.config import DecodeConfig

CALLS, BLOCKS = 200, 15
CONFIG = DecodeConfig(max_tokens=8, warps=8, block_k=256, stages=5)


def microseconds(call: Callable[[], object]) -> float:
    """Return the median CPU time of one call."""
    for _ in range(20):
        call()
    times = []
    for _ in range(BLOCKS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def ways(values: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """Return one launch of the same kernel by each way to launch it."""
    prepared = launch.launcher(launch.kernel_key(CONFIG, "Indexed", 0))
    stream = launch.current_stream(0)
    function = ctypes.c_void_p(prepared.kernel.function)
    raw = driver.library().cuLaunchKernel
    grid, block, smem = devices.facts_of(0).num_sms, CONFIG.threads(), CONFIG.smem_bytes()
    arguments = prepared._arguments
    raw_stream = ctypes.c_void_p(stream)

    found: dict[str, Callable[[], object]] = {
        "Launcher.launch (cuLaunchKernelEx, structs kept)": lambda: prepared.launch(stream, values),
        "  of which packing the parameters": lambda: prepared._pack(*values),
        "  of which the driver's call": prepared._call,
        "cuLaunchKernel through ctypes": lambda: raw(
            function, grid, 1, 1, block, 1, 1, smem, raw_stream, arguments, None
        ),
    }
    found["cuda.core launch, 8 pointers (it takes no struct)"] = core_launch(stream)
    return found


def core_launch(stream: int) -> Callable[[], object]:
    """Return a launch of an empty kernel with eight arguments through cuda-core."""
    from cuda.core import Device, LaunchConfig, ObjectCode, Stream
    from cuda.core import launch as core_launch

    names = ", ".join(f"void* p{i}" for i in range(8))
    unit = f'extern "C" __global__ void chord_entry({names}) {{}}'
    card = Device(0)
    card.set_current()
    code = compiler.compile_unit(unit, devices.facts_of(0).arch).code
    kernel = ObjectCode.from_cubin(code).get_kernel("chord_entry")
    config = LaunchConfig(grid=devices.facts_of(0).num_sms, block=CONFIG.threads())
    where = Stream.from_handle(stream)
    pointers = range(8)
    return lambda: core_launch(where, config, kernel, *pointers)


def main() -> None:
    """Measure and print."""
    facts = devices.facts_of(0)
    print(f"{facts.name}, driver {facts.driver}, torch {torch.__version__}")
    codes = torch.randint(0, 16, (4, 256, 256), dtype=torch.uint8, device="cuda")
    scales = torch.ones(4, 256, 8, dtype=torch.bfloat16, device="cuda")
    experts = chord.pack_experts(codes, scales)
    x = torch.randn(2, 256, device="cuda").bfloat16()
    routes = torch.full((2, 2), -1, device="cuda")  # no route: kernels return at once
    where = chord.routing.align(routes, num_experts=4, block_m=16)
    out = torch.empty(4, 256, dtype=torch.bfloat16, device="cuda")
    buffers = (where.sorted_token_ids, where.expert_ids, where.num_tokens_post_padded)
    prepared = launch.launcher(launch.kernel_key(CONFIG, "Indexed", 0))
    values = (
        *(t.data_ptr() for t in (x, experts.data, out)),
        *prepared.scratch_values(launch.current_stream(0)),
        *(4, 256, 256),
        *(t.data_ptr() for t in buffers),
        *(4, 2, 16, where.expert_ids.numel(), where.sorted_token_ids.numel(), 0),
    )
    for name, call in ways(values).items():
        print(f"{microseconds(call):7.2f} us  {name}")
    ids, blocks, used = buffers
    whole: dict[str, Callable[[], object]] = {
        "chord.indexed(out=..., validate=False)": lambda: chord.indexed(
            x, experts, ids, blocks, used, 2, block_m=16, out=out, validate=False
        ),
        "chord.indexed(validate=False), allocates and clears": lambda: chord.indexed(
            x, experts, ids, blocks, used, 2, block_m=16, validate=False
        ),
        "torch add_ for comparison": lambda: out.add_(1),
    }
    for name, call in whole.items():
        print(f"{microseconds(call):7.2f} us  {name}")


if __name__ == "__main__":
    main()
