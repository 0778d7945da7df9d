"""Tuning without a GPU: candidates are legal, ranges are gapless, the file is what plan reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chord import timing
from chord.bench import tune
from chord.cli import tune as cli
from chord.device import known
from chord.plan import select
from chord.plan.legality import reject
from chord.plan.problem import GemmProblem

H200 = known("h200")


def timing_of(us: float, contestants: int) -> timing.Timing:
    return timing.Timing(*3 * [us], 1, 1, timing.FLUSH_BYTES, contestants)


def measured(rows: int, pick: int = 0, addressing: str = "Indexed") -> tune.Measured:
    problem = GemmProblem(48, 4096, 7168, rows, addressing)
    configs = list(tune.candidates(problem, H200))
    times = tuple((config, 20.0 if i != pick else 10.0) for i, config in enumerate(configs))
    return tune.Measured(problem, times, dict(times))


@pytest.mark.parametrize("rows", [1, 160, 1024, 16384])
def test_candidates_are_legal(rows: int) -> None:
    problem = GemmProblem(48, 4096, 7168, rows)
    configs = list(tune.candidates(problem, H200))
    assert configs
    assert all(reject(config, problem, H200) is None for config in configs)
    assert (rows <= 1024) == any(config.kernel == "decode" for config in configs)


def test_every_task_is_of_its_profile() -> None:
    of_rows = [name for name in tune.PROFILE_NAMES if name != tune.LAYER_PROFILE]
    indexed, prefill, decode = map(tune.tasks, of_rows)
    assert {(t.num_experts, t.projection.n) for t in indexed} >= {
        (48, 4096),
        (384, 512),
        (12, 7168),
    }
    for tasks, addressing in ((indexed, "indexed"), (prefill, "contiguous"), (decode, "masked")):
        assert len(tasks) == len(set(tasks))
        assert {task.series.addressing for task in tasks} == {addressing}
        for task in tasks:
            counts = [*task.few, *task.series.counts]
            for measured_cases in (task.cases(), task.skewed_cases()):
                assert [case.tokens for case in measured_cases] == counts
            rows = [case.num_routes for case in task.cases()]
            assert rows == sorted(set(rows))
            assert rows[: len(task.few)] == list(task.few)
            assert (task.skewed_cases() == task.cases()) == (addressing != "indexed")
            assert bool(task.few) == (addressing == "indexed" and task.num_experts < 384)
    assert tune.file_name("h200", "") == "h200.json"
    assert tune.file_name("h200", "grouped_decode") == "h200_grouped_decode.json"


def test_written_rows_are_chosen_without_gaps(tmp_path: Path) -> None:
    rows = tune.profile_rows([measured(8), measured(160, 1), measured(16384, 2)])
    assert [(row["rows_from"], row["rows_to"]) for row in rows] == [
        (1, 35),
        (36, 1619),
        (1620, 20480),
    ]
    path = tune.write_profile(rows, "h200", tmp_path / "h200.json")
    assert not list(tmp_path.glob("*.tmp"))
    read = select.profile_rows("h200", tmp_path)
    assert len(read) == 3
    for count, row in ((35, 0), (36, 1), (20480, 2)):
        decision = select.decide(GemmProblem(48, 4096, 7168, count), H200, tmp_path)
        assert decision.config == read[row].config
        assert decision.reason.startswith(f"profile {path.name} row {row}, ")
    few = dataclasses.replace(
        measured(8, 1), problem=GemmProblem(48, 4096, 7168, 8, expected_rows=2)
    )
    assert [
        (row["rows_from"], row["rows_to"]) for row in tune.profile_rows([few, measured(8)])
    ] == [(1, 4), (5, 10)]
    beyond = select.decide(GemmProblem(48, 4096, 7168, 20481), H200, tmp_path)
    assert beyond.reason.startswith("cost model")


def test_grouped_rows_go_by_rows_per_expert(tmp_path: Path) -> None:
    for name, addressing in (
        ("grouped_prefill", "ContiguousOffsets"),
        ("grouped_decode", "Masked"),
    ):
        rows = tune.profile_rows([measured(48, 0, addressing), measured(768, 1, addressing)])
        assert [(row["rows_from"], row["rows_to"]) for row in rows] == [(1, 4), (5, 20)]
        tune.write_profile(rows, "h200", tmp_path / tune.file_name("h200", name))
    select.profile_rows.cache_clear()
    first, second = (row.config for row in select.profile_rows("h200", tmp_path)[:2])
    assert first != second

    def reason(problem: GemmProblem, config: object) -> str:
        decision = select.decide(problem, H200, tmp_path)
        assert decision.config == config or decision.reason.startswith("cost model")
        return decision.reason

    ids = GemmProblem(48, 4096, 7168, 48 * 16, "ContiguousIndices")
    assert reason(ids, second).startswith("profile h200_grouped_prefill.json row 1, ")
    hinted = GemmProblem(48, 4096, 7168, 48 * 128, "Masked", expected_rows=48 * 3)
    assert reason(hinted, first).startswith("profile h200_grouped_decode.json row 0, ")
    full = GemmProblem(48, 4096, 7168, 48 * 128, "Masked")
    assert reason(full, None).startswith("cost model")
    shard = GemmProblem(12, 4096, 7168, 12 * 4 + 1, "ContiguousOffsets")
    assert reason(shard, second).endswith(" with 48 experts")
    far = GemmProblem(11, 4096, 7168, 44, "ContiguousOffsets")
    assert reason(far, None).startswith("cost model")
    assert reason(GemmProblem(48, 4096, 7168, 48 * 16), None).startswith("cost model")


def test_the_same_number_of_experts_is_nearer(tmp_path: Path) -> None:
    rows = tune.profile_rows([measured(768, 1, "Masked")])
    other = [{**row, "num_experts": 24, "config": row["config"]} for row in rows]
    tune.write_profile([*other, *rows], "h200", tmp_path / "h200_grouped_decode.json")
    select.profile_rows.cache_clear()
    decision = select.decide(GemmProblem(48, 4096, 7168, 48 * 16, "Masked"), H200, tmp_path)
    assert "row 1, " in decision.reason


def test_a_choice_stays_where_it_is_as_fast() -> None:
    problem = GemmProblem(48, 4096, 7168, 8)
    one, two, *_ = tune.candidates(problem, H200)

    def row(count: int, *times: tuple[tune.Config, float]) -> tune.Measured:
        problem = GemmProblem(48, 4096, 7168, count)
        return tune.Measured(problem, times, dict(times))

    rows = tune.profile_rows(
        [row(8, (one, 10.0)), row(16, (two, 20.0), (one, 20.06)), row(32, (two, 30.0), (one, 30.3))]
    )
    assert [row["config"] for row in rows] == [one.fields(), one.fields(), two.fields()]
    assert [row["us"] for row in rows] == [10.0, 20.06, 30.0]


def test_close_candidates_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lucky first look does not decide; one far behind costs no second."""
    one, two, three, *_ = tune.candidates(GemmProblem(48, 4096, 7168, 160), H200)
    looks: list[list[str]] = []
    # The card is a tenth slower at the second look.
    times = iter(({"one": 99.0, "two": 101.0, "three": 150.0}, {"one": 111.0, "two": 109.0}))

    def measured(
        calls: dict[tune.Config, timing.Call], *, warmup_ms: float, repeat_ms: float
    ) -> dict[tune.Config, timing.Timing]:
        names = {config: str(call()) for config, call in calls.items()}
        looks.append(list(names.values()))
        seen = next(times)
        return {config: timing_of(seen[name], len(names)) for config, name in names.items()}

    monkeypatch.setattr(tune, "measure_in_turns", measured)
    calls = {one: lambda: "one", two: lambda: "two", three: lambda: "three"}
    assert tune.fastest_first(calls) == [(two, 109.0), (one, 111.0), (three, 165.0)]
    assert looks == [["one", "two", "three"], ["one", "two"]]


def test_skew_counts_among_those_about_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = list(tune.candidates(GemmProblem(48, 4096, 7168, 8192), H200))[:2]
    skewed_us = {one: 146.41, two: 100.0}
    monkeypatch.setattr(
        tune,
        "measure_in_turns",
        lambda calls, **_: {config: timing_of(skewed_us[config], len(calls)) for config in calls},
    )
    even = [(one, 100.0), (two, 102.01)]
    scores = tune.score(even, lambda near: dict.fromkeys(near, lambda: None))
    assert scores == pytest.approx({one: 110.0, two: 101.504}, abs=1e-3)
    # One that nothing comes near needs no second time, whatever its skew.
    assert tune.score([(one, 100.0)], lambda near: pytest.fail(f"{near}")) == {one: 100.0}
    # And the choice of the row before is not kept for its even time.
    before = tune.Measured(GemmProblem(48, 4096, 7168, 4096), ((one, 50.0),), {one: 50.0})
    row = tune.Measured(GemmProblem(48, 4096, 7168, 8192), tuple(even), scores)
    rows = tune.profile_rows([before, row])
    assert [(r["config"], r["us"]) for r in rows] == [(one.fields(), 50.0), (two.fields(), 102.01)]
    assert f"*102.0 us (101.5 with skewed loads) {two.label()}" in cli.line(row)
