"""The figures, by name, from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from benchmarks.harness.report import median_ratio
from benchmarks.peers.experiments import AT_WRITERS, Measured
from benchmarks.peers.together import Result

T = TypeVar("T")

OURS, THROUGH_QUEUE = "dormouse", "committer"
OTHERS = ("ducklake", "delta", "pyiceberg")
OTHERS_COMPACTING = ("ducklake", "delta")


def figures(sides: Mapping[str, Measured]) -> dict[str, Any]:
    """Ratios and failures first, then the absolute figures of each side."""
    found: dict[str, Any] = {}
    for ours, suffix in ((OURS, ""), (THROUGH_QUEUE, "_committer")):
        for other in OTHERS:
            found[f"vs_{other}_{AT_WRITERS}{suffix}"] = _ratio(
                sides[ours].appends[AT_WRITERS], sides[other].appends[AT_WRITERS]
            )
        found[f"failed{suffix}"] = sum(r.refused for rounds in sides[ours].appends.values() for r in rounds)
    for other in OTHERS_COMPACTING:
        ours_now, theirs = (
            [both.compactors for both in sides[name].compactions[AT_WRITERS]] for name in (OURS, other)
        )
        found[f"compactions_vs_{other}_{AT_WRITERS}"] = _ratio(ours_now, theirs)
    found["compaction_failures"] = sum(
        both.compactors.refused for rounds in sides[OURS].compactions.values() for both in rounds
    )
    for name, side in sides.items():
        found |= _absolute(name, side)
    return found


def _ratio(ours: Sequence[Result], theirs: Sequence[Result]) -> float:
    """The median over the rounds; no side counts as slower than one commit in the time."""
    rates = [max(them.per_second, 1 / them.seconds) for them in theirs]
    return round(median_ratio([us.per_second for us in ours], rates), 2)


def _absolute(name: str, side: Measured) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for writers, rounds in side.appends.items():
        at = f"{name}_{writers}"
        found[f"commits_per_s_{at}"] = _median(rounds, lambda r: r.per_second)
        found[f"p50_ms_{at}"] = _median(rounds, lambda r: r.percentile(50) * 1e3)
        found[f"p99_ms_{at}"] = _median(rounds, lambda r: r.percentile(99) * 1e3)
        counted = [r.retries for r in rounds if r.retries is not None]
        found[f"retries_{at}"] = sum(counted) if counted else None
        found[f"failed_{at}"] = sum(r.refused for r in rounds)
        found[f"unfinished_{at}"] = sum(r.unfinished for r in rounds)
    if side.grown is not None:
        found[f"commits_per_s_{name}_new"] = round(side.grown.new.per_second, 1)
        found[f"commits_per_s_{name}_grown"] = round(side.grown.grown.per_second, 1)
        found[f"grown_commits_{name}"] = side.grown.commits
    for workers, compactions in side.compactions.items():
        at = f"{name}_{workers}"
        found[f"compactions_per_s_{at}"] = _median(compactions, lambda c: c.compactors.per_second)
        found[f"compaction_failures_{at}"] = sum(c.compactors.refused for c in compactions)
        found[f"appends_per_s_beside_{at}"] = _median(compactions, lambda c: c.appender.per_second)
        found[f"failed_appends_beside_{at}"] = sum(c.appender.refused for c in compactions)
    return found


def _median(rounds: Sequence[T], figure: Callable[[T], float]) -> float:
    return round(median(map(figure, rounds)), 1)
