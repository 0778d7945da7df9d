"""Bar charts of a record: one panel a projection, one group of bars a token count."""

from __future__ import annotations

from pathlib import Path

from chord.bench.records import Record

_COLOURS = {"floor": "#bbbbbb", "chord": "#1f6feb", "humming": "#d29922"}


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

    projections = list(dict.fromkeys(row.projection for row in record.rows))
    figure, panels = plt.subplots(
        1, len(projections), figsize=(6 * len(projections), 4), squeeze=False, layout="constrained"
    )
    for panel, projection in zip(panels[0], projections, strict=True):
        rows = [row for row in record.rows if row.projection == projection]
        names = ["floor", *dict.fromkeys(name for row in rows for name in row.entries)]
        width = 0.8 / len(names)
        for index, name in enumerate(names):
            heights = [
                row.floor_us
                if name == "floor"
                else (row.entries[name].us if name in row.entries else 0.0)
                for row in rows
            ]
            offset = (index - (len(names) - 1) / 2) * width
            bars = panel.bar(
                [position + offset for position in range(len(rows))],
                heights,
                width,
                label=name,
                color=_COLOURS.get(name),
            )
            panel.bar_label(bars, fmt="%.0f", fontsize=7)
        panel.set_xticks(range(len(rows)), [f"{row.tokens}\n({row.routed} rows)" for row in rows])
        panel.set_title(f"{projection}  N={rows[0].n} K={rows[0].k} E={rows[0].experts}")
        panel.set_ylabel("us per call")
        panel.set_xlabel("tokens")
        panel.margins(y=0.1)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{record.suite} on {record.card}, {record.date}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
