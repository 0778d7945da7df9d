"""The cost model: microseconds of one call, from bytes, padded arithmetic and tile counts.

Used where no profile row was measured, so it has to order configurations rightly more than to hit
the time. Every rate says its unit and where it comes from; loads of the experts are the problem's
`load_histogram` (uniform routing).

decode   Each pass over an expert (up to max_tokens rows) streams all its weights from memory; every
         256-feature tile of a pass reads the rows of x again, mostly from L2. Those two share the
         copy engines and add up; mma.sync runs beside them. Every tile pays a fixed time.
direct   The bytes alone, as in decode, though rows of x are read once: nothing is staged, so a call
         that moves little begins sooner. Each warp pays a fixed time for every 32 features of a
         pass, which memory does not hide.
prefill  A tile takes the longest of: wgmma over its own width, dequantising its weights, loading
         them; blocks take tiles in turn, so the last wave is paid in full. Nothing is faster than
         the bytes of the whole call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from chord.device import DeviceFacts
from chord.plan.config import MAX_DIRECT_K, Config, DecodeConfig, DirectConfig, PrefillConfig
from chord.plan.problem import GemmProblem


@dataclass(frozen=True)
class Rates:
    """What a card does in a microsecond.

    Attributes:
        launch_us: Time of a call that moves next to nothing.
        memory_bytes_per_us: Streaming reads through bulk copies.
        l2_bytes_per_us: Rows of x that several blocks read.
        wgmma_flop_per_us: Dense BF16 through wgmma with operand A in registers, whole card.
        mma_flop_per_us: Dense BF16 through mma.sync, whole card.
        dequantised_weights_per_us: INT4 weights turned into BF16 fragments, whole card.
        decode_tile_us: Start, epilogue and partial sums of one decode tile.
        prefill_tile_us: Start and epilogue of one prefill tile.
        direct_launch_us: Time of a direct call that moves next to nothing.
        direct_task_us: A warp's time for one of its tasks beside memory.
    """

    launch_us: float
    memory_bytes_per_us: float
    l2_bytes_per_us: float
    wgmma_flop_per_us: float
    mma_flop_per_us: float
    dequantised_weights_per_us: float
    decode_tile_us: float
    prefill_tile_us: float
    direct_launch_us: float
    direct_task_us: float


# H200, 2026-11-29: 12 us and 4.70 TB/s fitted over a kernel that only streams; 690 TFLOP/s is what
# cuBLAS reaches. The others follow from the same study and await calibration by `chord tune`.
_H200 = Rates(
    launch_us=12.0,
    memory_bytes_per_us=4.70e6,
    l2_bytes_per_us=7.0e6,
    wgmma_flop_per_us=690e6,
    mma_flop_per_us=350e6,
    dequantised_weights_per_us=33 * 132 * 1700.0,
    decode_tile_us=0.25,
    prefill_tile_us=2.0,
    direct_launch_us=8.0,
    direct_task_us=0.55,
)
# Not measured: H100 by its memory's share of H200's, Blackwell by its data sheet's.
_B200 = replace(
    _H200,
    memory_bytes_per_us=7.2e6,
    l2_bytes_per_us=10.0e6,
    mma_flop_per_us=400e6,
    dequantised_weights_per_us=33 * 148 * 1800.0,
)
_RATES = {
    "h200": _H200,
    "h100": replace(
        _H200, memory_bytes_per_us=3.2e6, l2_bytes_per_us=6.0e6, wgmma_flop_per_us=650e6
    ),
    "b200": _B200,
    "b300": _B200,
}


def rates(device: DeviceFacts) -> Rates:
    """Return the rates of a card; a card without any is taken as an H200."""
    return _RATES.get(device.card, _H200)


def call_bytes(problem: GemmProblem) -> float:
    """Return the bytes that a call has to move: weights of experts with rows, and all rows."""
    return problem.active_experts * problem.expert_bytes + problem.planned_rows * problem.row_bytes


def floor_us(problem: GemmProblem, device: DeviceFacts) -> float:
    """Return the time that no kernel goes below: the launch and the bytes, or the arithmetic."""
    rate = rates(device)
    launch_us = rate.direct_launch_us if problem.k <= MAX_DIRECT_K else rate.launch_us
    memory_us = launch_us + call_bytes(problem) / rate.memory_bytes_per_us
    return max(memory_us, problem.flop / rate.wgmma_flop_per_us)


def predict_us(config: Config, problem: GemmProblem, device: DeviceFacts) -> float:
    """Return the predicted microseconds of one call."""
    if isinstance(config, DecodeConfig):
        return _decode_us(config, problem, device)
    if isinstance(config, DirectConfig):
        return _direct_us(config, problem, device)
    return _prefill_us(config, problem, device)


def _decode_us(config: DecodeConfig, problem: GemmProblem, device: DeviceFacts) -> float:
    rate = rates(device)
    feature_tiles = math.ceil(problem.n / config.tile_features)
    passes = 0.0
    padded_rows = 0.0
    for rows, experts in problem.load_histogram:
        count = math.ceil(rows / config.max_tokens)
        passes += experts * count
        padded_rows += experts * count * 8 * math.ceil(rows / count / 8)
    weight_us = passes * problem.expert_bytes / rate.memory_bytes_per_us
    x_us = padded_rows * feature_tiles * 2 * problem.k / rate.l2_bytes_per_us
    out_us = problem.planned_rows * 2 * problem.n / rate.memory_bytes_per_us
    math_us = 2 * padded_rows * problem.n * problem.k / rate.mma_flop_per_us
    tile_us = passes * feature_tiles * rate.decode_tile_us / device.num_sms
    return rate.launch_us + max(weight_us + x_us + out_us, math_us) + tile_us


def _direct_us(config: DirectConfig, problem: GemmProblem, device: DeviceFacts) -> float:
    rate = rates(device)
    passes = sum(
        experts * math.ceil(rows / config.max_tokens) for rows, experts in problem.load_histogram
    )
    tasks = passes * math.ceil(problem.n / config.tile_features)
    weight_us = passes * problem.expert_bytes / rate.memory_bytes_per_us
    rows_us = problem.planned_rows * problem.row_bytes / rate.memory_bytes_per_us
    task_us = tasks * rate.direct_task_us / (device.num_sms * config.warps)
    return rate.direct_launch_us + weight_us + rows_us + task_us


def _prefill_us(config: PrefillConfig, problem: GemmProblem, device: DeviceFacts) -> float:
    rate = rates(device)
    feature_tiles = math.ceil(problem.n / config.tile_features)
    # Stages are multiplied whole.
    weights = config.tile_features * config.block_k * math.ceil(problem.k / config.block_k)
    weight_bytes = problem.expert_bytes / feature_tiles
    dequantise_us = weights * device.num_sms / rate.dequantised_weights_per_us
    tiles = 0.0
    busy_us = 0.0
    for rows, experts in problem.load_histogram:
        count = math.ceil(rows / config.block_m)
        step = config.width_step
        width = max(config.min_width, step * math.ceil(rows / count / step))
        math_us = 2 * weights * width * device.num_sms / rate.wgmma_flop_per_us
        load_us = weight_bytes / count * device.num_sms / rate.memory_bytes_per_us
        number = experts * count * feature_tiles
        tiles += number
        busy_us += number * (max(math_us, dequantise_us, load_us) + rate.prefill_tile_us)
    if tiles == 0:
        return rate.launch_us
    waves_us = math.ceil(tiles / device.num_sms) * busy_us / tiles
    return rate.launch_us + max(call_bytes(problem) / rate.memory_bytes_per_us, waves_us)
