"""What may run: the one statement that the dispatcher, the tuner and the tests ask.

Each function returns None or the reason in words, with the values and the rule. Preference is
`cost`'s business. The kernels assert most rules on fields once more.
"""

from __future__ import annotations

from chord.device import DeviceFacts
from chord.plan.config import (
    BARRIER_BYTES,
    MAX_BLOCK_M,
    MAX_DIRECT_K,
    MAX_SEGMENTS,
    Config,
    DecodeConfig,
    DirectConfig,
    PrefillConfig,
    shipped_archs,
)
from chord.plan.problem import GemmProblem
from chord.weights.layout import TILE_N, UNIT_N, reject_shape

ARCHS = {"decode": shipped_archs(), "direct": shipped_archs(), "prefill": ("sm_90a",)}
ADDRESSINGS = (
    "Indexed",
    "ContiguousOffsets",
    "ContiguousIndices",
    "Masked",
    "RoutedGateUp",
    "RoutedGateUpWeighted",
    "RoutedDown",
)
# Gate and up lie interleaved in the weight, and half of its features leave.
SWIGLU_ADDRESSINGS = ("RoutedGateUp", "RoutedGateUpWeighted")
# Rows of x that lie sorted come to prefill by boxes of 16 (kernels/addressing, kSortedRows).
SORTED_ADDRESSINGS = ("ContiguousOffsets", "ContiguousIndices", "Masked", "RoutedDown")
_BOX_ROWS = 16

# The kernels number tiles in 20 bits; half of that is left for the padding of routing blocks.
MAX_TILES = 1 << 19
# 512 threads of 128 registers are what a multiprocessor has.
MAX_DIRECT_WARPS = 16
# Decode numbers its chunks in int, and the direct kernel its tasks.
MAX_CHUNKS = (1 << 31) - 1
# Rows are counted in int, and elements of a row set in units of 16 bytes in 32 bits.
MAX_ROW_CHUNKS = 1 << 32
MAX_ROWS = (1 << 31) - 1
_BARRIER_BYTES_PER_STAGE = 16  # two mbarriers: full and empty


def reject(config: Config, problem: GemmProblem, device: DeviceFacts) -> str | None:
    """Return why `config` cannot run `problem` on `device`, or None if it can."""
    return (
        reject_problem(problem)
        or reject_on_device(config, device)
        or _reject_long_k(config, problem)
        or _reject_boxes(config, problem)
        or _reject_tiles(config, problem)
    )


def reject_problem(problem: GemmProblem) -> str | None:
    """Return why no kernel can run `problem`, whatever the card, or None."""
    n, k, rows = problem.n, problem.k, problem.routed_rows
    if problem.addressing not in ADDRESSINGS:
        return f"addressing {problem.addressing!r} is not one of {', '.join(ADDRESSINGS)}"
    if problem.num_experts < 1:
        return f"num_experts={problem.num_experts} must be at least 1 (experts on this rank)"
    if problem.num_experts > MAX_SEGMENTS:
        return (
            f"num_experts={problem.num_experts} is more than {MAX_SEGMENTS}, which the kernels' "
            f"table of experts holds; split the experts over more ranks, or run them by parts "
            f"(PackedExperts.expert_range)"
        )
    reason = reject_shape(problem.num_experts, n, k)
    if reason is not None:
        return reason
    if problem.addressing in SWIGLU_ADDRESSINGS and n % TILE_N:
        return (
            f"N={n} is not a multiple of {TILE_N} (gate and up features alternate by eights); pad "
            f"the intermediate size"
        )
    if rows < 0 or rows > MAX_ROWS:
        return f"routed_rows={rows} is not in 0..{MAX_ROWS} (rows are counted in 32 bits)"
    widest = max(n, k)
    if rows * (widest // 8) >= MAX_ROW_CHUNKS:
        limit = (MAX_ROW_CHUNKS - 1) // (widest // 8)
        return (
            f"routed_rows={rows} with rows of {widest} elements exceeds {limit} rows (2^32 chunks "
            f"of 16 bytes); split the call by rows"
        )
    return None


def reject_on_device(config: Config, device: DeviceFacts) -> str | None:
    """Return why `config` cannot run on `device` at all, or None."""
    reason = _reject_types(config) or _reject_fields(config)
    if reason is not None:
        return reason
    if device.arch not in ARCHS[config.kernel]:
        why = (
            "wgmma exists on Hopper alone; Blackwell runs every size without it"
            if config.kernel == "prefill"
            else "it is neither compiled nor tested for others"
        )
        archs = ", ".join(ARCHS[config.kernel])
        return f"the {config.kernel} kernel runs on {archs}, not on {device.arch}: {why}"
    if config.smem_bytes() > device.smem_per_block_optin:
        return (
            f"{config.label()} needs {config.smem_bytes()} bytes of shared memory, "
            f"{device.name} gives a block {device.smem_per_block_optin}; use fewer "
            f"{'warps' if isinstance(config, DirectConfig) else 'stages'}"
        )
    return None


def _reject_types(config: Config) -> str | None:
    for name, value in config.fields().items():
        if type(value) is not int:
            return f"{name}={value!r} is not a whole number"
    return None


def _reject_fields(config: Config) -> str | None:
    if isinstance(config, DirectConfig):
        return _reject_direct(config)
    if isinstance(config, DecodeConfig):
        return _reject_decode(config) or _reject_stages(config)
    return _reject_prefill(config) or _reject_stages(config)


def _reject_direct(config: DirectConfig) -> str | None:
    if config.max_tokens not in (8, 16):
        return f"max_tokens={config.max_tokens} is not 8 or 16 (one or two mma wide)"
    if config.warps % 2 or not 2 <= config.warps <= MAX_DIRECT_WARPS:
        return (
            f"warps={config.warps} is not an even number in 2..{MAX_DIRECT_WARPS} (their notes "
            f"fill multiples of 8 bytes; a thread needs 128 registers)"
        )
    if config.max_k % 64 or not 64 <= config.max_k <= MAX_DIRECT_K:
        return (
            f"max_k={config.max_k} is not a multiple of 64 in 64..{MAX_DIRECT_K} (packed "
            f"unit; a warp holds the weights of a task in registers)"
        )
    return None


def _reject_decode(config: DecodeConfig) -> str | None:
    if config.max_tokens % 8 or not 8 <= config.max_tokens <= 64:
        return (
            f"max_tokens={config.max_tokens} is not a multiple of 8 in 8..64 (an mma takes 8 "
            f"tokens, a lane notes two rows)"
        )
    if config.warp_features not in (32, 64):
        return f"warp_features={config.warp_features} is not 32 or 64 (half or all of a unit)"
    if config.warps < 1 or config.threads() > 1024 or config.tile_features % UNIT_N:
        return (
            f"warps={config.warps} with warp_features={config.warp_features} makes "
            f"{config.threads()} threads and {config.tile_features} features; at most 1,024 "
            f"threads and a multiple of {UNIT_N} features (packed unit)"
        )
    return None


def _reject_prefill(config: PrefillConfig) -> str | None:
    if config.width_step not in (8, 16):
        return f"width_step={config.width_step} is not 8 or 16 (token widths of wgmma that pay)"
    if config.block_m % 8 or not 8 <= config.block_m <= MAX_BLOCK_M:
        return (
            f"block_m={config.block_m} is not a multiple of 8 in 8..{MAX_BLOCK_M} (two "
            f"accumulators of block_m / 2 registers have to fit beside the fragments)"
        )
    steps, rest = divmod(config.block_m - config.min_width, config.width_step)
    if config.min_width % 8 or config.min_width < 8 or rest or steps < 0:
        return (
            f"min_width={config.min_width} with width_step={config.width_step} does not reach "
            f"block_m={config.block_m} in multiples of 8"
        )
    if not 1 <= config.store_eights <= config.block_m // 8:
        return (
            f"store_eights={config.store_eights} is not in 1..{config.block_m // 8} (eights of "
            f"rows of a tile that two warps store at a time)"
        )
    return None


def _reject_stages(config: DecodeConfig | PrefillConfig) -> str | None:
    if config.block_k <= 0 or config.block_k % 64:
        return f"block_k={config.block_k} is not a positive multiple of 64 (packed unit)"
    most = BARRIER_BYTES // _BARRIER_BYTES_PER_STAGE
    if not 2 <= config.stages <= most:
        return (
            f"stages={config.stages} is not in 2..{most} (one stage loads while one is multiplied; "
            f"barriers of more do not fit)"
        )
    return None


def _reject_long_k(config: Config, problem: GemmProblem) -> str | None:
    if isinstance(config, DirectConfig) and problem.k > config.max_k:
        return (
            f"K={problem.k} is more than max_k={config.max_k}, of which a warp of the direct "
            f"kernel holds the weights in registers"
        )
    return None


def _reject_boxes(config: Config, problem: GemmProblem) -> str | None:
    if not isinstance(config, PrefillConfig) or problem.addressing not in SORTED_ADDRESSINGS:
        return None
    if config.block_m % _BOX_ROWS:
        return (
            f"block_m={config.block_m} is not a multiple of {_BOX_ROWS}: rows of "
            f"{problem.addressing} are copied in boxes of {_BOX_ROWS}, which may not reach beyond "
            f"their tile"
        )
    return None


def _reject_tiles(config: Config, problem: GemmProblem) -> str | None:
    limit = MAX_TILES * config.tile_rows
    if problem.routed_rows > limit:
        return (
            f"routed_rows={problem.routed_rows} makes more than {MAX_TILES} tiles of "
            f"{config.tile_rows} rows; at most {limit} rows, or a configuration with more rows a "
            f"tile"
        )
    if not isinstance(config, PrefillConfig):
        block_k = config.block_k if isinstance(config, DecodeConfig) else config.max_k
        # The padded N: the direct kernel has two tasks of 32 features in each stripe of 64.
        feature_tiles = -(-UNIT_N * -(-problem.n // UNIT_N) // config.tile_features)
        tiles = 2 * -(-problem.routed_rows // config.tile_rows) + MAX_SEGMENTS
        chunks = tiles * feature_tiles * -(-problem.k // block_k)
        if chunks > MAX_CHUNKS:
            return (
                f"routed_rows={problem.routed_rows} with n={problem.n} and k={problem.k} may make "
                f"{chunks} chunks of {config.tile_features} features x {block_k} K, more "
                f"than {MAX_CHUNKS} (counted in 32 bits); split the call by rows"
            )
    return None
