"""The figures as a table, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.planner.experiment import LEAVES

_WHAT = {
    "plan": "one key",
    "range_plan": "the keys of ten leaves",
    "look_up": "  bare SQL: the files of the key",
    "select_1": "  bare SQL: select 1",
}
_WHEN = {"": "alone", "_under_load": "with commits"}
_SINGLE = {
    "plan_first_ms": "one key, the first plan of a process: ms",
    "plan_cold_ms": "one key, the first plan of an instance: ms",
    "plan_vs_look_up": "one key, bare SQL ÷ ours",
    "scan_first_ms": "the whole table, until the first files: ms",
    "scan_all_ms": "the whole table, until the last: ms",
    "scan_scans": "  scans of files",
    "scan_rss_mb": "  resident at the most: MB",
    "rss_mb_before": "resident before the table is opened: MB",
    "rss_mb": "resident at the most, before whole tables: MB",
    "tree_load_ms": "the partition tree, to be loaded whole: ms",
    "tree_mb": "the partition tree: MB",
    "commits_per_s": "commits/s meanwhile",
    "splits_per_s": "splits/s meanwhile",
}


def table(figures: Mapping[str, Any]) -> str:
    lines = [
        f"Planning tables of {figures['files_per_leaf']} files a leaf: ms, p50 and p99",
        f"{'leaves':46}" + "".join(f"{leaves:>20,}" for leaves in LEAVES.values()),
    ]
    for end, when in _WHEN.items():
        for name, text in _WHAT.items():
            cells = [_pair(figures, name, f"{size}{end}") for size in LEAVES]
            if any(cells):
                lines.append(f"{f'{text}, {when}':46}" + "".join(f"{cell:>20}" for cell in cells))
    for name, text in _SINGLE.items():
        cells = [_shown(figures.get(f"{name}_{size}")) for size in LEAVES]
        if any(cells):
            lines.append(f"{text:46}" + "".join(f"{cell:>20}" for cell in cells))
    lines.append(f"stale plans: {figures['stale_reads']} of {figures['probes']:,}")
    return "\n".join(lines)


def _pair(figures: Mapping[str, Any], name: str, end: str) -> str:
    found = [_shown(figures.get(f"{name}_{percentile}_ms_{end}")) for percentile in ("p50", "p99")]
    return "  ".join(found) if all(found) else ""


def _shown(figure: Any) -> str:
    if figure is None:
        return ""
    return f"{figure:,.0f}" if figure >= 1_000 else f"{figure:,.3g}"


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """The latency of a plan by the leaves of the table; the kind of file is its suffix's."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    drawing, panes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for pane, percentile in zip(panes, ("p50", "p99"), strict=True):
        for name, text in _WHAT.items():
            for end, when in _WHEN.items():
                at = {
                    leaves: figures.get(f"{name}_{percentile}_ms_{size}{end}")
                    for size, leaves in LEAVES.items()
                }
                known = {leaves: figure for leaves, figure in at.items() if figure is not None}
                style = "--" if end else "-"
                pane.plot([*known], [*known.values()], style, marker="o", label=f"{text.strip()}, {when}")
        pane.set(title=percentile, xlabel="leaves", xscale="log", yscale="log")
        pane.set_xticks([*LEAVES.values()], labels=[f"{leaves:,}" for leaves in LEAVES.values()])
        pane.minorticks_off()
        pane.grid(visible=True, alpha=0.3)
    panes[0].set_ylabel("milliseconds")
    panes[1].legend(fontsize="x-small")
    drawing.savefig(path)
