"""Choosing a configuration: a measured profile row if one covers the problem, else the model.

Candidates are the shipped configurations of the card's architecture and those of its profile rows;
`legality.reject` removes what cannot run, `cost.predict_us` orders the rest.

Of indexed rows the host knows the number, and a row of the profile is for the same number of
experts. Of grouped rows it knows what an expert has room for or is expected to have; there a row is
for a number of rows per expert, and one measured with another number of experts stands in.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chord.device import DeviceFacts
from chord.errors import InputError, UnsupportedError
from chord.plan import cost
from chord.plan.config import Config, config_from_fields, shipped_configs
from chord.plan.legality import SWIGLU_ADDRESSINGS, reject, reject_problem
from chord.plan.problem import GemmProblem

PROFILES = Path(__file__).resolve().parent.parent / "profiles"

# Both ways to describe sorted rows run the same kernel, but for its beginning; so do the GEMMs of
# the whole layer, whose rows are as uneven as routes are.
_STAGES = (*SWIGLU_ADDRESSINGS, "RoutedDown")
_MEASURED_AS = {"ContiguousIndices": "ContiguousOffsets", **dict.fromkeys(_STAGES, "Indexed")}
_MOST_APART = 4


def _measured_as(problem: GemmProblem) -> str:
    return _MEASURED_AS.get(problem.addressing, problem.addressing)


def rows_that_count(problem: GemmProblem) -> int:
    """Return what `rows_from` and `rows_to` of a profile's rows say of a problem.

    Args:
        problem: Any problem.

    Returns:
        Its rows, or, where they are grouped, an expert's.
    """
    if _measured_as(problem) == "Indexed":
        return problem.planned_rows
    return math.ceil(problem.rows_per_expert)


@dataclass(frozen=True)
class ProfileRow:
    """One measured choice; profiles/README.md describes the file it comes from.

    Attributes:
        source: File and number of the row, for messages.
        rows_from: Fewest rows that it was measured to be best for: routed rows, or rows per expert
            where they are grouped.
        rows_to: Most rows, included.
        us: Measured microseconds; of the whole layer where the row is for one of its GEMMs.
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

    def distance(self, problem: GemmProblem) -> float | None:
        """Return how far the measurement is from `problem`: 0 for the same; None for no relation.

        Grouped rows per expert are alike for other numbers of experts up to a factor of four: the
        distance is the factor by which there are more or fewer, less one.
        """
        if (self.n, self.k) != (problem.n, problem.k):
            return None
        if self.addressing not in (problem.addressing, _measured_as(problem)):
            return None
        if _measured_as(problem) == "Indexed":
            known = self.num_experts == problem.num_experts
        else:
            known = problem.num_experts <= _MOST_APART * self.num_experts
            known = known and self.num_experts <= _MOST_APART * problem.num_experts
        if not known or not self.rows_from <= rows_that_count(problem) <= self.rows_to:
            return None
        low, high = sorted((self.num_experts, problem.num_experts))
        return high / low - 1


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
    known = [(row.distance(problem), row) for row in rows if row.config in legal_configs]
    related = [(distance, row) for distance, row in known if distance is not None]
    if related:
        # A row of the problem's own addressing goes before one that stands in for it.
        distance, row = min(
            related, key=lambda pair: (pair[0], pair[1].addressing != problem.addressing)
        )
        where = f" with {row.num_experts} experts" if distance else ""
        what = " for the layer" if row.addressing in _STAGES else ""
        reason = f"profile {row.source}, {row.us:.1f} us{what} measured on {row.date}{where}"
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
    """Return the measured rows of a card: of `<card>.json`, then of each `<card>_<what>.json`.

    Raises:
        InputError: A file is not a profile.
    """
    paths = [profiles / f"{card}.json", *sorted(profiles.glob(f"{card}_*.json"))]
    return tuple(row for path in paths if path.is_file() for row in _rows_of(path))


def _rows_of(path: Path) -> tuple[ProfileRow, ...]:
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
