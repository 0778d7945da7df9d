"""Benchmark scenarios, floors and checks, on numbers worked out by hand and small tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from chord.bench import cliffs, floors, operands, records, scenarios
from chord.bench.peers import load_peer
from chord.errors import InputError, UnsupportedError


def case(suite_name: str, projection: str, tokens: int, series: str = "") -> scenarios.Case:
    suite = scenarios.suite_named(suite_name)
    wanted = next(p for p in suite.projections if p.name == projection)
    found = scenarios.cases(suite, wanted)
    return next(c for c in found if (c.tokens, c.series.name) == (tokens, series))


@pytest.mark.parametrize(
    ("suite", "projection", "tokens", "num_rows", "num_routes", "top_k"),
    [
        ("ep8_prefill", "gate_up", 1024, 128, 1024, 8),
        ("ep8_prefill", "down", 1024, 1024, 1024, 1),
        ("ep8_decode", "gate_up", 20, 20, 160, 8),
        ("tp8", "gate_up", 16384, 16384, 131072, 8),
        ("tp8_decode", "down", 128, 1024, 1024, 1),
    ],
)
def test_rows_of_the_table(
    suite: str, projection: str, tokens: int, num_rows: int, num_routes: int, top_k: int
) -> None:
    row = case(suite, projection, tokens)
    assert (row.num_rows, row.num_routes, row.top_k) == (num_rows, num_routes, top_k)


@pytest.mark.parametrize(
    ("suite", "projection", "tokens", "active", "floor_us", "bound"),
    [
        # Worked out from the formula with a dense rate of 690 TFLOP/s.
        ("ep8_prefill", "gate_up", 1024, 48, 183, "memory"),
        ("ep8_prefill", "gate_up", 16384, 48, 1394, "math"),
        ("ep8_decode", "gate_up", 20, 46, 174, "memory"),
        ("ep8_prefill", "down", 4096, 48, 174, "math"),
        ("tp8", "down", 1024, 384, 122, "memory"),
        ("tp8_decode", "gate_up", 8, 63, 40, "memory"),
    ],
)
def test_floor(
    suite: str, projection: str, tokens: int, active: int, floor_us: int, bound: str
) -> None:
    floor = floors.floor_of(case(suite, projection, tokens), active, floors.H200_MEMORY, 690.0)
    assert floor.bound == bound
    assert floor.floor_us == pytest.approx(floor_us, abs=0.6)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="ep8_decode"):
        scenarios.suite_named("ep9")
    checkpoint = operands.random_checkpoint(1, 8, 32, "cpu")
    with pytest.raises(InputError, match="humming"):
        load_peer("nobody", checkpoint, [])


def test_missing_peer_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(UnsupportedError, match="humming-kernels"):
        load_peer("humming", operands.random_checkpoint(1, 8, 32, "cpu"), [])


def test_routing_is_uneven_valid_and_repeatable() -> None:
    ids = scenarios.route(64, 48, "cpu")
    assert ids.shape == (64, 8)
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert torch.equal(ids, scenarios.route(64, 48, "cpu"))
    assert ids.flatten().bincount(minlength=48).unique().numel() > 3


def test_checkpoint_dequantizes_as_the_format_says() -> None:
    checkpoint = operands.random_checkpoint(2, 16, 64, "cpu", seed=3)
    weight = checkpoint.dequantize(1)
    for n, k in [(0, 0), (3, 31), (15, 32), (7, 63)]:
        word = int(checkpoint.weight_packed[1, n, k // 8])
        code = (word >> (4 * (k % 8))) & 15
        scale = float(checkpoint.weight_scale[1, n, k // 32])
        assert float(weight[n, k]) == pytest.approx((code - 8) * scale)
    assert checkpoint.weight_scale.min() >= 0.0019
    assert checkpoint.weight_scale.max() <= 0.0201


@pytest.mark.parametrize(
    ("damage", "low", "high"), [("none", 1e-4, 3e-3), ("unwritten", 10, 1e9), ("nan", 1e9, None)]
)
def test_row_error_sees_one_bad_row(damage: str, low: float, high: float | None) -> None:
    experts, n, k, tokens, top_k = 4, 32, 128, 8, 2
    checkpoint = operands.random_checkpoint(experts, n, k, "cpu")
    x = operands.random_rows(tokens, k, "cpu")
    ids = torch.randn(tokens, experts).topk(top_k).indices.int()
    out = torch.empty(tokens * top_k, n, dtype=torch.bfloat16)
    for route, expert in enumerate(ids.flatten().tolist()):
        out[route] = (x[route // top_k].float() @ checkpoint.dequantize(expert).T).bfloat16()
    if damage == "unwritten":
        out[5] = operands.POISON
    elif damage == "nan":
        out[5, 3] = float("nan")
    error = operands.max_row_error(out, x, ids, top_k, checkpoint)
    assert low < error
    assert high is None or error < high


def test_sizes_are_those_of_the_models() -> None:
    for suite in scenarios.SUITES.values():
        names = [projection.name for projection in suite.projections]
        assert names in (["gate_up", "down"], ["gate_up"])
        for projection in suite.projections:
            assert projection.k % scenarios.GROUP_SIZE == 0
        assert len({series.name for series in suite.series}) == len(suite.series)
        counts = [c for p in suite.projections for c in scenarios.cases(suite, p)]
        assert len(counts) == suite.num_cases
        assert 0 < suite.expected_seconds(2) < 120
    (glm, _) = scenarios.layer(5120, 1536)
    assert (glm.n, glm.k) == (3072, 5120)
    (_, down) = scenarios.layer(7168, 2048, tp=8)
    assert (down.n, down.k) == (7168, 256)


@pytest.mark.parametrize(
    ("loads", "largest"), [("third", 54), ("one", 160), ("random", 7)], ids=lambda v: str(v)
)
def test_skewed_routing(loads: scenarios.Loads, largest: int) -> None:
    series = scenarios.Series((20,), loads=loads)
    suite = scenarios.Suite("t", 48, (scenarios.Projection("gate_up", 64, 64),), (series,))
    (only,) = scenarios.cases(suite, suite.projections[0])
    ids = scenarios.route_case(only, "cpu")
    counts = ids.flatten().bincount(minlength=48)
    assert ids.shape == (20, 8)
    assert int(counts.sum()) == only.num_routes == 160
    assert largest <= int(counts.max()) <= largest + 4


def test_a_sweep_only_ever_adds_rows() -> None:
    counts = scenarios.sweep_counts()
    assert counts[:3] == (1, 2, 3)
    assert counts[-1] == 20_000
    assert all(b == a + 1 or b <= 1.08 * a for a, b in itertools.pairwise(counts))
    series = scenarios.Series((1, 7, 8, 9, 100), loads="nested")
    suite = scenarios.Suite("t", 12, (scenarios.Projection("gate_up", 64, 64),), (series,))
    loads = []
    for one in scenarios.cases(suite, suite.projections[0]):
        ids = scenarios.route_case(one, "cpu")
        assert int((ids >= 0).sum()) == one.num_routes == one.tokens
        assert ids.shape == (one.num_inputs, 8)
        loads.append(ids[ids >= 0].bincount(minlength=12))
    assert all(bool((more >= fewer).all()) for fewer, more in itertools.pairwise(loads))


@pytest.mark.parametrize("mean", [1, 8, 128, 512])
def test_uneven_counts_keep_the_sum(mean: int) -> None:
    counts = scenarios.expert_counts(48, mean, "uneven")
    assert sum(counts) == 48 * mean
    assert scenarios.expert_counts(48, mean, "balanced") == [mean] * 48
    if mean >= 128:
        assert 0.6 * mean < min(counts) < 0.8 * mean
        assert 1.2 * mean < max(counts) < 1.4 * mean


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a suite run on CPU tensors: an H200's facts, and times that need no events."""
    from chord import timing
    from chord.bench import layer, machine, run
    from chord.device import known

    def measured(
        calls: dict[str, timing.Call], *, warmup_ms: float, repeat_ms: float
    ) -> dict[str, timing.Timing]:
        """Return 200 us for Chord, 300 for cuBLAS, 400 for others, and make each call."""
        for call in calls.values():
            call()
        assert "chord" in calls and floors.DENSE in calls, "a row is measured in one go"
        us = {name: {"chord": 200.0, floors.DENSE: 300.0}.get(name, 400.0) for name in calls}
        return {
            name: timing.Timing(us[name], us[name], us[name], 1, 1, timing.FLUSH_BYTES, len(calls))
            for name in calls
        }

    monkeypatch.setattr(machine, "card", lambda: "NVIDIA H200")
    for module in (run, layer):
        monkeypatch.setattr(module, "facts_of", lambda index: known("h200"))
        monkeypatch.setattr(module, "measure_in_turns", measured)
        monkeypatch.setattr(module, "measure_host_us", lambda call, **options: 10.0)
    monkeypatch.setattr(layer, "GraphCall", lambda call: call)


TINY = scenarios.Suite(
    "tiny",
    12,
    (scenarios.Projection("gate_up", 64, 128), scenarios.Projection("down", 128, 32)),
    (
        scenarios.Series((16, 32)),
        scenarios.Series((3, 5), "contiguous", "uneven", "contiguous"),
        scenarios.Series((2, 4), "masked", "balanced", "masked"),
        scenarios.Series((6,), "indices", "balanced", "m_indices"),
    ),
    tokens_per_input=8,
)


@pytest.mark.usefixtures("on_cpu")
def test_a_suite_runs_and_every_row_is_checked() -> None:
    from chord import timing
    from chord.bench.run import run_suite

    seen: list[int] = []
    record = run_suite(
        TINY, device="cpu", peers=["torch"], on_row=lambda row: seen.append(row.tokens)
    )
    assert seen == 2 * [16, 32, 3, 5, 2, 4, 6]
    assert record.file_stem.endswith("-h200-tiny")
    assert timing.IN_TURNS in record.timer
    assert {"driver", "torch", "nvrtc", "chord"} <= set(record.versions)
    for row in record.rows:
        entry = row.entries["chord"]
        assert 1e-4 < entry.row_error < operands.ROW_ERROR_LIMIT
        assert entry.us == 200.0
        assert set(row.entries) <= {"chord", "torch"}, "cuBLAS is the floor's"
        assert row.dense_tflops == round(2 * row.routed * row.n * row.k / 300.0 / 1e6, 1)
        assert ("torch" in row.entries) == (row.series in ("contiguous", "masked"))
        if "torch" in row.entries:
            assert row.entries["torch"].us == 400.0
            assert row.entries["torch"].row_error < 2 * operands.ROW_ERROR_LIMIT
        if row.series:
            assert (row.unit, row.routed) == ("rows per expert", 12 * row.tokens)
        else:
            assert "routing blocks of" in entry.choice
            assert (row.unit, row.routed) == ("tokens", row.tokens)


@pytest.mark.usefixtures("on_cpu")
def test_a_layer_its_baseline_and_its_parts_are_measured_in_one_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import chord
    from chord.bench import layer

    class Baseline:
        choice = "tiles"

        def prepare_call(
            self,
            hidden: torch.Tensor,
            weights: torch.Tensor,
            ids: torch.Tensor,
            out: torch.Tensor,
        ) -> Callable[[], object]:
            packed = bench._w13, bench._w2
            return lambda: chord.fused_moe(hidden, *packed, weights, ids, out=out)

    class Broken:
        choice = ""

        def prepare_call(self, *operands: torch.Tensor) -> Callable[[], object]:
            raise RuntimeError("no kernel for this")

    monkeypatch.setattr(layer._Bench, "_choice", lambda self, ids: "configs")
    suite = scenarios.Suite("t", 12, scenarios.layer(128, 64), (scenarios.Series((4,)),))
    (only,) = scenarios.cases(suite, suite.projections[0])
    bench = layer._Bench(suite, "cpu")
    faults: list[str] = []
    names = ["chord", "humming", "chord gate_up alone", "chord down alone"]
    for baseline in (Baseline(), Broken()):
        bench.humming = baseline  # type: ignore[assignment]
        row = bench.run(only, floors.H200_MEMORY, faults.append)
        shown = [name for name in names if name in row.entries]
        assert list(row.entries) == [*shown, "top-k sum at memory speed"]
        assert [row.entries[name].us for name in shown] == [200.0] + [400.0] * (len(shown) - 1)
        assert 1e-4 < row.entries["chord"].row_error < layer.LAYER_ERROR_LIMIT
        assert len(shown) == 4 - len(faults)
    assert faults == ["humming: RuntimeError: no kernel for this"]


@pytest.mark.usefixtures("on_cpu")
def test_a_peer_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from chord.bench import run

    class Broken:
        name, version, choice = "broken", "1.0", ""

        def handles(self, case: scenarios.Case) -> bool:
            return case.tokens != 32

        def prepare_call(self, work: object) -> object:
            raise RuntimeError("no kernel for this")

    monkeypatch.setattr(run, "load_peer", lambda name, checkpoint, todo: Broken())
    faults: list[str] = []
    record = run.run_suite(
        TINY,
        device="cpu",
        peers=["broken"],
        only=lambda one: one.series.name == "" and one.projection.name == "down",
        on_fault=faults.append,
    )
    assert faults == ["broken: RuntimeError: no kernel for this"]
    assert [list(row.entries) for row in record.rows] == [["chord"], ["chord"]]


@pytest.mark.usefixtures("on_cpu")
def test_some_rows_alone() -> None:
    from chord.bench.run import run_suite

    record = run_suite(TINY, device="cpu", only=lambda one: one.tokens == 4)
    assert [(row.projection, row.tokens) for row in record.rows] == [("gate_up", 4), ("down", 4)]


@pytest.mark.usefixtures("on_cpu")
def test_a_written_row_of_nobody_makes_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    import chord
    from chord.bench.run import run_suite
    from chord.errors import ChordError

    right = chord.masked

    def wrong(
        x: torch.Tensor,
        experts: chord.PackedExperts,
        counts: torch.Tensor,
        out: torch.Tensor,
        **options: bool,
    ) -> torch.Tensor:
        right(x, experts, counts, out, **options)
        out[2, 100] = 0
        return out

    monkeypatch.setattr(chord, "masked", wrong)
    with pytest.raises(ChordError, match="tiny gate_up masked with 2 rows per expert: 1 rows"):
        run_suite(TINY, device="cpu")


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_result_makes_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    import chord
    from chord.bench.run import run_suite
    from chord.errors import ChordError

    right = chord.indexed

    def wrong(*arguments: torch.Tensor, out: torch.Tensor, **options: int) -> torch.Tensor:
        right(*arguments, out=out, **options)
        out[3] *= 1.01
        return out

    monkeypatch.setattr(chord, "indexed", wrong)
    with pytest.raises(ChordError, match="tiny gate_up with 16 tokens"):
        run_suite(TINY, device="cpu")


# --- cliffs -----------------------------------------------------------------------------------


def sweep(*times: tuple[int, float, float], expert_bytes: int = 0) -> records.Record:
    rows = [
        records.Row(
            *(
                "gate_up",
                count,
                count,
                48,
                64,
                64,
                48,
                count * expert_bytes,
                floor,
                "memory",
                690.0,
            ),
            {"chord": records.Entry(us, us, us, 1e-3, "decode")},
            unit="rows",
        )
        for count, us, floor in times
    ]
    return records.Record("sweep", "2026-01-31", "NVIDIA H200", {}, "a" * 64, "", "", rows)


def test_falls_and_leaps_are_found() -> None:
    smooth = sweep((1, 20, 15), (2, 24.9, 18), (20, 60, 50), (22, 68, 54), (24, 66.5, 55))
    assert cliffs.is_sweep(smooth)
    assert not cliffs.find_cliffs(smooth)
    (fall,) = cliffs.find_cliffs(sweep((20, 60, 50), (21, 59, 51), (22, 58, 51)))
    assert (fall.kind, fall.before.tokens, fall.after.tokens) == ("falls", 20, 22)
    (leap,) = cliffs.find_cliffs(sweep((20, 60, 50), (21, 70, 51)))
    assert "leaps from 60.0 us at 20 to 70.0 us at 21 rows (+17 %; decode" in leap.describe()
    assert not cliffs.find_cliffs(sweep((1, 20, 15), (2, 25, 18)))  # the floor grew by 20 %
    # A dense matmul of one row reads more than the kernel: its time says nothing of the second.
    few = (1, 16, 27), (2, 19.5, 27)
    assert [leap.after.tokens for leap in cliffs.find_cliffs(sweep(*few))] == [2]
    assert not cliffs.find_cliffs(sweep(*few, expert_bytes=16_500_000))
    assert cliffs.find_cliffs(sweep((1, 16, 27), (2, 21, 27), expert_bytes=16_500_000))
    assert not cliffs.is_sweep(records.Record("x", "", "", {}, "", "", "", []))
