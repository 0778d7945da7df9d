"""The stages of the whole layer on the emulator: launches of its kernels, on torch CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from chord.emulator.build import build, build_source
from chord.emulator.runner import (
    AWAITED,
    INPUT,
    OUTPUT,
    Launch,
    alone,
    gemm_operands,
    map_of_rows,
    run_launch,
    run_program,
)
from chord.jit.params import COMBINE, COUNT, ROUTE, WEIGHT_TYPES, FixedKernel, addressing_layout
from chord.jit.source import ENTRY, render
from chord.plan.config import NO_SUM, Config
from chord.weights import PackedExperts


@dataclass(frozen=True, eq=False)
class Sorted:
    """What the route kernel writes: int32, [E + 1], [capacity] and [routes]; blocks if aligned.

    And the scratch that it has cleared, int32.
    """

    offsets: torch.Tensor
    routes: torch.Tensor
    positions: torch.Tensor
    block_experts: torch.Tensor
    num_rows_padded: torch.Tensor
    cleared: torch.Tensor


def _unit(kernel: FixedKernel) -> str:
    words = kernel.name.capitalize()
    return f"""\
{render(kernel, "")}
#include "runtime/launch.hpp"

namespace {{
void enter(const void* params) {{ {ENTRY}(*static_cast<const chord::{words}Params*>(params)); }}
}}  // namespace

const ChordUnit chord_unit{{enter, {kernel.num_threads}, {kernel.shared_bytes}}};
"""


def _run(
    kernel: FixedKernel,
    values: dict[str, torch.Tensor | int | float],
    outputs: tuple[str, ...],
    num_blocks: int,
    seed: int,
    flavour: str = "fast",
    awaited: tuple[str, ...] = (),
    replaced: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Launch a fixed kernel; return copies of its outputs, by name."""
    uses = dict.fromkeys(outputs, OUTPUT) | dict.fromkeys(awaited, AWAITED)
    names = {name for name, _ in kernel.fields}
    tensors = {
        name: alone(value)
        for name, value in values.items()
        if name in names and isinstance(value, torch.Tensor)
    }
    packed = []
    for name, kind in kernel.fields:
        if kind == "padding":
            continue
        value = values[name]
        packed.append(tensors[name].data_ptr() if name in tensors else value)
    launch = Launch(
        kernel.packer.pack(*packed),
        [
            (name, tensor, uses.get(name, INPUT))
            for name, tensor in tensors.items()
            if tensor.numel()
        ],
    )
    library = build_source(_unit(kernel), kernel.name, flavour=flavour, replaced=replaced)
    (run_launch if flavour == "fast" else run_program)(library, launch, num_blocks, seed)
    return {name: tensors[name].clone() for name in outputs if name in tensors}


def route(
    ids: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    *,
    block_m: int = 1,
    num_blocks: int = 1,
    clearing_blocks: int = 0,
    uncleared_words: int = 0,
    seed: int = 0,
    flavour: str = "fast",
    replaced: Mapping[str, str] | None = None,
) -> Sorted:
    """Sort the routes of ids, int32 or int64 [T, top_k], with every output the kernel has.

    `clearing_blocks` more blocks clear `uncleared_words` words of scratch.
    """
    num_routes = ids.numel()
    capacity = num_routes + num_experts * (block_m - 1)
    blocks = -(-capacity // block_m)

    def empty(size: int) -> torch.Tensor:
        return torch.full((size,), -12345, dtype=torch.int32)

    values: dict[str, torch.Tensor | int] = {
        "ids": ids.flatten() if num_routes else 0,
        "expert_map": 0 if expert_map is None else expert_map,
        "counts": 0,
        "offsets": empty(num_experts + 1),
        "routes": empty(capacity) if capacity else 0,
        "positions": empty(num_routes) if num_routes else 0,
        "block_experts": empty(blocks) if blocks else 0,
        "num_rows_padded": empty(1),
        "ids_are_64bit": int(ids.dtype is torch.int64),
        "map_is_64bit": int(expert_map is not None and expert_map.dtype is torch.int64),
        "num_routes": num_routes,
        "num_ids": num_experts if expert_map is None else expert_map.numel(),
        "num_experts": num_experts,
        "block_m": block_m,
        "capacity": capacity,
        "num_blocks": blocks,
        "share": -(-num_routes // num_blocks),
        "sorting_blocks": num_blocks,
        "uncleared": empty(uncleared_words) if uncleared_words else 0,
        "uncleared_words": uncleared_words,
        "cleared_value": NO_SUM,
    }
    names = ("offsets", "routes", "positions", "block_experts", "num_rows_padded", "uncleared")
    if num_blocks > 1:
        values["counts"] = empty(num_blocks * num_experts)
        made = _run(COUNT, values, ("counts",), num_blocks, seed, flavour, replaced=replaced)
        values["counts"] = made["counts"]
    grid = num_blocks + clearing_blocks
    made = _run(ROUTE, values, names, grid, seed, flavour, replaced=replaced)
    return Sorted(*(made.get(name, torch.empty(0, dtype=torch.int32)) for name in names))


def combine(
    rows: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None,
    num_tokens: int,
    *,
    scale: float = 1.0,
    shared: torch.Tensor | None = None,
    seed: int = 0,
    flavour: str = "fast",
    replaced: Mapping[str, str] | None = None,
) -> torch.Tensor:
    """Sum rows, bf16 [R, N], of positions, int32 [T * top_k]; return bf16 [T, N]."""
    n = rows.shape[1]
    values: dict[str, torch.Tensor | int | float] = {
        "rows": rows,
        "positions": positions,
        "router_weights": 0 if weights is None else weights.flatten(),
        "router_weight_type": 0 if weights is None else type_of(weights),
        "shared": 0 if shared is None else shared,
        "out": torch.full((num_tokens, n), float("nan"), dtype=torch.bfloat16),
        "scale": scale,
        "top_k": positions.numel() // num_tokens,
        "n": n,
    }
    parts = -(-n // (8 * COMBINE.num_threads))
    blocks = num_tokens * parts
    awaited = ("rows", "shared")
    return _run(COMBINE, values, ("out",), blocks, seed, flavour, awaited, replaced)["out"]


def type_of(weights: torch.Tensor) -> int:
    return WEIGHT_TYPES.index(str(weights.dtype).removeprefix("torch."))


def gemm(
    config: Config,
    addressing: str,
    x: torch.Tensor,
    packed: PackedExperts,
    out: torch.Tensor,
    given: dict[str, torch.Tensor | int | float | bytes],
    *,
    num_blocks: int = 3,
    seed: int = 0,
    flavour: str = "fast",
    replaced: Mapping[str, str] | None = None,
) -> torch.Tensor:
    """Run one of the layer's GEMMs; `given` are the fields of its addressing's parameters.

    The tensor map of x is added where there is one. The routing is what gate_up has to wait for,
    down for its rows.
    """
    is_down = addressing == "RoutedDown"
    x_use = AWAITED if is_down else INPUT
    fields, tensors = gemm_operands(config, x, packed, out, num_blocks, x_use)
    x, out = tensors[0][1], tensors[2][1]
    layout = addressing_layout(addressing)
    tables = {
        name: alone(value) for name, value in given.items() if isinstance(value, torch.Tensor)
    }
    given = {"x_map": map_of_rows(x)} | given
    params = layout.packer.pack(
        *fields,
        *(
            tables[name].data_ptr() if name in tables else given[name]
            for name, kind in layout.fields
            if kind != "padding"
        ),
    )
    launch = Launch(
        params,
        [
            *tensors,
            *(
                (name, table, AWAITED if name in ("offsets", "routes") and not is_down else INPUT)
                for name, table in tables.items()
            ),
        ],
    )
    library = build(config, addressing=addressing, flavour=flavour, replaced=replaced)
    (run_launch if flavour == "fast" else run_program)(library, launch, num_blocks, seed)
    return out
