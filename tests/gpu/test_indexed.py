"""chord.indexed on the card: every shipped configuration, bit for bit where the inputs allow it.

Weights, routings and expected outputs are made once a shape; a test then launches one configuration
on all of them and asks the device once whether anything differed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from indexed import launch

import cases
import tolerance
from chord.plan.config import Config, shipped_configs
from chord.routing import Indexed, align
from chord.weights import PackedExperts

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
E, TOP_K = 8, 2
TOKENS = (1, 17, 64, 130, 400)
BLOCK_SIZES = (16, 64)
ROUTINGS = ("uniform", "one_expert", "empty_experts", "none", "holes")
CONFIGS = shipped_configs("sm_90a")
EXTRA_BLOCKS = 3

each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label())


def choose_experts(tokens: int, routing: str) -> torch.Tensor:
    """Return expert ids, int32 [tokens, TOP_K]; every other expert is empty in empty_experts."""
    if routing == "empty_experts":
        return 2 * cases.topk_ids(tokens, TOP_K, E // 2, seed=tokens, device=DEVICE) + 1
    return cases.topk_ids(tokens, TOP_K, E, routing, seed=tokens, device=DEVICE)


def over_allocated(where: Indexed) -> Indexed:
    """Return longer buffers whose unused part names route 0 and expert 0: it must not be read."""
    slots = torch.arange(where.sorted_token_ids.numel(), device=DEVICE)
    blocks = torch.arange(where.expert_ids.numel(), device=DEVICE)
    used = where.num_tokens_post_padded
    routes = torch.where(slots < used, where.sorted_token_ids, 0)
    experts = torch.where(blocks < used // where.block_m, where.expert_ids, 0)
    return replace(
        where,
        sorted_token_ids=torch.cat((routes, routes.new_zeros(EXTRA_BLOCKS * where.block_m))),
        expert_ids=torch.cat((experts, experts.new_zeros(EXTRA_BLOCKS))),
    )


def expected_outputs(
    x: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor, filling: float = cases.POISON
) -> torch.Tensor:
    """Return x[r // top_k] @ dense[ids[r]].T in the type of dense, [M * top_k, N].

    Args:
        x: bf16, [M, K].
        dense: fp32 or fp64, [E, N, K]: dequantised weights.
        ids: int32, [M, top_k].
        filling: What rows hold whose id is -1.
    """
    products = torch.matmul(x.to(dense.dtype), dense.transpose(1, 2))  # [E, M, N]
    token = torch.arange(ids.numel(), device=x.device) // ids.shape[1]
    expert = ids.flatten().long()
    rows = products[expert.clamp(min=0), token]
    return torch.where((expert >= 0).unsqueeze(1), rows, filling)


@dataclass(frozen=True, eq=False)
class Case:
    """One launch: `expected` is the whole buffer, [rows + 2, N], with its guard rows."""

    name: str
    x: torch.Tensor
    routing: Indexed
    expected: torch.Tensor


class Shape:
    """Weights of one (N, K) with everything that has to come out, made when first asked for."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.integer = cases.random_weights(E, n, k, device=DEVICE)

    @functools.cached_property
    def integer_experts(self) -> PackedExperts:
        return self.integer.pack()

    @functools.cached_property
    def powers(self) -> tuple[PackedExperts, list[Case]]:
        """Scales 1 to 16, another one in the next group: a wrong group shows at once."""
        scales = cases.random_weights(E, 1, self.k, scale_powers=5, device=DEVICE).scales
        weights = cases.Weights(self.integer.codes, scales.expand(E, self.n, -1).contiguous())
        dense = weights.dequantize()
        return weights.pack(), self.make_cases(dense, (17, 130), ("uniform",), (16,))

    @functools.cached_property
    def real(self) -> tuple[PackedExperts, list[Case]]:
        """REAL inputs; `expected` is fp64, without guard rows.

        In a row of a few sums of 32 products these may all nearly cancel, and then the rounding
        of the weights to bf16 is large beside them; there the reference has that rounding too.
        """
        weights = cases.random_weights(E, self.n, self.k, kind="real", device=DEVICE)
        dense = weights.dequantize(torch.float64)
        if self.n < 64:
            dense = dense.bfloat16().double()
        made = []
        for tokens in (3, 130):
            x = cases.real_x(tokens, self.k, seed=tokens, device=DEVICE)
            ids = choose_experts(tokens, "uniform")
            where = align(ids, num_experts=E, block_m=16)
            made.append(Case(f"M={tokens}", x, where, expected_outputs(x, dense, ids)))
        return weights.pack(), made

    @functools.cached_property
    def exact(self) -> list[Case]:
        return self.make_cases(self.integer.dequantize(), TOKENS, ROUTINGS, BLOCK_SIZES)

    def make_cases(
        self,
        dense: torch.Tensor,
        token_counts: tuple[int, ...],
        routings: tuple[str, ...],
        block_sizes: tuple[int, ...],
    ) -> list[Case]:
        made = []
        for tokens in token_counts:
            x = cases.exact_x(tokens, self.k, seed=tokens, device=DEVICE)
            for routing in routings:
                ids = choose_experts(tokens, routing)
                expected, inside = cases.guarded(tokens * TOP_K, self.n, device=DEVICE)
                inside.copy_(expected_outputs(x, dense, ids))
                for block_m in block_sizes:
                    where = over_allocated(align(ids, num_experts=E, block_m=block_m))
                    made.append(Case(f"M={tokens} {routing} b{block_m}", x, where, expected))
        return made


def check_exact(experts: PackedExperts, todo: list[Case], config: Config | None) -> None:
    """Launch every case into a poisoned buffer with guards; wait for the device once."""
    wrong = []
    for case in todo:
        buffer = torch.full_like(case.expected, cases.POISON)
        launch(case.x, experts, case.routing, buffer[1:-1], config=config)
        wrong.append((buffer != case.expected).sum())  # NaN counts: nothing expected is NaN
    counts = torch.stack(wrong).tolist()
    failed = [
        f"{case.name}: {count} values" for case, count in zip(todo, counts, strict=True) if count
    ]
    if failed:
        first = next(case for case, count in zip(todo, counts, strict=True) if count)
        buffer = torch.full_like(first.expected, cases.POISON)
        launch(first.x, experts, first.routing, buffer[1:-1], config=config)
        where = (buffer != first.expected).nonzero()[:1].tolist() or "nowhere when run again"
        listed = "; ".join(failed[:6])
        pytest.fail(
            f"{len(failed)} of {len(todo)} launches differ (guard rows included): {listed}; "
            f"{first.name} differs first at {where} of the buffer"
        )


@pytest.fixture(
    scope="module",
    params=(*cases.SMALL_SHAPES, *cases.RAGGED_SHAPES),
    ids=lambda shape: f"N{shape[0]}-K{shape[1]}",
)
def shape(request: pytest.FixtureRequest) -> Shape:
    return Shape(*request.param)


@functools.lru_cache(maxsize=1)
def short_shape(n: int, k: int) -> Shape:
    return Shape(n, k)


def fitted(shape: Shape, config: Config) -> Shape:
    """Return the shape, or one of a shorter K with the same tail that the configuration takes."""
    k = cases.k_for(config, shape.k)
    return shape if k == shape.k else short_shape(shape.n, k)


@pytest.mark.field_case(4)
@each_config
def test_exact_inputs_match_bit_for_bit(shape: Shape, config: Config) -> None:
    """Field case 4, and rows nobody routes and guard rows keep what they held."""
    shape = fitted(shape, config)
    check_exact(shape.integer_experts, shape.exact, config)


@pytest.mark.field_case(4)
@each_config
def test_scales_of_other_powers_of_two_match_bit_for_bit(shape: Shape, config: Config) -> None:
    check_exact(*fitted(shape, config).powers, config)


@each_config
def test_real_inputs_stay_within_the_row_limit(shape: Shape, config: Config) -> None:
    experts, todo = fitted(shape, config).real
    for case in todo:
        out = launch(case.x, experts, case.routing, config=config)
        tolerance.assert_rows_close(out, case.expected, what=case.name)


# --- single properties --------------------------------------------------------------------------


@functools.cache
def one_hot_case(n: int, k: int) -> tuple[PackedExperts, torch.Tensor, Indexed, torch.Tensor]:
    weights = cases.random_weights(2, n, k, kind="real", device=DEVICE)
    x = cases.one_hot_x(torch.arange(k, device=DEVICE), k)
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE).expand(k, 2).contiguous()
    # Row (column, expert) of the output is that column of the expert's weight.
    expected = weights.dequantize().bfloat16().permute(2, 0, 1).reshape(2 * k, n)
    return weights.pack(), x, align(ids, num_experts=2, block_m=16), expected


@pytest.mark.parametrize(("n", "k"), [(512, 1056), (72, 160), (256, 2048)])
@each_config
def test_one_hot_rows_read_the_weight_itself(config: Config, n: int, k: int) -> None:
    """Every code at every place, times real scales, rounded to bf16 exactly once."""
    experts, x, where, expected = one_hot_case(n, cases.k_for(config, k))
    tolerance.assert_exact(launch(x, experts, where, config=config), expected)


# A NaN with all bits set is what a place of the scratch holds that has no partial sum.
@pytest.mark.parametrize("bits", [0x7FC0, -1, 0x7F80], ids=["nan", "nan of all bits", "inf"])
@pytest.mark.parametrize(("n", "k"), [(200, 352), (1856, 2688)])
@each_config
def test_nan_and_infinity_stay_in_their_rows(config: Config, n: int, k: int, bits: int) -> None:
    k = cases.k_for(config, k)
    weights = cases.random_weights(E, n, k, device=DEVICE)
    experts, dense = weights.pack(), weights.dequantize()
    for tokens in (17, 130):
        x = cases.exact_x(tokens, k, device=DEVICE)
        ids = cases.topk_ids(tokens, TOP_K, E, device=DEVICE)
        ids[[1, 7]] = -1  # rows that nobody routes: no output may know of them
        ids[2] = torch.tensor([E - 1, 0], device=DEVICE)
        expected = expected_outputs(x, dense, ids).bfloat16()
        dirty = x.clone()
        routed = [0, 2, tokens - 1]
        dirty.view(torch.int16)[[1, 7, *routed]] = bits
        where = align(ids, num_experts=E, block_m=16)
        out = cases.poisoned(tokens * TOP_K, n, device=DEVICE)
        launch(dirty, experts, where, out, config=config)
        spoilt = torch.zeros(tokens, dtype=torch.bool, device=DEVICE)
        spoilt[routed] = True
        spoilt = spoilt.repeat_interleave(TOP_K)
        tolerance.assert_exact(out[~spoilt], expected[~spoilt], what="rows without NaN")
        assert not out[spoilt].isfinite().any(), "a NaN or an infinity was lost"
        # Nothing of it is left for the next launch.
        launch(x, experts, where, out.fill_(cases.POISON), config=config)
        tolerance.assert_exact(out, expected, what="the next launch")


@each_config
def test_blocks_of_expert_minus_one_are_skipped(config: Config) -> None:
    """An engine may leave remote experts' blocks in the buffers, with -1 for their expert."""
    n, k, tokens = 136, cases.k_for(config, 352), 130
    weights = cases.random_weights(E, n, k, device=DEVICE)
    x = cases.exact_x(tokens, k, device=DEVICE)
    ids = cases.topk_ids(tokens, TOP_K, E, device=DEVICE)
    where = align(ids, num_experts=E, block_m=16)
    skipped = torch.zeros(where.expert_ids.numel(), 16, dtype=torch.bool, device=DEVICE)
    skipped[::3] = True
    padded = torch.cat((where.sorted_token_ids, where.sorted_token_ids.new_zeros(16)))
    routes = padded[: skipped.numel()][skipped.flatten()].long()
    experts_of_blocks = where.expert_ids.clone()
    experts_of_blocks[::3] = -1
    expected = expected_outputs(x, weights.dequantize(), ids).bfloat16()
    expected[routes[routes < tokens * TOP_K]] = cases.POISON
    out = cases.poisoned(tokens * TOP_K, n, device=DEVICE)
    launch(x, weights.pack(), replace(where, expert_ids=experts_of_blocks), out, config=config)
    tolerance.assert_exact(out, expected)


@functools.cache
def real_layer(n: int, k: int) -> PackedExperts:
    return cases.random_weights(E, n, k, kind="real", device=DEVICE).pack()


@pytest.mark.parametrize("tokens", [17, 400])
@pytest.mark.parametrize(("n", "k"), [(2880, 2880), (512, 7168)])
@each_config
def test_repeats_and_replays_give_the_same_bits(
    config: Config, n: int, k: int, tokens: int
) -> None:
    k = cases.k_for(config, k)
    experts = real_layer(n, k)
    x = cases.real_x(tokens, k, device=DEVICE)
    where = align(choose_experts(tokens, "uniform"), num_experts=E, block_m=16)
    first = launch(x, experts, where, config=config).view(torch.int16)
    differing = []
    for _ in range(20):
        again = launch(x, experts, where, config=config).view(torch.int16)
        differing.append((again != first).sum())
    out = cases.poisoned(tokens * TOP_K, n, device=DEVICE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, experts, where, out, config=config)
    for _ in range(5):
        out.fill_(cases.POISON)
        graph.replay()
        differing.append((out.view(torch.int16) != first).sum())
    assert not any(torch.stack(differing).tolist())


SWEEP = (
    *(1, 2, 3, 5, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 65, 100, 130, 200, 257, 400),
    *(513, 800, 1025, 2049, 4097),
)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "n", "k"), [(E, TOP_K, 1856, 2688), (48, 8, 512, 2048), (1, 1, 64, 32)]
)
def test_the_planners_own_choice(num_experts: int, top_k: int, n: int, k: int) -> None:
    """config=None over row counts, with the routing's values validated as well."""
    weights = cases.random_weights(num_experts, n, k, device=DEVICE)
    experts, dense = weights.pack(), weights.dequantize()
    wrong = []
    for tokens in SWEEP:
        x = cases.exact_x(tokens, k, seed=tokens, device=DEVICE)
        ids = cases.topk_ids(tokens, top_k, num_experts, "holes", seed=tokens, device=DEVICE)
        where = align(ids, num_experts=num_experts, block_m=16)
        where.validate(tokens, num_experts)
        buffer, out = cases.guarded(tokens * top_k, n, device=DEVICE)
        expected = torch.full_like(buffer, cases.POISON)
        expected[1:-1].copy_(expected_outputs(x, dense, ids))
        launch(x, experts, where, out)
        wrong.append((buffer != expected).sum())
    counts = torch.stack(wrong).tolist()
    assert not any(counts), {m: c for m, c in zip(SWEEP, counts, strict=True) if c}
