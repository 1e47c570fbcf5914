"""The figures as a table, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.contention.experiment import CASES, COMMITTERS, ISOLATIONS, VARIANTS, Case

_LABELS = {
    "file_table": "file_table",
    "dummy_reference": "dummy_reference",
    "salted_counts": "salted_counts, 128 salts",
    "salted_counts_16": "salted_counts, 16 salts",
    "salted_counts_1": "salted_counts, 1 salt",
}


def table(figures: Mapping[str, Any]) -> str:
    lines = [
        f"{figures['leaves']:,} jobs (serializable: {figures['leaves_serializable']:,}) of 11 files that all "
        f"leaves share, one by one; medians of {figures['rounds']} rounds, retries and failures: sums",
        f"committers are threads of {figures['processes']} processes with {figures['connections_max']} "
        "connections each",
        f"{'layout':28}{'isolation':18}{'committers':>10}{'commits/s':>12}{'p50 ms':>10}{'p99 ms':>10}"
        f"{'retries':>9}{'failed':>8}",
    ]
    for case in sorted(CASES, key=_order):
        rate, p50, p99, retries, failed = (
            figures[f"{what}_{case.name}"]
            for what in ("commits_per_s", "p50_ms", "p99_ms", "retries", "failed")
        )
        lines.append(
            f"{_LABELS[case.variant]:28}{case.isolation:18}{case.committers:>10}{rate:>12,.0f}{p50:>10,.1f}"
            f"{p99:>10,.1f}{retries:>9,}{failed:>8,}"
        )
    lines += [f"failed: {error}" for error in figures["errors"]]
    return "\n".join(lines)


def _order(case: Case) -> tuple[int, int, int]:
    return list(ISOLATIONS).index(case.isolation), list(VARIANTS).index(case.variant), case.committers


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Commits a second by the number of committers, a line per layout; the kind of file is its suffix's."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    drawing, panes = plt.subplots(1, len(ISOLATIONS), figsize=(10, 4), layout="constrained", sharey=True)
    for pane, isolation in zip(panes, ISOLATIONS, strict=True):
        for variant, label in _LABELS.items():
            names = [Case(variant, isolation, count).name for count in COMMITTERS]
            rates = [figures[f"commits_per_s_{name}"] for name in names]
            pane.plot(COMMITTERS, rates, marker="o", label=label)
        pane.set(title=isolation, xlabel="committers at once", xscale="log")
        pane.set_xticks(COMMITTERS, labels=map(str, COMMITTERS))
        pane.minorticks_off()
        pane.set_ylim(bottom=0)
        pane.grid(visible=True, alpha=0.3)
    panes[0].set_ylabel("commits a second")
    panes[0].legend(fontsize="small")
    drawing.savefig(path)
