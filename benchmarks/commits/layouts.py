"""A comparison of the layouts: compaction commits in batches, files added and jobs created per second."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from benchmarks.commits.bench import Bench
from benchmarks.commits.kinds import adding, creating_jobs
from benchmarks.committers import rate
from dormouse.state.files.layout import LAYOUTS

_BATCH = 500
NAMES = ("replace_commits_per_s", "files_added_per_s", "jobs_created_per_s", "jobs_65536_seconds")


def by_layout(bench: Bench) -> dict[str, Any]:
    """Measures every figure for one layout after another."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        plan = replace(bench.plan, layout=layout, leaves=bench.plan.leaves_of_layouts)
        of_layout = replace(bench, plan=plan)
        count = plan.jobs_of_two
        table, jobs = of_layout.claimed(f"of_{layout}", count)
        commits = rate(bench.dsn, table, list(islice(jobs, count)), _BATCH)
        figures = {
            "replace_commits_per_s": round(commits, 1),
            **adding(of_layout, f"adding_{layout}"),
            **creating_jobs(of_layout, f"creating_{layout}"),
        }
        found |= {f"{name}_{layout}": figures[name] for name in NAMES}
    return found
