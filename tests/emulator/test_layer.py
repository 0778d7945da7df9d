"""The stages of the whole layer on the CPU: route sort, gate_up with SwiGLU, down, top-k sum."""

from __future__ import annotations

import math

import layer
import pytest
import torch
from faults import SORTING, SORTING_TWICE, Fault
from launches import DIRECT_8, DIRECT_16, PREFILL_32, PREFILL_LONG

import cases
import tolerance
from chord.emulator import EmulatorError
from chord.plan.config import NO_SUM, Config, DecodeConfig
from chord.routing import align, local_experts
from chord.weights import PackedExperts

pytestmark = pytest.mark.emulator

DECODE = DecodeConfig(max_tokens=16, warps=8, block_k=128, stages=2)
DECODE_WIDE = DecodeConfig(max_tokens=24, warps=4, block_k=128, stages=2, warp_features=64)
each_config = pytest.mark.parametrize(
    "config",
    (DECODE, DECODE_WIDE, DIRECT_8, DIRECT_16, PREFILL_32, PREFILL_LONG),
    ids=lambda c: f"{c.kernel}{c.tile_rows}",
)

# --- route --------------------------------------------------------------------------------------


def expected_sort(
    ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None
) -> tuple[list[list[int]], list[int]]:
    """Return the routes of each expert, ascending, and the local expert of each route."""
    num_ids = num_experts if expert_map is None else expert_map.numel()
    local = local_experts(ids, num_ids, expert_map).flatten()
    local = torch.where(local < num_experts, local, -1).tolist()
    groups: list[list[int]] = [[] for _ in range(num_experts)]
    for route, expert in enumerate(local):
        if expert >= 0:
            groups[expert].append(route)
    return groups, local


def check_sort(
    ids: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    **options: object,
) -> None:
    made = layer.route(ids, num_experts, expert_map, **options)
    groups, local = expected_sort(ids, num_experts, expert_map)
    counts = torch.tensor([0, *(len(group) for group in groups)])
    assert made.offsets.tolist() == counts.cumsum(0).tolist()
    routes = [route for group in groups for route in group]
    assert made.routes[: len(routes)].tolist() == routes
    where = {route: position for position, route in enumerate(routes)}
    assert made.positions.tolist() == [where.get(route, -1) for route in range(len(local))]
    assert made.num_rows_padded.item() == len(routes)


IDS = {
    "none": torch.zeros(0, 8, dtype=torch.int32),
    "one": torch.tensor([[3]], dtype=torch.int32),
    "all -1": torch.full((9, 4), -1, dtype=torch.int32),
    "uniform": cases.topk_ids(70, 4, 12),
    "skewed": cases.topk_ids(150, 3, 12, "skewed"),
    "one expert": cases.topk_ids(90, 2, 12, "one_expert"),
    "holes": cases.topk_ids(60, 4, 12, "holes"),
    "out of range": torch.tensor([[12, -7, 11, 0], [2**31 - 1, -(2**31), 5, 5]], dtype=torch.int32),
}


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("num_blocks", (1, 3))
@pytest.mark.parametrize("name", IDS)
def test_route(name: str, num_blocks: int, dtype: torch.dtype) -> None:
    check_sort(IDS[name].to(dtype), 12, num_blocks=num_blocks, seed=num_blocks)


def test_route_of_many_ids_and_experts() -> None:
    """Several rounds a warp, every thread has experts, and 64-bit ids beyond 32 bits."""
    check_sort(cases.topk_ids(640, 8, 1024), 1024, num_blocks=2)
    check_sort(cases.topk_ids(700, 8, 48), 48, num_blocks=1)
    far = torch.tensor([[1 << 32, 3, -(1 << 32), (1 << 32) + 3]])
    check_sort(far, 4)


@pytest.mark.field_case(1)
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("num_blocks", (1, 4))
def test_route_through_an_expert_map(num_blocks: int, dtype: torch.dtype) -> None:
    case = cases.partial_routing()
    check_sort(case.topk_ids, 48, case.expert_map.to(dtype), num_blocks=num_blocks)
    check_sort(case.local_ids.long(), 48, num_blocks=num_blocks)
    # A map that names experts this rank does not hold gives nobody.
    wrong = case.expert_map.clone()
    wrong[240], wrong[241] = 48, -3
    check_sort(case.topk_ids, 48, wrong, num_blocks=num_blocks)


@pytest.mark.parametrize("num_blocks", (1, 3))
@pytest.mark.parametrize("block_m", (1, 8, 16, 48))
@pytest.mark.parametrize("name", IDS)
def test_route_makes_the_buffers_of_align(name: str, block_m: int, num_blocks: int) -> None:
    ids = IDS[name]
    made = layer.route(ids, 12, block_m=block_m, num_blocks=num_blocks)
    known = torch.where((ids >= 0) & (ids < 12), ids, -1)
    expected = align(known, num_experts=12, block_m=block_m)
    assert torch.equal(made.routes, expected.sorted_token_ids)
    assert torch.equal(made.block_experts, expected.expert_ids)
    assert torch.equal(made.num_rows_padded, expected.num_tokens_post_padded)


@pytest.mark.parametrize("num_blocks", (1, 3))
@pytest.mark.parametrize(("words", "clearing_blocks"), ((4, 1), (4 * 512 * 9 + 4, 2), (4096, 5)))
def test_route_clears_scratch_beside_the_sort(
    num_blocks: int, words: int, clearing_blocks: int
) -> None:
    ids = cases.topk_ids(60, 4, 12, "holes")
    clearing = {"clearing_blocks": clearing_blocks, "uncleared_words": words}
    check_sort(ids, 12, num_blocks=num_blocks, **clearing)
    made = layer.route(ids, 12, num_blocks=num_blocks, **clearing)
    assert made.cleared.eq(NO_SUM).all()
    assert made.cleared.numel() == words


def test_blocks_that_clear_are_not_taken_for_blocks_that_sort() -> None:
    ids = cases.topk_ids(90, 8, 300)
    check_sort(ids, 300, num_blocks=3, clearing_blocks=5, uncleared_words=4096)


@pytest.mark.parametrize("seed", range(3))
def test_route_in_every_interleaving(seed: int) -> None:
    check_sort(cases.topk_ids(300, 4, 40, "skewed"), 40, num_blocks=4, seed=seed)


@pytest.mark.parametrize(
    ("num_experts", "fault"),
    [*((40, fault) for fault in SORTING), *((600, fault) for fault in SORTING_TWICE)],
    ids=lambda value: value.name if isinstance(value, Fault) else str(value),
)
def test_planted_fault_in_the_sort_is_noticed(num_experts: int, fault: Fault) -> None:
    ids = cases.topk_ids(300, 4, num_experts, "skewed")
    with pytest.raises(EmulatorError, match=fault.message):
        layer.route(ids, num_experts, num_blocks=4, replaced=fault.replaced())


def test_route_under_sanitizers() -> None:
    check_sort(cases.topk_ids(40, 4, 12, "holes"), 12, num_blocks=2, flavour="sanitize")


# --- gate_up ------------------------------------------------------------------------------------


def swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = math.inf,
) -> torch.Tensor:
    """The formula of kernels/swiglu.cuh in FP64."""
    gate, up = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def without_traces(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.abs() < 1e-30, 0.0, values)


class GateUp:
    """EXACT operands of a gate_up GEMM over sorted routes, and its sums, which are exact.

    Only the activation is rounded then: to bf16, after functions good to 2 ulp of FP32. Scales of
    1/16 put most sums where sigmoid bends.
    """

    def __init__(
        self,
        tokens: int,
        intermediate: int,
        hidden: int,
        *,
        num_experts: int = 3,
        top_k: int = 2,
        routing: str = "uniform",
        scale: float = 1 / 16,
    ) -> None:
        ids = cases.topk_ids(tokens, top_k, num_experts, routing)
        self.weights = cases.random_weights(num_experts, 2 * intermediate, hidden)
        self.weights.scales.mul_(scale)
        self.x = cases.exact_x(tokens, hidden)
        self.top_k = top_k
        self.sorted = layer.route(ids, num_experts)
        self.router = cases.topk_weights(tokens, top_k, kind="real")
        self.sums = cases.expected_rows(self.x, self.weights, ids, top_k)
        self.out = cases.poisoned(tokens * top_k, intermediate)

    def run(
        self,
        config: Config,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        limit: float = math.inf,
        router: torch.Tensor | None = None,
        **options: object,
    ) -> None:
        """Launch and compare."""
        packed: PackedExperts = self.weights.pack(interleave_gate_up=True)
        fields = {
            "offsets": self.sorted.offsets,
            "routes": self.sorted.routes,
            "router_weights": 0 if router is None else router,
            "router_weight_type": 0 if router is None else layer.type_of(router),
            "power_scale": -alpha / math.log(2),
            "beta": beta,
            "limit": limit,
            "num_experts": packed.num_experts,
            "top_k": self.top_k,
        }
        name = "RoutedGateUp" if router is None else "RoutedGateUpWeighted"
        out = layer.gemm(config, name, self.x, packed, self.out, fields, **options)
        used = int(self.sorted.num_rows_padded)
        routes = self.sorted.routes[:used].long()
        sums = self.sums[routes]
        if router is not None:
            sums = sums * router.flatten()[routes].float().unsqueeze(1)
        gate, up = sums.chunk(2, dim=1)
        expected = swiglu(gate, up, alpha, beta, limit)
        # Of gates below -69 hardly anything is left, and exp2 keeps fewer digits of it.
        tolerance.assert_within_ulp(without_traces(out[:used]), without_traces(expected.bfloat16()))
        assert cases.is_poison(out[used:]), "a row of nobody was written"


# Tokens that make an odd and an even number of eights; tails of N (16, of 64 and of 256) and of K.
SHAPES = ((5, 128, 128), (40, 8, 64), (23, 136, 160), (60, 24, 96), (9, 264, 288))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_config
def test_gate_up(config: Config, shape: tuple[int, int, int]) -> None:
    tokens, intermediate, hidden = shape
    GateUp(tokens, intermediate, cases.k_for(config, hidden)).run(config, seed=tokens)


@each_config
def test_gate_up_of_tiles_that_blocks_share(config: Config) -> None:
    """SwiGLU comes after all partial sums: decode's finisher applies it, once."""
    GateUp(7, 128, cases.k_for(config, 1056)).run(config, num_blocks=7, seed=4)


@each_config
def test_gate_up_with_the_constants_of_models(config: Config) -> None:
    given = GateUp(11, 40, 96)
    given.run(config, limit=0.75)
    given.run(config, alpha=1.702, beta=1.0, limit=7.0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@each_config
def test_gate_up_with_router_weights(config: Config, dtype: torch.dtype) -> None:
    given = GateUp(21, 40, 96, routing="holes")
    given.run(config, router=given.router.to(dtype))


@each_config
def test_gate_up_without_rows(config: Config) -> None:
    GateUp(4, 64, 64, routing="none").run(config)


@each_config
def test_gate_up_of_large_sums_stays_finite(config: Config) -> None:
    """exp2 overflows for gates below -88: sigmoid is 0 then, not NaN."""
    GateUp(6, 64, 256, scale=8).run(config)


@pytest.mark.parametrize("config", (DECODE, DIRECT_16, PREFILL_32), ids=lambda c: c.kernel)
def test_gate_up_under_sanitizers(config: Config) -> None:
    given = GateUp(13, 72, 96)
    given.run(config, router=given.router, flavour="sanitize", num_blocks=2)


# --- down and combine ---------------------------------------------------------------------------


@each_config
def test_down(config: Config) -> None:
    ids = cases.topk_ids(30, 2, 5, "holes")
    weights = cases.random_weights(5, 136, 160, scale_powers=3)
    made = layer.route(ids, 5)
    used = int(made.num_rows_padded)
    x = cases.exact_x(60, 160)
    x[used:] = float("nan")
    fields = {"offsets": made.offsets, "num_experts": 5}
    out = cases.poisoned(60, 136)
    out = layer.gemm(config, "RoutedDown", x, weights.pack(), out, fields)
    owners = cases.owners_of_counts(made.offsets.diff().tolist())
    assert torch.equal(out[:used], cases.expected_rows(x[:used], weights, owners).bfloat16())
    assert cases.is_poison(out[used:])


@pytest.mark.parametrize("n", (8, 136, 1024, 1032))
@pytest.mark.parametrize("top_k", (1, 2, 8, 11))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, None))
def test_combine(top_k: int, n: int, dtype: torch.dtype | None) -> None:
    tokens = 5
    ids = cases.topk_ids(tokens, top_k, 12, "holes")
    ids[3] = -1
    made = layer.route(ids, 12)
    used = int(made.num_rows_padded)
    rows = cases.real_x(tokens * top_k, n)
    rows[used:] = float("nan")
    weights = None if dtype is None else cases.topk_weights(tokens, top_k, kind="real").to(dtype)
    out = layer.combine(rows, made.positions, weights, tokens)
    positions = made.positions.view(tokens, top_k)
    expected = torch.zeros(tokens, n, dtype=torch.float64)
    for t in range(tokens):
        for j in range(top_k):
            if positions[t, j] >= 0:
                weight = 1.0 if weights is None else weights[t, j].double()
                expected[t] += weight * rows[positions[t, j]].double()
    assert not out[3].any() and out[3].isfinite().all()
    tolerance.assert_within_ulp(out, expected.bfloat16())


@pytest.mark.parametrize("n", (8, 1032))
@pytest.mark.parametrize("top_k", (2, 11))
@pytest.mark.parametrize(
    ("scale", "is_shared"),
    ((-2.5, False), (0.4, False), (0.0, False), (1.0, True), (2.827, True), (0.4, True)),
)
def test_combine_scales_and_adds(top_k: int, n: int, scale: float, is_shared: bool) -> None:
    tokens = 3
    made = layer.route(cases.topk_ids(tokens, top_k, 12, "holes"), 12)
    positions = made.positions.view(tokens, top_k).clone()
    positions[1] = -1
    rows = cases.real_x(tokens * top_k, n)
    shared = cases.real_x(tokens, n, seed=1) if is_shared else None
    if shared is not None:
        shared[1, ::2] = -0.0
    out = layer.combine(rows, positions.flatten(), None, tokens, scale=scale, shared=shared)
    plain = layer.combine(rows, positions.flatten(), None, tokens)
    scaled = plain * scale
    assert torch.equal(out, scaled if shared is None else scaled + shared)
    assert not plain[1].any() and plain[0].any()


def test_combine_under_sanitizers() -> None:
    rows, positions = cases.real_x(4, 136), torch.tensor([3, -1, 0, 2], dtype=torch.int32)
    for shared in (None, cases.real_x(2, 136)):
        layer.combine(rows, positions, torch.ones(4), 2, shared=shared, flavour="sanitize")


# --- what a stage waits for -----------------------------------------------------------------------

NOBODY_WAITS = Fault(
    "nobody waits for the kernel before",
    "ptx/sync.cuh",
    "emulator::wait_for_kernel_before();",
    "",
    "(kernel before may still write, without having|nobody of it has) waited for",
)
BLOCKS_WITHOUT_WORK_END = [
    (
        config,
        Fault(
            "a block without work ends at once",
            f"{config.kernel}.cuh",
            f"if ({nothing}) return await<Addressing, Awaits::kRows>();",
            f"if ({nothing}) return;",
            "nobody of it has waited for the kernel before",
        ),
    )
    for config, nothing in ((DECODE, "begin == end"), (DIRECT_8, "count == 0"))
]


ROWS_ARE_ASKED_FOR_EARLY = Fault(
    "rows of x are asked for before the kernel before has written them",
    "direct.cuh",
    "await<Addressing, Awaits::kRows>(); if (kWeightsFirst",
    "if (kWeightsFirst",
    "kernel before may still write, without having waited for",
)


def run_down(config: Config, tokens: int, replaced: dict[str, str], *, num_blocks: int = 3) -> None:
    made = layer.route(cases.topk_ids(tokens, 1, 2), 2)
    fields = {"offsets": made.offsets, "num_experts": 2}
    weights = cases.random_weights(2, 64, 64)
    x, out = cases.exact_x(tokens, 64), cases.poisoned(tokens, 64)
    packed = weights.pack()
    layer.gemm(
        config, "RoutedDown", x, packed, out, fields, num_blocks=num_blocks, replaced=replaced
    )


@each_config
def test_a_stage_that_does_not_wait_is_noticed(config: Config) -> None:
    replaced = NOBODY_WAITS.replaced()
    with pytest.raises(EmulatorError, match=NOBODY_WAITS.message):
        GateUp(5, 64, 64).run(config, replaced=replaced)
    with pytest.raises(EmulatorError, match=NOBODY_WAITS.message):
        run_down(config, 5, replaced)


def test_a_sum_that_does_not_wait_is_noticed() -> None:
    positions = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=NOBODY_WAITS.message):
        layer.combine(cases.real_x(1, 64), positions, None, 2, replaced=NOBODY_WAITS.replaced())


@pytest.mark.parametrize(
    ("config", "fault"), BLOCKS_WITHOUT_WORK_END, ids=lambda value: getattr(value, "kernel", "ends")
)
def test_a_block_without_work_waits_too(config: Config, fault: Fault) -> None:
    """Else the kernel after this one could begin while the one before still runs."""
    few = {"num_blocks": 5}
    run_down(config, 1, {}, **few)
    with pytest.raises(EmulatorError, match=fault.message):
        run_down(config, 1, fault.replaced(), **few)


def test_rows_that_direct_asks_for_early_are_noticed() -> None:
    """Its weights are asked for before the wait, its rows behind it."""
    fault = ROWS_ARE_ASKED_FOR_EARLY
    run_down(DIRECT_8, 5, {})
    with pytest.raises(EmulatorError, match=fault.message):
        run_down(DIRECT_8, 5, fault.replaced())
