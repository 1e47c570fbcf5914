"""The figures as a table, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.experiments import AT_WRITERS, COMPACTORS, WRITERS


def table(figures: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    return "\n\n".join([_appends(figures, labels), _grown(figures, labels), _compactions(figures, labels)])


def _appends(figures: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    lines = [
        "Appends to one table: medians of the rounds; retries, failures and what never ended are sums",
        "(through the queue, a writer's latency is that of submitting)",
        f"{'':38}{'writers':>8}{'commits/s':>11}{'p50 ms':>9}{'p99 ms':>9}"
        f"{'retries':>9}{'failed':>8}{'unended':>9}{'ours ÷':>9}{'queue ÷':>9}",
    ]
    for name, label in labels.items():
        for writers in WRITERS:
            at = f"{name}_{writers}"
            shown = label if writers == WRITERS[0] else ""
            lines.append(
                f"{shown:38}{writers:>8}{figures[f'commits_per_s_{at}']:>11,.1f}"
                f"{figures[f'p50_ms_{at}']:>9,.1f}{figures[f'p99_ms_{at}']:>9,.1f}"
                f"{_known(figures[f'retries_{at}']):>9}{figures[f'failed_{at}']:>8}"
                f"{figures[f'unfinished_{at}']:>9}"
                f"{_known(figures.get(f'vs_{at}')):>9}{_known(figures.get(f'vs_{at}_committer')):>9}"
            )
    return "\n".join(lines)


def _grown(figures: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    lines = [
        f"The same table later, {AT_WRITERS} writers",
        f"{'':38}{'commits/s when new':>20}{'later':>10}{'after commits':>16}",
    ]
    for name, label in labels.items():
        new, grown = (figures[f"commits_per_s_{name}_{when}"] for when in ("new", "grown"))
        lines.append(f"{label:38}{new:>20,.1f}{grown:>10,.1f}{figures[f'grown_commits_{name}']:>16,}")
    return "\n".join(lines)


def _compactions(figures: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    lines = [
        "Compactions of four small files each, of one table that another writer appends to",
        f"{'':38}{'workers':>8}{'compactions/s':>15}{'failed':>8}{'appends/s':>11}{'failed':>8}{'ours ÷':>9}",
    ]
    for name, label in labels.items():
        for workers in COMPACTORS:
            at = f"{name}_{workers}"
            if f"compactions_per_s_{at}" not in figures:
                continue
            lines.append(
                f"{label if workers == COMPACTORS[0] else '':38}{workers:>8}"
                f"{figures[f'compactions_per_s_{at}']:>15,.1f}{figures[f'compaction_failures_{at}']:>8}"
                f"{figures[f'appends_per_s_beside_{at}']:>11,.1f}{figures[f'failed_appends_beside_{at}']:>8}"
                f"{_known(figures.get(f'compactions_vs_{at}')):>9}"
            )
    return "\n".join(lines)


def _known(figure: float | None) -> str:
    return "" if figure is None else f"{figure:,}"


def plot(figures: Mapping[str, Any], labels: Mapping[str, str], path: Path) -> None:
    """Rates by the number of workers, both axes logarithmic; the kind of file is its suffix's."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    drawing, panes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for pane, what, counts, title in (
        (panes[0], "commits_per_s", WRITERS, "Appends to one table"),
        (panes[1], "compactions_per_s", COMPACTORS, "Compactions of one table, beside appends"),
    ):
        for number, (name, label) in enumerate(labels.items()):
            rates = [figures.get(f"{what}_{name}_{count}") for count in counts]
            if None not in rates:
                pane.plot(counts, rates, marker="o", label=label, color=f"C{number}")
        pane.set(title=title, xlabel="workers", ylabel=f"{what.split('_')[0]} a second", yscale="log")
        pane.set_xscale("log", base=2)
        pane.set_xticks(counts, labels=map(str, counts))
        pane.grid(visible=True, which="both", alpha=0.3)
    drawing.legend(
        *panes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small"
    )
    drawing.savefig(path)
