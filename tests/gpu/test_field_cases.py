"""Field cases 1, 2, 3 and 6 on the card, through chord.indexed; 3 (c) through all operations.

Case 4 is test_indexed.py, 7 and 8 are test_cold_start.py, 9 is test_graphs.py, 10 test_repack.py.
Case 5 and what cases 2, 3, 4 and 9 ask of the other two operations is in test_masked.py and
test_contiguous.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from indexed import launch

import cases
import chord
import tolerance
from chord.errors import InputError
from chord.plan.config import Config, shipped_configs
from chord.routing import align
from chord.weights import PackedExperts, pack_experts
from chord.weights.checkpoints import slice_features, slice_reduction
from chord.weights.layout import buffer_shape

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CONFIGS = shipped_configs("sm_90a")
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label())
each_choice = pytest.mark.parametrize(
    "config", (None, *CONFIGS), ids=lambda config: config.label() if config else "planned"
)


@functools.cache
def rank_weights(k: int) -> cases.Weights:
    """48 local experts of cases 1 and 2, N=512, K=7168 or what a configuration takes."""
    return cases.random_weights(48, 512, k, device=DEVICE)


@functools.cache
def rank_experts(k: int) -> PackedExperts:
    return rank_weights(k).pack()


# --- case 1: expert-parallel routing with -1 ids and a partial expert_map -------------------------


def without_waiting(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call twice; the second call may not wait for the device."""
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.field_case(1)
@pytest.mark.parametrize("block_m", [16, 64])
@each_choice
def test_remote_and_missing_experts(config: Config | None, block_m: int) -> None:
    case = cases.partial_routing(device=DEVICE)
    k = cases.k_for(config, 7168)
    x = cases.exact_x(33, k, device=DEVICE)
    experts = rank_experts(k)
    expected = cases.expected_rows(x, rank_weights(k), case.local_ids, 8)
    is_local = (case.local_ids >= 0).flatten()
    expected = torch.where(is_local.unsqueeze(1), expected, cases.POISON).bfloat16()

    def through_the_map(out: torch.Tensor | None) -> torch.Tensor:
        where = align(case.topk_ids, num_experts=384, block_m=block_m, expert_map=case.expert_map)
        return launch(x, experts, where, out, config=config)

    def with_local_ids(out: torch.Tensor | None) -> torch.Tensor:
        where = align(case.local_ids, num_experts=48, block_m=block_m)
        return launch(x, experts, where, out, config=config)

    for run in (through_the_map, with_local_ids):
        buffer, out = cases.guarded(33 * 8, 512, device=DEVICE)
        without_waiting(functools.partial(run, out))
        tolerance.assert_exact(out, expected, what=run.__name__)
        assert cases.is_poison(buffer[0]) and cases.is_poison(buffer[-1])
        # Without `out`, routes of nobody are zero, and so is any weighted sum of them.
        rows = without_waiting(functools.partial(run, None))
        tolerance.assert_exact(rows, torch.where(is_local.unsqueeze(1), expected, 0.0))
        router = cases.topk_weights(33, 8, device=DEVICE)
        total = (rows.view(33, 8, 512).float() * router.unsqueeze(2)).sum(1)
        assert not total[list(case.silent_rows)].any()
        assert total[[30, 31]].any(dim=1).all()


# --- case 2: no work at all -----------------------------------------------------------------------


def step(
    x: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None, config: Config | None
) -> torch.Tensor:
    where = align(ids, num_experts=48, block_m=16)
    return launch(x, rank_experts(x.shape[1]), where, out, config=config)


def assert_a_normal_call_is_exact(config: Config | None) -> None:
    k = cases.k_for(config, 7168)
    x = cases.exact_x(16, k, seed=3, device=DEVICE)
    ids = cases.topk_ids(16, 8, 48, seed=3, device=DEVICE)
    out = step(x, ids, cases.poisoned(128, 512, device=DEVICE), config)
    tolerance.assert_exact(out, cases.expected_rows(x, rank_weights(k), ids, 8).bfloat16())


@pytest.mark.field_case(2)
@each_choice
def test_no_rows_and_no_experts(config: Config | None) -> None:
    """Parts (a), (b) and (f)."""
    k = cases.k_for(config, 7168)
    empty = torch.zeros(0, k, dtype=torch.bfloat16, device=DEVICE)
    assert empty.data_ptr() == 0
    for validate in (False, True):
        no_ids = torch.zeros(0, 8, dtype=torch.int32, device=DEVICE)
        where = align(no_ids, num_experts=48, block_m=16)
        if validate:
            where.validate(0, 48)
        y = launch(empty, rank_experts(k), where, config=config)
        assert y.shape == (0, 512) and y.dtype is torch.bfloat16
        assert_a_normal_call_is_exact(config)
    x = cases.exact_x(16, k, device=DEVICE)
    nobody = cases.topk_ids(16, 8, 48, "none", device=DEVICE)
    assert not step(x, nobody, None, config).any()
    assert cases.is_poison(step(x, nobody, cases.poisoned(128, 512, device=DEVICE), config))
    assert_a_normal_call_is_exact(config)


@pytest.mark.field_case(2)
@each_choice
def test_no_work_inside_a_graph(config: Config | None) -> None:
    """Part (e) for every configuration, and (f) after the replay and by a replay."""
    k = cases.k_for(config, 7168)
    assert_a_normal_call_is_exact(config)
    empty = torch.zeros(0, k, dtype=torch.bfloat16, device=DEVICE)
    no_ids = torch.zeros(0, 8, dtype=torch.int32, device=DEVICE)
    x = cases.exact_x(16, k, device=DEVICE)
    ids = cases.topk_ids(16, 8, 48, "none", device=DEVICE)
    out = cases.poisoned(128, 512, device=DEVICE)
    step(x, ids, out, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(empty, no_ids, None, config)
        step(x, ids, out, config)
    graph.replay()
    assert y.shape == (0, 512)
    assert cases.is_poison(out)
    assert_a_normal_call_is_exact(config)
    ids.copy_(cases.topk_ids(16, 8, 48, device=DEVICE))
    graph.replay()
    tolerance.assert_exact(out, cases.expected_rows(x, rank_weights(k), ids, 8).bfloat16())


# --- case 3: offsets past 2^31 --------------------------------------------------------------------

ROWS = 299_600
# Byte 2^31 of rows of 7168 bf16 lies in row 149,796, element 2^31 in row 299,593, column 1,024.
NAMED_ROWS = (0, 149_796, 149_797, 149_798, 299_593, 299_594, ROWS - 1)
ROWS_AT_ONCE = 1 << 14


def formula_expert(expert: int, n: int, k: int) -> torch.Tensor:
    return cases.formula_codes(expert, range(n), range(k), DEVICE)


def pack_formula(experts: PackedExperts, which: range | tuple[int, ...]) -> None:
    """Pack the formula's weights of some experts where they belong, one at a time, scales 1."""
    scales = torch.ones(1, experts.n, experts.k // 32, dtype=torch.bfloat16, device=DEVICE)
    for expert in which:
        codes = formula_expert(expert, experts.n, experts.k).unsqueeze(0)
        pack_experts(codes, scales, out=experts.expert_range(expert, expert + 1))


def allocate(num_experts: int, n: int, k: int) -> PackedExperts:
    """Return weights whose every byte is 0xff: scales that are NaN until an expert is packed."""
    data = torch.full(buffer_shape(num_experts, n, k), 0xFF, dtype=torch.uint8, device=DEVICE)
    return PackedExperts(data, n=n, k=k)


def count_wrong(out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """Return how many values of out, [rows, N], are wrong; the reference is made in pieces."""
    top_k, n = ids.shape[1], out.shape[1]
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for expert in range(8):
        weight = formula_expert(expert, n, k).float().sub_(8).T
        for rows in (ids.flatten() == expert).nonzero().flatten().split(ROWS_AT_ONCE):
            expected = (x[rows // top_k].float() @ weight).bfloat16()
            wrong += (out[rows] != expected).sum()
    return wrong


@pytest.fixture(scope="module", params=["a", "b"])
def long_case(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[PackedExperts, torch.Tensor, torch.Tensor]]:
    """Weights, x and ids of (a), long outputs, or (b), long inputs."""
    n, k, top_k = (7168, 256, 8) if request.param == "a" else (512, 7168, 1)
    experts = allocate(8, n, k)
    pack_formula(experts, range(8))
    tokens = ROWS // top_k
    x = cases.exact_x(tokens, k, device=DEVICE)
    yield experts, x, cases.topk_ids(tokens, top_k, 8, device=DEVICE)
    del experts, x
    torch.cuda.empty_cache()


@pytest.mark.field_case(3)
@each_choice
def test_rows_past_two_to_the_31(
    long_case: tuple[PackedExperts, torch.Tensor, torch.Tensor], config: Config | None
) -> None:
    """Parts (a) and (b): 4.3 GB of outputs, then of inputs; the named rows and then all rows."""
    experts, x, ids = long_case
    top_k = ids.shape[1]
    where = align(ids, num_experts=8, block_m=64)
    if not cases.takes(config, experts.k):
        # x of a K that it takes reaches so far in 4,194,304 rows only.
        with pytest.raises(InputError, match=f"K={experts.k} is more than max_k"):
            launch(x, experts, where, config=config)
        return
    out = launch(x, experts, where, cases.poisoned(ROWS, experts.n, device=DEVICE), config=config)
    for row in NAMED_ROWS:
        weight = formula_expert(int(ids.flatten()[row]), experts.n, experts.k).float().sub_(8)
        expected = (x[row // top_k].float() @ weight.T).bfloat16()
        tolerance.assert_exact(out[row], expected, what=f"row {row}")
    assert not int(count_wrong(out, x, ids, experts.k))


# Elements pass 2^31 in expert 73, packed bytes 2^31 in 130 and 2^32 in 260; bytes of a layout
# without scales in 146 and 292.
FAR_EXPERTS = (73, 74, 129, 130, 131, 146, 147, 259, 260, 261, 292, 293, 382, 383)


@functools.lru_cache(maxsize=1)
def far_weights(k: int) -> PackedExperts:
    """6.3 GB of weights, Kimi K2's gate_up or as many; the experts that are used are real."""
    experts = allocate(384, 4096 * 7168 // k, k)
    pack_formula(experts, FAR_EXPERTS)
    return experts


@pytest.mark.field_case(3)
@pytest.mark.parametrize("copies", [1, 40])
@each_choice
def test_weights_past_two_to_the_32(config: Config | None, copies: int) -> None:
    """Part (c), and once more with 40 tokens an expert; any other expert's scales are NaN."""
    experts = far_weights(cases.k_for(config, 7168))
    n, k = experts.n, experts.k
    ids = torch.tensor(FAR_EXPERTS, dtype=torch.int32, device=DEVICE).repeat(copies).unsqueeze(1)
    x = cases.exact_x(len(ids), k, device=DEVICE)
    where = align(ids, num_experts=384, block_m=16)
    out = cases.poisoned(len(ids), n, device=DEVICE)
    launch(x, experts, where, out, config=config)
    for place, expert in enumerate(FAR_EXPERTS):
        weight = formula_expert(expert, n, k).float().sub_(8)
        expected = (x[place :: len(FAR_EXPERTS)].float() @ weight.T).bfloat16()
        tolerance.assert_exact(out[place :: len(FAR_EXPERTS)], expected, what=f"expert {expert}")


@pytest.mark.field_case(3)
@pytest.mark.parametrize("copies", [1, 40])
@each_choice
def test_weights_past_two_to_the_32_of_grouped_rows(config: Config | None, copies: int) -> None:
    """Part (c) for sorted rows and for slots, of which each expert has one more than it uses."""
    experts = far_weights(cases.k_for(config, 7168))
    n, k = experts.n, experts.k
    counts = torch.zeros(384, dtype=torch.int32, device=DEVICE)
    counts[list(FAR_EXPERTS)] = copies
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    x = cases.exact_x(len(FAR_EXPERTS) * copies, k, device=DEVICE)
    out = cases.poisoned(len(x), n, device=DEVICE)
    chord.contiguous(x, experts, offsets, out, validate=False, config=config)
    slots = torch.full((384, copies + 1, k), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    slots[list(FAR_EXPERTS), :copies] = x.view(-1, copies, k)
    places = cases.poisoned(384, copies + 1, n, device=DEVICE)
    chord.masked(slots, experts, counts, places, validate=False, config=config)
    for place, expert in enumerate(FAR_EXPERTS):
        weight = formula_expert(expert, n, k).float().sub_(8)
        rows = slice(place * copies, (place + 1) * copies)
        expected = (x[rows].float() @ weight.T).bfloat16()
        tolerance.assert_exact(out[rows], expected, what=f"expert {expert}, sorted rows")
        tolerance.assert_exact(places[expert, :copies], expected, what=f"expert {expert}, slots")
        places[expert, :copies] = cases.POISON
    assert cases.is_poison(places)


# --- case 6: tensor-parallel slices against group 32 ----------------------------------------------


def assert_a_slice_is_exact(mine: cases.Weights, words: torch.Tensor, scales: torch.Tensor) -> None:
    """Pack a rank's checkpoint tensors and compare with the reference of its own codes."""
    num_experts, n, k = mine.shape
    experts = pack_experts(words, scales)
    assert (experts.num_experts, experts.n, experts.k) == (num_experts, n, k)
    x = cases.exact_x(40, k, device=DEVICE)
    ids = cases.topk_ids(40, 2, num_experts, device=DEVICE)
    where = align(ids, num_experts=num_experts, block_m=16)
    expected = cases.expected_rows(x, mine, ids, 2).bfloat16()
    for config in (None, *(config for config in CONFIGS if cases.takes(config, k))):
        out = launch(x, experts, where, cases.poisoned(80, n, device=DEVICE), config=config)
        tolerance.assert_exact(out, expected, what=config.label() if config else "planned")


@pytest.mark.field_case(6)
@pytest.mark.parametrize(
    ("intermediate", "tp_size", "ranks"), [(768, 2, (0, 1)), (2048, 64, (0, 1, 37, 63))]
)
def test_down_slices(intermediate: int, tp_size: int, ranks: tuple[int, ...]) -> None:
    """Parts (a), 12 groups a rank, and (d), a single group; (b), (c), (f) need no card."""
    whole = cases.random_weights(4, 2048, intermediate, scale_powers=5, device=DEVICE)
    width = intermediate // tp_size
    for rank in ranks:
        columns = slice(rank * width, (rank + 1) * width)
        groups = slice(rank * width // 32, (rank + 1) * width // 32)
        mine = cases.Weights(whole.codes[..., columns], whole.scales[..., groups])
        words, scales = slice_reduction(whole.words, whole.scales, rank, tp_size)
        assert_a_slice_is_exact(mine, words, scales)


@pytest.mark.field_case(6)
@pytest.mark.parametrize("rank", [0, 15])
def test_gate_up_slices_keep_k(rank: int) -> None:
    """Part (e): 32 rows each of gate and up, hidden 4096, 128 groups."""
    intermediate, tp_size = 512, 16
    halves = [
        cases.random_weights(4, intermediate, 4096, scale_powers=5, seed=seed, device=DEVICE)
        for seed in (1, 2)
    ]
    part = slice(rank * 32, (rank + 1) * 32)
    mine = cases.Weights(
        torch.cat([half.codes[:, part] for half in halves], dim=1),
        torch.cat([half.scales[:, part] for half in halves], dim=1),
    )
    slices = [slice_features(half.words, half.scales, rank, tp_size) for half in halves]
    words = torch.cat([words for words, _ in slices], dim=1)
    scales = torch.cat([scales for _, scales in slices], dim=1)
    assert_a_slice_is_exact(mine, words, scales)
