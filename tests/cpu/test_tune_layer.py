"""Choosing both GEMMs of a layer by the layer's time: which pairs are measured, what follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from chord.bench import tune, tune_layer
from chord.device import known
from chord.plan import select
from chord.plan.legality import reject
from chord.plan.problem import GemmProblem

H200 = known("h200")

ROUTES = 160
PROBLEMS = (
    GemmProblem(48, 4096, 7168, ROUTES, "RoutedGateUp", expected_rows=ROUTES),
    GemmProblem(48, 7168, 2048, ROUTES, "RoutedDown", expected_rows=ROUTES),
)


def pairs() -> list[tune_layer.Pair]:
    gate_up, down = (next(iter(tune.candidates(problem, H200))) for problem in PROBLEMS)
    return tune_layer.around((gate_up, down), PROBLEMS, H200)


def test_tasks_are_the_layers_of_the_suites() -> None:
    tasks = tune_layer.tasks()
    assert [task.num_experts for task in tasks] == [48, 384]
    for task in tasks:
        even, skewed = task.cases(), task.cases("third")
        assert [case.tokens for case in even] == list(task.series.counts)
        assert [case.num_routes for case in even] == [8 * count for count in task.series.counts]
        assert {case.series.loads for case in even} == {"random"}
        assert {case.series.loads for case in skewed} == {"third"}
        gate_up, down = task.projections
        assert (gate_up.k, gate_up.n) == (down.n, 2 * down.k)


def test_one_gemm_at_a_time_differs_from_what_runs_today() -> None:
    made = pairs()
    today = made[0]
    assert len(made) == len(set(made))
    assert all(today[0] == one or today[1] == other for one, other in made)
    for side, problem in enumerate(PROBLEMS):
        tried = {pair[side] for pair in made}
        assert tried == {today[side], *tune.candidates(problem, H200)}
        assert all(reject(config, problem, H200) is None for config in tried)


def test_the_best_of_each_meet() -> None:
    made = pairs()
    today = made[0]
    times = {pair: 100.0 + i for i, pair in enumerate(made)}
    ones = [pair for pair in made if pair[1] == today[1]][-3:]
    others = [pair for pair in made if pair[0] == today[0]][-3:]
    times |= {pair: 50.0 + i for i, pair in enumerate(ones)}
    times |= {pair: 60.0 + i for i, pair in enumerate(others)}
    met = tune_layer.finalists(times)
    # Today's down stands beside the fastest gate_up, so it is one of the best itself.
    assert {one for one, _ in met} >= {pair[0] for pair in ones[:2]}
    assert today[1] in {other for _, other in met}
    assert {other for _, other in met} >= {pair[1] for pair in others[:2]}
    assert len(met) == 9 == len(set(met))


def test_a_configuration_counts_as_the_best_pair_with_it() -> None:
    made = tune_layer.finalists({pair: float(i) for i, pair in enumerate(pairs())})
    times = [(pair, 10.0 + i) for i, pair in enumerate(made)]
    scores = {made[1]: 5.0, made[0]: 6.0, made[-1]: 7.0}
    gate_up, down = tune_layer.split(PROBLEMS, times, scores)
    assert (gate_up.problem, down.problem) == PROBLEMS
    assert (gate_up.config, down.config) == made[1]
    assert dict(gate_up.all_us)[made[0][0]] == 10.0 and dict(down.all_us)[made[1][1]] == 11.0
    assert gate_up.scores == {made[1][0]: 5.0, made[-1][0]: 7.0}


def test_rows_of_a_layer_go_before_those_of_its_gemms(tmp_path: Path) -> None:
    by_itself, problem = GemmProblem(48, 7168, 2048, ROUTES), PROBLEMS[1]
    alone, inside, *_ = tune.candidates(problem, H200)

    def measured(of: GemmProblem, config: tune.Config) -> tune.Measured:
        return tune.Measured(of, ((config, 90.0),), {config: 90.0})

    for name, row in (("", measured(by_itself, alone)), ("layer", measured(problem, inside))):
        path = tmp_path / tune.file_name("h200", name)
        tune.write_profile(tune.profile_rows([row]), "h200", path)
    select.profile_rows.cache_clear()
    decision = select.decide(problem, H200, tmp_path)
    assert decision.config == inside
    assert decision.reason.startswith("profile h200_layer.json row 0, 90.0 us for the layer ")
    assert select.decide(by_itself, H200, tmp_path).config == alone
    # Beyond what was measured in layers the GEMM's own rows stand in, or the model.
    more = GemmProblem(48, 7168, 2048, 2 * ROUTES, "RoutedDown")
    assert "h200_layer" not in select.decide(more, H200, tmp_path).reason
    assert select.rows_that_count(more) == 2 * ROUTES


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.addressing)
def test_rows_of_a_layer_are_counted_in_routes(problem: GemmProblem) -> None:
    config = next(iter(tune.candidates(problem, H200)))
    rows = tune.profile_rows([tune.Measured(problem, ((config, 90.0),), {config: 90.0})])
    assert (rows[0]["rows_from"], rows[0]["rows_to"]) == (1, 200)
    assert rows[0]["addressing"] == problem.addressing
