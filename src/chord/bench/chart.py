"""Charts of a record, one panel a projection and series: bars side by side, or lines of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chord.bench.records import Record, Row

_COLOURS = {"floor": "#bbbbbb", "chord": "#1f6feb", "humming": "#d29922", "torch": "#8b949e"}


def draw(record: Record, path: Path) -> Path:
    """Draw a record's times beside its floors.

    Args:
        record: What to draw.
        path: File to write; its extension chooses the format.

    Returns:
        The same path.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    all_series = list(dict.fromkeys(row.series for row in record.rows))
    projections = list(dict.fromkeys(row.projection for row in record.rows))
    figure, panels = plt.subplots(
        len(all_series),
        len(projections),
        figsize=(6 * len(projections), 4 * len(all_series)),
        squeeze=False,
        layout="constrained",
    )
    labels: dict[str, Any] = {}
    for line, series in zip(panels, all_series, strict=True):
        for panel, projection in zip(line, projections, strict=True):
            rows = [r for r in record.rows if (r.series, r.projection) == (series, projection)]
            if not rows:
                panel.set_visible(False)
                continue
            is_sweep = rows[0].unit == "rows"
            (_draw_lines if is_sweep else _draw_bars)(panel, rows)
            title = f"{projection}  N={rows[0].n} K={rows[0].k} E={rows[0].experts}"
            panel.set_title(f"{title}\n{series}" if series else title)
            panel.set_ylabel("us per call")
            panel.set_xlabel("routed rows" if is_sweep else f"{rows[0].unit} (routed rows)")
            panel.spines[["top", "right"]].set_visible(False)
            handles, names = panel.get_legend_handles_labels()
            labels |= dict(zip(names, handles, strict=True))
    figure.legend(
        labels.values(), labels, loc="outside lower center", ncols=len(labels), frameon=False
    )
    figure.suptitle(f"{record.suite} on {record.card}, {record.date}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _names(rows: Sequence[Row]) -> list[str]:
    return ["floor", *dict.fromkeys(name for row in rows for name in row.entries)]


def _time_us(row: Row, name: str) -> float | None:
    if name == "floor":
        return row.floor_us
    return row.entries[name].us if name in row.entries else None


def _draw_bars(panel: Any, rows: Sequence[Row]) -> None:
    names = _names(rows)
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        offset = (index - (len(names) - 1) / 2) * width
        bars = panel.bar(
            [position + offset for position in range(len(rows))],
            [_time_us(row, name) or 0.0 for row in rows],
            width,
            label=name,
            color=_COLOURS.get(name),
        )
        panel.bar_label(bars, fmt="%.0f", fontsize=7 if len(rows) < 8 else 5)
    panel.set_xticks(range(len(rows)), [f"{row.tokens}\n({row.routed})" for row in rows])
    panel.margins(y=0.1)


def _draw_lines(panel: Any, rows: Sequence[Row]) -> None:
    for name in _names(rows):
        points = [(row.tokens, us) for row in rows if (us := _time_us(row, name)) is not None]
        panel.plot(*zip(*points, strict=True), label=name, color=_COLOURS.get(name), linewidth=1.5)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.grid(which="both", linewidth=0.3)
