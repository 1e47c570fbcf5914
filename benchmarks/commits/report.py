"""The figures as a table, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.commits.bench import BATCHES

_TWO = ("two_threads", "two_processes")


def table(figures: Mapping[str, Any]) -> str:
    """What was measured, in lines; all of it when only parts were."""
    lines = []
    if "replace_commits_per_s" in figures:
        lines += ["Compaction commits a second (11 files by 1), by the size of the batch", _batches(figures)]
    lines += [f"{text:58}{_shown(figures[key]):>14}" for key, text in _LINES.items() if key in figures]
    return "\n".join(lines)


def _batches(figures: Mapping[str, Any]) -> str:
    lines = [f"{'batch':>8}{'one committer':>16}{'two threads':>16}{'two processes':>16}"]
    for batch in BATCHES:
        rates = [
            figures.get(f"replace_commits_per_s_{batch}{end}") for end in ("", *(f"_{two}" for two in _TWO))
        ]
        lines.append(f"{batch:>8,}" + "".join(f"{_shown(rate):>16}" for rate in rates))
    return "\n".join([*lines, ""])


def _shown(figure: Any) -> str:
    if figure is None:
        return ""
    return f"{figure:,.0f}" if figure >= 1_000 else f"{figure:,.3g}"


_LINES = {
    "replace_commits_per_s": "compaction commits/s, at best",
    "replace_single_per_s": "one by one, 1 client: commits/s",
    "pgbench_tps": "  the same SQL by pgbench",
    "replace_single_vs_pgbench": "  ours ÷ pgbench's",
    "replace_single_per_s_8": "one by one, 8 clients: commits/s",
    "pgbench_tps_8": "  the same SQL by pgbench",
    "replace_8_vs_pgbench": "  ours ÷ pgbench's",
    "queue_commits_per_s": "through the queue, end to end: commits/s",
    "idle_latency_ms": "one request on an idle system, median ms",
    "idle_latency_p99_ms": "  p99 ms",
    "files_added_per_s": "files added/s, 10,000 a commit",
    "assign_per_s": "references assigned/s",
    "assign_commits_per_s": "  commits/s, of 11 references each",
    "jobs_created_per_s": "jobs created/s",
    "jobs_65536_seconds": "  seconds for 65,536",
    "commits_per_s_1_tables": "commits/s in batches of 1,000, to 1 table",
    "commits_per_s_10_tables": "  evenly to 10",
    "commits_per_s_1000_tables": "  evenly to 1,000",
    "tables_1000_vs_1": "  1,000 ÷ 1",
}


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Commits a second by the size of the batch; the kind of file is its suffix's."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    drawing, pane = plt.subplots(figsize=(6, 4), layout="constrained")
    for end, label in (
        ("", "one committer"),
        ("_two_threads", "two threads"),
        ("_two_processes", "two processes"),
    ):
        rates = {batch: figures.get(f"replace_commits_per_s_{batch}{end}") for batch in BATCHES}
        known = {batch: rate for batch, rate in rates.items() if rate is not None}
        pane.plot([*known], [*known.values()], marker="o", label=label)
    if "pgbench_tps" in figures:
        pane.axhline(figures["pgbench_tps"], linestyle="--", color="gray", label="pgbench, one by one")
    pane.set(title="Compaction commits", xlabel="commits a batch", ylabel="commits a second", xscale="log")
    pane.set_xticks(BATCHES, labels=[f"{batch:,}" for batch in BATCHES])
    pane.minorticks_off()
    pane.set_ylim(bottom=0)
    pane.grid(visible=True, alpha=0.3)
    pane.legend(fontsize="small")
    drawing.savefig(path)
