"""The reference against codes that never went through packing, and the meaning of edge cases."""

from __future__ import annotations

import pytest
import torch

import cases
import tolerance
from chord import reference
from chord.errors import InputError
from chord.routing import align

E, TOP_K, BLOCK_M = 6, 2, 4


def run_indexed(
    x: torch.Tensor, weights: cases.Weights, ids: torch.Tensor, **options: object
) -> torch.Tensor:
    routing = align(ids, num_experts=weights.shape[0], block_m=BLOCK_M)
    return reference.indexed(
        x,
        weights.pack(),
        routing.sorted_token_ids,
        routing.expert_ids,
        routing.num_tokens_post_padded,
        ids.shape[1],
        block_m=BLOCK_M,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dequantize(interleave: bool, dtype: torch.dtype) -> None:
    weights = cases.random_weights(2, 48, 96, kind="real")
    packed = weights.pack(interleave_gate_up=interleave)
    result = reference.dequantize(packed, dtype)
    assert result.dtype == dtype
    assert torch.equal(result, weights.dequantize(dtype))


@pytest.mark.parametrize("shape", cases.SMALL_SHAPES)
def test_indexed_is_exact_on_small_ragged_shapes(shape: tuple[int, int]) -> None:
    n, k = shape
    weights = cases.random_weights(E, n, k, seed=n + k)
    for tokens in (1, 17):
        x = cases.exact_x(tokens, k, seed=tokens)
        ids = cases.topk_ids(tokens, TOP_K, E, seed=tokens)
        out = run_indexed(x, weights, ids)
        tolerance.assert_exact(out, cases.expected_rows(x, weights, ids, TOP_K))


@pytest.mark.parametrize("routing", cases.ROUTINGS)
def test_indexed_routings(routing: str) -> None:
    n, k, tokens = 72, 96, 21
    weights = cases.random_weights(E, n, k, scale_powers=3)
    x = cases.exact_x(tokens, k)
    ids = cases.topk_ids(tokens, TOP_K, E, routing)
    expected = cases.expected_rows(x, weights, ids, TOP_K).bfloat16()
    is_routed = (ids.flatten() >= 0).unsqueeze(1)
    buffer, out = cases.guarded(tokens * TOP_K, n)
    assert run_indexed(x, weights, ids, out=out) is out
    untouched = cases.poisoned(tokens * TOP_K, n)
    tolerance.assert_exact(out, torch.where(is_routed, expected, untouched))
    assert cases.is_poison(buffer[0]) and cases.is_poison(buffer[-1])
    fresh = run_indexed(x, weights, ids)
    tolerance.assert_exact(fresh, torch.where(is_routed, expected, 0.0))


def test_one_hot_rows_read_the_weight_itself() -> None:
    weights = cases.random_weights(1, 16, 64, kind="real")
    x = cases.one_hot_x(torch.arange(64), 64)
    out = run_indexed(x, weights, torch.zeros(64, 1, dtype=torch.int32))
    tolerance.assert_exact(out, weights.dequantize()[0].T.bfloat16())


def test_real_inputs_meet_the_bound() -> None:
    """The bound of one GEMM holds with room, and the smallest real fault breaks it by far."""
    n, k, tokens = 64, 2048, 9
    weights = cases.random_weights(2, n, k, kind="real")
    x = cases.real_x(tokens, k)
    ids = cases.topk_ids(tokens, 1, 2)
    out = run_indexed(x, weights, ids)
    exact = run_indexed(x, weights, ids, dtype=torch.float64)
    expected = cases.expected_rows(x, weights, ids)
    tolerance.assert_rows_close(out, expected, tolerance.gemm_bound(k))
    tolerance.assert_within_ulp(out, exact)
    dropped = cases.Weights(weights.codes, weights.scales.clone())
    dropped.scales[..., 5] = 0
    with pytest.raises(AssertionError, match=r"rows exceed 0\.005"):
        tolerance.assert_rows_close(run_indexed(x, dropped, ids), expected)


def test_contiguous() -> None:
    n, k = 24, 64
    weights = cases.random_weights(3, n, k)
    experts = weights.pack()
    x = cases.exact_x(9, k)
    owners = torch.tensor([-1, 0, 0, 0, 2, 2, 2, -1, -1], dtype=torch.int32)
    expected = cases.expected_rows(x, weights, owners).bfloat16()
    owned = (owners >= 0).unsqueeze(1)
    for dtype in (torch.int32, torch.int64):
        offsets = torch.tensor([1, 4, 4, 7], dtype=dtype)
        out = reference.contiguous(x, experts, offsets, out=cases.poisoned(9, n))
        tolerance.assert_exact(out, torch.where(owned, expected, cases.poisoned(9, n)))
    tolerance.assert_exact(
        reference.contiguous(x, experts, m_indices=owners), torch.where(owned, expected, 0.0)
    )


@pytest.mark.field_case(5)
def test_masked() -> None:
    """Field case 5 in small: partial groups leave the other groups' rows alone."""
    n, k = 24, 64
    weights = cases.random_weights(4, n, k)
    experts = weights.pack()
    for max_m in (1, 4, 17):
        counts = torch.tensor([max_m, 0, 1, max_m // 2], dtype=torch.int32)
        x = cases.exact_x(4 * max_m, k).view(4, max_m, k)
        valid = torch.arange(max_m) < counts.unsqueeze(1)
        owners = torch.where(valid, torch.arange(4).unsqueeze(1), -1)
        expected = cases.expected_rows(x.flatten(0, 1), weights, owners).view(4, max_m, n)
        poison = cases.poisoned(4, max_m, n)
        for expected_m in (1, 64):
            out = reference.masked(x, experts, counts, poison.clone(), expected=expected_m)
            tolerance.assert_exact(
                out, torch.where(valid.unsqueeze(-1), expected.bfloat16(), poison)
            )
        fresh = reference.masked(x, experts, counts)
        tolerance.assert_exact(fresh, expected.nan_to_num(0.0).bfloat16())


def test_autocast_changes_nothing() -> None:
    """The kernels do not know it, and the reference accumulates in the dtype that it is given."""
    experts, x = cases.random_weights(E, 72, 96, kind="real").pack(), cases.real_x(8, 96)
    offsets = torch.tensor([0, 2, 2, 5, 5, 8, 8])
    want = reference.contiguous(x, experts, offsets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(reference.contiguous(x, experts, offsets), want)


WRONG_OFFSETS = (
    ([-3, 2, 2, 5, 5, 90, 95], [0, 2, 2, 5, 5, 8, 8]),
    ([0, 3, -9, -9, -9, -9, -9], [0, 3, 3, 3, 3, 3, 3]),
)
WRONG_COUNTS = (([-1, 4, 9, 0, -7, 2], [0, 4, 4, 0, 0, 2]),)


def test_wrong_values_without_validation_count_as_in_the_kernels() -> None:
    """Rows outside x, and counts outside the slots: see kernels/addressing."""
    experts, x = cases.random_weights(E, 72, 96).pack(), cases.exact_x(8, 96)
    slots = cases.exact_x(E * 4, 96).view(E, 4, 96)
    for wrong, right in WRONG_OFFSETS:
        want = reference.contiguous(x, experts, torch.tensor(right), cases.poisoned(8, 72))
        out = cases.poisoned(8, 72)
        reference.contiguous(x, experts, torch.tensor(wrong), out, validate=False)
        assert torch.equal(out, want)
    for wrong, right in WRONG_COUNTS:
        out, want = (cases.poisoned(E * 4, 72).view(E, 4, 72) for _ in range(2))
        reference.masked(slots, experts, torch.tensor(right).int(), want)
        reference.masked(slots, experts, torch.tensor(wrong).int(), out, validate=False)
        assert torch.equal(out, want)
    used, blocks = torch.tensor([8], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    ids = torch.tensor([0, 1, 2, 8, 3, 5, 8, 8], dtype=torch.int32)
    want = reference.indexed(x, experts, ids, blocks, used, 1, cases.poisoned(8, 72), block_m=4)
    ids[6:] = torch.tensor([-1, 99], dtype=torch.int32)
    for count in (8, 9000):
        out = cases.poisoned(8, 72)
        reference.indexed(
            x, experts, ids, blocks, used * 0 + count, 1, out, block_m=4, validate=False
        )
        assert torch.equal(out, want)
    out = cases.poisoned(8, 72)
    reference.indexed(x, experts, ids, blocks, -used, 1, out, block_m=4, validate=False)
    assert cases.is_poison(out)


@pytest.mark.field_case(2)
def test_no_work() -> None:
    """Field case 2: empty results of the right shape, and a normal call straight afterwards."""
    weights = cases.random_weights(E, 64, 64)
    experts, w13 = weights.pack(), cases.random_weights(E, 128, 64).pack()
    none = cases.topk_ids(0, TOP_K, E)
    assert run_indexed(cases.exact_x(0, 64), weights, none).shape == (0, 64)
    assert reference.contiguous(
        cases.exact_x(0, 64), experts, torch.zeros(E + 1, dtype=torch.int32)
    ).shape == (0, 64)
    out = cases.poisoned(5, 64)
    owners = torch.full((5,), -1, dtype=torch.int32)
    reference.contiguous(cases.exact_x(5, 64), experts, m_indices=owners, out=out)
    assert cases.is_poison(out)
    out = cases.poisoned(E, 8, 64)
    counts = torch.zeros(E, dtype=torch.int32)
    reference.masked(cases.exact_x(E * 8, 64).view(E, 8, 64), experts, counts, out, expected=0)
    assert cases.is_poison(out)
    for tokens in (0, 16):
        result = reference.fused_moe(
            cases.exact_x(tokens, 64),
            w13,
            experts,
            cases.topk_weights(tokens, TOP_K),
            cases.topk_ids(tokens, TOP_K, E, "none"),
            out=cases.poisoned(tokens, 64),
        )
        assert result.shape == (tokens, 64)
        assert not result.any()
    test_indexed_routings("uniform")


# --- the whole layer ----------------------------------------------------------------------------


def moe_by_loop(
    hidden: torch.Tensor,
    w13: cases.Weights,
    w2: cases.Weights,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """The formula of the docstring, route by route, fp64."""
    first, second = w13.dequantize(torch.float64), w2.dequantize(torch.float64)
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for token in range(ids.shape[0]):
        for slot, e in enumerate(ids[token].tolist()):
            if e >= 0:
                gate_up = (first[e] @ hidden[token].double()).bfloat16().double()
                gate, up = gate_up.chunk(2)
                middle = (gate / (1 + torch.exp(-gate)) * up).bfloat16().double()
                total[token] += weights[token, slot].double() * (second[e] @ middle)
    return total


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("routing", ["uniform", "one_expert", "holes"])
def test_fused_moe_is_the_formula(routing: str, interleave: bool) -> None:
    hidden, intermediate, tokens = 64, 32, 13
    w13 = cases.random_weights(E, 2 * intermediate, hidden, kind="real", seed=1)
    w2 = cases.random_weights(E, hidden, intermediate, kind="real", seed=2)
    x = cases.real_x(tokens, hidden)
    ids = cases.topk_ids(tokens, 3, E, routing)
    weights = cases.topk_weights(tokens, 3, kind="real")
    out = reference.fused_moe(
        x, w13.pack(interleave_gate_up=interleave), w2.pack(), weights, ids, dtype=torch.float64
    )
    expected = moe_by_loop(x, w13, w2, weights, ids)
    tolerance.assert_within_ulp(out, expected.bfloat16())
    single = reference.fused_moe(x, w13.pack(), w2.pack(), weights, ids)
    tolerance.assert_rows_close(single, expected)


def test_fused_moe_of_the_two_gemms() -> None:
    """Running the GEMMs apart, rows rounded before the sum, stays within the stated limit."""
    hidden, intermediate, tokens = 256, 128, 40
    w13 = cases.random_weights(E, 2 * intermediate, hidden, kind="real", seed=1)
    w2 = cases.random_weights(E, hidden, intermediate, kind="real", seed=2)
    x, ids = cases.real_x(tokens, hidden), cases.topk_ids(tokens, TOP_K, E)
    weights = cases.topk_weights(tokens, TOP_K, kind="real")
    gate, up = run_indexed(x, w13, ids).float().chunk(2, dim=-1)
    middle = (torch.nn.functional.silu(gate) * up).bfloat16()
    rows = run_indexed(middle, w2, ids.view(-1, 1)).view(tokens, TOP_K, hidden)
    out = (rows.float() * weights.unsqueeze(-1)).sum(1).bfloat16()
    expected = reference.fused_moe(x, w13.pack(), w2.pack(), weights, ids)
    tolerance.assert_rows_close(out, expected)


@pytest.mark.field_case(1)
def test_fused_moe_on_one_rank_of_eight() -> None:
    """Field case 1: remote and missing experts give nothing, by map and with local ids alike."""
    case = cases.partial_routing()
    w13 = cases.random_weights(48, 64, 64, seed=1).pack()
    w2 = cases.random_weights(48, 64, 32, seed=2).pack()
    x = cases.exact_x(33, 64)
    weights = cases.topk_weights(33, 8)
    mapped = reference.fused_moe(
        x, w13, w2, weights, case.topk_ids, case.expert_map, cases.poisoned(33, 64)
    )
    local = reference.fused_moe(x, w13, w2, weights, case.local_ids)
    tolerance.assert_exact(mapped, local)
    assert not mapped[list(case.silent_rows)].any()
    assert mapped[[30, 31]].any(dim=1).all()


# --- what is refused ----------------------------------------------------------------------------


def test_inputs_that_do_not_fit() -> None:
    weights = cases.random_weights(E, 64, 64)
    experts = weights.pack()
    ids = cases.topk_ids(4, TOP_K, E)
    x = cases.exact_x(4, 64)
    with pytest.raises(InputError, match=r"x is torch.float32 \[4, 64\].*bfloat16 \[M, K\]"):
        run_indexed(x.float(), weights, ids)
    with pytest.raises(InputError, match=r"x is .* \[4, 32\].*K=64"):
        run_indexed(x[:, :32], weights, ids)
    with pytest.raises(InputError, match=r"x is .* \[64\]"):
        run_indexed(x[0], weights, ids)
    with pytest.raises(InputError, match=r"out is torch.bfloat16 \[4, 64\].*\[8, 64\]"):
        run_indexed(x, weights, ids, out=cases.poisoned(4, 64))
    with pytest.raises(InputError, match="x is on meta"):
        reference.contiguous(x.to("meta"), experts, torch.zeros(E + 1, dtype=torch.int32))
    with pytest.raises(InputError, match="number of experts, 6"):
        reference.masked(x.view(1, 4, 64), experts, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(InputError, match="expert_offsets has 3 elements"):
        reference.contiguous(x, experts, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(InputError, match="neither"):
        reference.contiguous(x, experts)
    with pytest.raises(InputError, match="sorted_token_ids holds ids"):
        run_indexed(x[:2], weights, ids, out=None)


def test_layers_that_do_not_fit() -> None:
    w13 = cases.random_weights(E, 64, 64).pack(interleave_gate_up=True)
    w2 = cases.random_weights(E, 64, 32).pack()
    x, ids, weights = cases.exact_x(4, 64), cases.topk_ids(4, 2, E), cases.topk_weights(4, 2)

    def run(*arguments: object, **options: object) -> None:
        reference.fused_moe(*arguments, **options)  # type: ignore[arg-type]

    with pytest.raises(InputError, match="must agree in E, H and I"):
        run(x, w13, w13, weights, ids)
    with pytest.raises(InputError, match="w2 was packed with interleave_gate_up"):
        square = cases.random_weights(E, 64, 32).pack(interleave_gate_up=True)
        run(x, w13, square, weights, ids)
    with pytest.raises(InputError, match=r"topk_ids has shape \[2, 2\]"):
        run(x, w13, w2, weights, ids[:2])
    with pytest.raises(InputError, match=r"topk_ids is torch.float32"):
        run(x, w13, w2, weights, ids.float())
    with pytest.raises(InputError, match=r"topk_weights is torch.float64"):
        run(x, w13, w2, weights.double(), ids)
    with pytest.raises(InputError, match=r"topk_ids holds values .* to 6; .*-1\.\.5"):
        run(x, w13, w2, weights, torch.full_like(ids, 6))
    with pytest.raises(InputError, match=r"expert_map holds values .*-1\.\.5"):
        run(x, w13, w2, weights, ids, torch.arange(9))
