"""The picture on the page of `budget`: time over live bytes, of each model under ever smaller limits and of each peer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks._measure import Row

ALT = "Time of a step over its live bytes, for seven models: gk.budget at ever smaller limits as a line, its peers as points"
COLUMNS = 4
MARKS = "osD^vPX*h<>"
COLOURS = ("#b3541e", "#7a4fa3", "#2c8c5a", "#9b8a1b", "#5c6670", "#c2447e", "#20808d")


def draw(rows: Iterable[Row], path: Path) -> None:
    """Write it as an SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    ours, peers = points(rows, "budget"), points(rows, "budget_peers")
    models = list(ours | peers)
    names = list(dict.fromkeys(name for of in peers.values() for name in of))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "graphkeep", "font.family": "sans-serif", "font.size": 9}):
        high = -(-(len(models) + 1) // COLUMNS)
        figure = Figure((3.0 * COLUMNS, 2.7 * high), layout="constrained", facecolor="white")
        axes = figure.subplots(high, COLUMNS, squeeze=False).flatten()
        for ax, model in zip(axes, models, strict=False):
            ax.plot([1], [1], ls="", marker="o", ms=5, mfc="white", mec="black", label="plain", zorder=3)
            line = list(ours.get(model, {}).values())
            ax.plot(
                [x for x, _ in line],
                [y for _, y in line],
                color="#1f5fbf",
                lw=1.6,
                marker=".",
                ms=6,
                label="gk.budget",
                zorder=2,
            )
            for i, name in enumerate(names):
                if name in peers.get(model, {}):
                    x, y = peers[model][name]
                    ax.plot([x], [y], ls="", marker=MARKS[i % len(MARKS)], ms=5, color=COLOURS[i % len(COLOURS)], label=name)
            ax.set_title(model, fontsize=10)
            ax.xaxis.set_major_formatter(PercentFormatter(1.0, 0))
            ax.yaxis.set_major_formatter("{x:.1f}x")
            ax.set_xlim(0, max(1.1, ax.get_xlim()[1]))
            ax.set_ylim(min(0.95, ax.get_ylim()[0]), max(1.5, ax.get_ylim()[1]))
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
        labels = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        for ax in axes[len(models) :]:
            ax.axis("off")
        axes[-1].legend(labels.values(), labels.keys(), loc="center", frameon=False)
        figure.supxlabel("live bytes at the peak of a step, of plain torch's", fontsize=9)
        figure.supylabel("time of a step, over plain torch's", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def points(rows: Iterable[Row], benchmark: str) -> dict[str, dict[str, tuple[float, float]]]:
    """For each model, and each limit or peer, live bytes and time over plain torch's."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        name, _, figure = row.figure.rpartition(": ")
        if row.benchmark == benchmark and figure in ("time", "live bytes"):
            found.setdefault((row.model, name), {})[figure] = row.measured
    points: dict[str, dict[str, tuple[float, float]]] = {}
    for (model, name), both in found.items():
        if len(both) == 2:
            points.setdefault(model, {})[name] = both["live bytes"], both["time"]
    return points
