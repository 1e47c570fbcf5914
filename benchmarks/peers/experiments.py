"""The experiments: appends by 1 to 32 writers, a table that has grown, compactions during appends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.harness.command import Tell, amount
from benchmarks.harness.report import turns
from benchmarks.peers.peer import Peer
from benchmarks.peers.together import Result, Task, run_together, summary

WRITERS = (1, 8, 32)
COMPACTORS = (1, 2, 8)
AT_WRITERS = 8
"""The number of writers, and of compactors, at which the systems are compared."""


@dataclass(frozen=True)
class Plan:
    """The durations and counts. A worker that exceeds its time by more than `grace_seconds` is killed."""

    rounds: int = amount(3, 1)
    seconds: float = amount(4.0, 1.0)
    seconds_elsewhere: float = amount(4.0, 0.5)
    """The seconds of a run in which the number of workers is not AT_WRITERS."""
    seconds_grown: float = amount(4.0, 0.5)
    grace_seconds: float = amount(6.0, 0.3)
    grown_commits: int = amount(2_000, 100)
    growth_seconds_max: float = amount(300.0, 0.5)
    partitions: int = amount(48, 12)
    """The number of partitions of each compactor, and so the most compactions that it can do."""

    def seconds_for(self, workers: int) -> float:
        return self.seconds if workers == AT_WRITERS else self.seconds_elsewhere


Measured = dict[tuple[str, int], list[Result]]
"""The results of one system for each round, by kind of experiment and number of workers.

The kinds are `appends`; `new`, `history` and `grown`; `compactors`, and `beside` (appends at the same time).
"""


def measure(peers: Sequence[Peer], compacting: Sequence[Peer], plan: Plan, tell: Tell) -> dict[str, Measured]:
    """Measures all systems in alternation, never two at the same time."""
    sides: dict[str, Measured] = {peer.name: defaultdict(list) for peer in peers}
    for writers in WRITERS:
        for number, peer in turns(peers, plan.rounds):
            tell(f"{peer.label}: {writers} writers, round {number + 1}")
            table = f"appends_{writers}_{number}"
            peer.create(table)
            result = append(peer, table, writers, plan, plan.seconds_for(writers))
            sides[peer.name]["appends", writers].append(result)
    for peer in peers:
        tell(f"{peer.label}: a table that grows")
        sides[peer.name] |= grow(peer, plan)
    for workers in COMPACTORS:
        for number, peer in turns(compacting, plan.rounds):
            tell(f"{peer.label}: {workers} compactors, round {number + 1}")
            for kind, result in compact(peer, f"compactions_{workers}_{number}", workers, plan).items():
                sides[peer.name][kind, workers].append(result)
    return sides


def grow(peer: Peer, plan: Plan) -> Measured:
    """Measures the writers' rate on a new table, and again after one writer has made it grow."""
    peer.create("grown")
    new = append(peer, "grown", AT_WRITERS, plan, plan.seconds_grown)
    missing = max(plan.grown_commits - new.commits, 0)
    alone = [Task(partial(peer.appender, "grown", AT_WRITERS), steps_max=missing)]
    helpers = [Task(opener, helper=True) for opener in peer.committers("grown")]
    tallies = run_together(alone + helpers, plan.growth_seconds_max, plan.grace_seconds)
    between = summary(tallies[:1], plan.growth_seconds_max)
    grown = append(peer, "grown", AT_WRITERS, plan, plan.seconds_grown)
    return {
        ("new", AT_WRITERS): [new],
        ("history", AT_WRITERS): [new, between],
        ("grown", AT_WRITERS): [grown],
    }


def append(peer: Peer, table: str, writers: int, plan: Plan, seconds: float) -> Result:
    """Runs `writers` writers on a table."""
    before = peer.conflicts()
    tasks = [Task(partial(peer.appender, table, number)) for number in range(writers)]
    helpers = [Task(opener, helper=True) for opener in peer.committers(table)]
    tallies = run_together(tasks + helpers, seconds, plan.grace_seconds)
    result = summary(tallies[:writers], seconds)
    if helpers:
        # the run ends when the committer has applied all commits
        last = max((step.ended for tally in tallies[writers:] for step in tally.done), default=seconds)
        applied = summary(tallies[writers:], max(seconds, last))
        refused = result.refused + applied.refused
        result = replace(result, commits=applied.commits, seconds=applied.seconds, refused=refused)
    after = peer.conflicts()
    return result if before is None or after is None else replace(result, retries=after - before)


def compact(peer: Peer, table: str, workers: int, plan: Plan) -> dict[str, Result]:
    """Runs compactors, each on its own partitions, and at the same time one writer that appends."""
    owners = {n: n // plan.partitions for n in range(workers * plan.partitions)}
    peer.create(table, len(owners))
    peer.fill(table, owners)
    seconds = plan.seconds_for(workers)
    tasks = []
    for worker in range(workers):
        own = range(worker * plan.partitions, (worker + 1) * plan.partitions)
        tasks.append(Task(partial(peer.compactor, table, worker, own), steps_max=plan.partitions))
    appender = Task(partial(peer.appender, table, workers))
    tallies = run_together([*tasks, appender], seconds, plan.grace_seconds)
    return {"compactors": summary(tallies[:workers], seconds), "beside": summary(tallies[workers:], seconds)}
