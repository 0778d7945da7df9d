"""Benchmark scenarios, floors and checks, on numbers worked out by hand and small tensors."""

from __future__ import annotations

import pytest
import torch

from chord.bench import floors, operands, scenarios
from chord.bench.peers import load_peer
from chord.errors import InputError, UnsupportedError


def case(suite_name: str, projection: str, tokens: int) -> scenarios.Case:
    suite = scenarios.suite_named(suite_name)
    wanted = next(p for p in suite.projections if p.name == projection)
    return next(c for c in scenarios.cases(suite, wanted) if c.tokens == tokens)


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
        load_peer("nobody", checkpoint)


def test_missing_peer_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(UnsupportedError, match="humming-kernels"):
        load_peer("humming", operands.random_checkpoint(1, 8, 32, "cpu"))


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


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a suite run on CPU tensors: an H200's facts, and times that need no events."""
    from chord import timing
    from chord.bench import machine, run
    from chord.device import known

    def measured(call: timing.Call) -> timing.Timing:
        call()
        return timing.Timing(200.0, 199.0, 201.0, 1, 1, 1, timing.FLUSH_BYTES, False)

    monkeypatch.setattr(machine, "card", lambda: "NVIDIA H200")
    monkeypatch.setattr(run, "facts_of", lambda index: known("h200"))
    monkeypatch.setattr(run, "measure", measured)
    monkeypatch.setattr(run, "measure_host_us", lambda call: 10.0)
    monkeypatch.setattr(floors, "dense_tflops", lambda num_rows, n, k: 690.0)


TINY = scenarios.Suite(
    "tiny",
    12,
    (scenarios.Projection("gate_up", 64, 128), scenarios.Projection("down", 128, 32)),
    (16, 32),
    tokens_per_input=8,
)


@pytest.mark.usefixtures("on_cpu")
def test_a_suite_runs_and_every_row_is_checked() -> None:
    from chord.bench.run import run_suite

    seen: list[int] = []
    record = run_suite(TINY, device="cpu", on_row=lambda row: seen.append(row.tokens))
    assert seen == [16, 32, 16, 32]
    assert record.file_stem.endswith("-h200-tiny")
    assert {"driver", "torch", "nvrtc", "chord"} <= set(record.versions)
    for row in record.rows:
        entry = row.entries["chord"]
        assert 1e-4 < entry.row_error < operands.ROW_ERROR_LIMIT
        assert entry.us == 200.0
        assert "routing blocks of" in entry.choice
        assert row.routed == row.tokens


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
