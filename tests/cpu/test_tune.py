"""Tuning without a GPU: candidates are legal, ranges are gapless, the file is what plan reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from chord.bench import tune
from chord.device import known
from chord.plan import select
from chord.plan.legality import reject
from chord.plan.problem import GemmProblem

H200 = known("h200")


def measured(rows: int, pick: int = 0) -> tune.Measured:
    problem = GemmProblem(48, 4096, 7168, rows)
    times = tuple((config, 10.0 + i) for i, config in enumerate(tune.candidates(problem, H200)))
    return tune.Measured(problem, *times[pick], times)


@pytest.mark.parametrize("rows", [1, 160, 1024, 16384])
def test_candidates_are_legal(rows: int) -> None:
    problem = GemmProblem(48, 4096, 7168, rows)
    configs = list(tune.candidates(problem, H200))
    assert configs
    assert all(reject(config, problem, H200) is None for config in configs)
    assert (rows <= 1024) == any(config.kernel == "decode" for config in configs)


def test_every_projection_of_the_suites_is_tuned() -> None:
    tasks = tune.tasks()
    assert len(tasks) == len(set(tasks)) == 4
    assert {experts for experts, _ in tasks} == set(tune.TOKENS)


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
    beyond = select.decide(GemmProblem(48, 4096, 7168, 20481), H200, tmp_path)
    assert beyond.reason.startswith("cost model")
