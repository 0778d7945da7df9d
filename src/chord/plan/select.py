"""Choosing a configuration: a measured profile row if one covers the problem, else the model.

Candidates are the shipped configurations of the card's architecture and those of its profile rows;
`legality.reject` removes what cannot run, `cost.predict_us` orders the rest.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chord.device import DeviceFacts
from chord.errors import InputError, UnsupportedError
from chord.plan import cost
from chord.plan.config import Config, config_from_fields, shipped_configs
from chord.plan.legality import reject, reject_problem
from chord.plan.problem import GemmProblem

PROFILES = Path(__file__).resolve().parent.parent / "profiles"


@dataclass(frozen=True)
class ProfileRow:
    """One measured choice; profiles/README.md describes the file it comes from.

    Attributes:
        source: File and number of the row, for messages.
        rows_from: Fewest routed rows that it was measured to be best for.
        rows_to: Most routed rows, included.
        us: Measured microseconds.
        date: Day of the measurement.
    """

    source: str
    num_experts: int
    n: int
    k: int
    addressing: str
    rows_from: int
    rows_to: int
    config: Config
    us: float
    date: str

    def covers(self, problem: GemmProblem) -> bool:
        """Return whether the row was measured for `problem`."""
        return (
            (self.num_experts, self.n, self.k) == (problem.num_experts, problem.n, problem.k)
            and self.addressing == problem.addressing
            and self.rows_from <= problem.planned_rows <= self.rows_to
        )


@dataclass(frozen=True)
class Decision:
    """The chosen configuration and how it was chosen.

    Attributes:
        config: What will run.
        reason: Why, in one line.
        considered: Legal candidates with predicted microseconds, best first.
        rejected: Candidates that cannot run, each with the reason.
    """

    config: Config
    reason: str
    considered: tuple[tuple[Config, float], ...]
    rejected: tuple[tuple[Config, str], ...]


def decide(problem: GemmProblem, device: DeviceFacts, profiles: Path = PROFILES) -> Decision:
    """Choose the configuration that runs `problem` on `device`.

    Raises:
        UnsupportedError: Nothing can run it; the message says why.
    """
    reason = reject_problem(problem)
    if reason is not None:
        raise UnsupportedError(reason)
    rows = profile_rows(device.card, profiles)
    candidates = dict.fromkeys((*shipped_configs(device.arch), *(row.config for row in rows)))
    if not candidates:
        raise UnsupportedError(
            f"no configuration is shipped for {device.arch} ({device.name}); Chord's kernels are "
            f"built for sm_90a, sm_100a and sm_103a"
        )
    legal: list[tuple[Config, float]] = []
    rejected: list[tuple[Config, str]] = []
    for config in candidates:
        reason = reject(config, problem, device)
        if reason is None:
            legal.append((config, cost.predict_us(config, problem, device)))
        else:
            rejected.append((config, reason))
    if not legal:
        listed = "; ".join(dict.fromkeys(reason for _, reason in rejected))
        raise UnsupportedError(f"no configuration can run {problem} on {device.name}: {listed}")
    legal.sort(key=lambda pair: pair[1])
    considered, refused = tuple(legal), tuple(rejected)
    legal_configs = {config for config, _ in legal}
    for row in rows:
        if row.covers(problem) and row.config in legal_configs:
            reason = f"profile {row.source}, {row.us:.1f} us measured on {row.date}"
            return Decision(row.config, reason, considered, refused)
    config, best_us = legal[0]
    return Decision(config, _model_reason(considered, best_us), considered, refused)


def _model_reason(considered: tuple[tuple[Config, float], ...], best_us: float) -> str:
    if len(considered) == 1:
        return f"cost model: {best_us:.1f} us, the only one that can run"
    behind = 100 * (considered[1][1] / best_us - 1)
    return f"cost model: {best_us:.1f} us, next best +{behind:.0f} %"


@functools.cache
def profile_rows(card: str, profiles: Path = PROFILES) -> tuple[ProfileRow, ...]:
    """Return the measured rows of a card, in the order of its file; () without a file.

    Raises:
        InputError: The file is not a profile.
    """
    path = profiles / f"{card}.json"
    if not path.is_file():
        return ()
    try:
        document = json.loads(path.read_text())
        return tuple(
            _parse_row(f"{path.name} row {number}", row)
            for number, row in enumerate(document["rows"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"profile {path} cannot be read ({type(error).__name__}: {error}); write it again "
            f"with `chord tune` or delete it"
        ) from error


def _parse_row(source: str, row: dict[str, Any]) -> ProfileRow:
    return ProfileRow(
        source=source,
        num_experts=int(row["num_experts"]),
        n=int(row["n"]),
        k=int(row["k"]),
        addressing=str(row["addressing"]),
        rows_from=int(row["rows_from"]),
        rows_to=int(row["rows_to"]),
        config=config_from_fields(row["kernel"], row["config"]),
        us=float(row["us"]),
        date=str(row["date"]),
    )
