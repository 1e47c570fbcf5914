"""What is measured: appends by more and more writers, a table that has grown, compactions beside appends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.harness.command import Tell
from benchmarks.harness.report import turns
from benchmarks.peers.peer import Peer
from benchmarks.peers.together import Result, Task, run_together, summary

WRITERS = (1, 8, 32)
COMPACTORS = (1, 2, 8)
AT_WRITERS = 8
"""Where the sides are compared."""


@dataclass(frozen=True)
class Plan:
    """How long everything takes. Workers that are not done some grace after their time are ended."""

    rounds: int = 3
    seconds: float = 4.0
    seconds_elsewhere: float = 4.0
    """With other numbers of writers than those where the sides are compared."""
    seconds_grown: float = 4.0
    grace_seconds: float = 6.0
    grown_commits: int = 2_000
    growth_seconds_max: float = 300.0
    partitions: int = 48
    """That each compactor has: at most so many compactions."""

    def seconds_for(self, workers: int) -> float:
        return self.seconds if workers == AT_WRITERS else self.seconds_elsewhere


QUICK = Plan(
    rounds=1,
    seconds=1.3,
    seconds_elsewhere=0.5,
    seconds_grown=0.6,
    grace_seconds=0.3,
    grown_commits=100,
    growth_seconds_max=0.6,
    partitions=12,
)


@dataclass(frozen=True)
class Grown:
    """The same writers on a new table, and when it has had so many commits."""

    new: Result
    grown: Result
    commits: int


@dataclass(frozen=True)
class Compactions:
    """What the compactors did, and the writer that appended beside them."""

    compactors: Result
    appender: Result


@dataclass
class Measured:
    """Everything of one side: results by round, by the number of workers."""

    appends: dict[int, list[Result]] = field(default_factory=dict)
    grown: Grown | None = None
    compactions: dict[int, list[Compactions]] = field(default_factory=dict)


def measure(peers: Sequence[Peer], compacting: Sequence[Peer], plan: Plan, tell: Tell) -> dict[str, Measured]:
    """All sides, in turns: never two at the same time."""
    sides = {peer.name: Measured() for peer in peers}
    for writers in WRITERS:
        for number, peer in turns(peers, plan.rounds):
            tell(f"{peer.label}: {writers} writers, round {number + 1}")
            result = append(peer, f"appends_{writers}_{number}", writers, plan)
            sides[peer.name].appends.setdefault(writers, []).append(result)
    for peer in peers:
        tell(f"{peer.label}: a table that grows")
        sides[peer.name].grown = grow(peer, plan)
    for workers in COMPACTORS:
        for number, peer in turns(compacting, plan.rounds):
            tell(f"{peer.label}: {workers} compactors, round {number + 1}")
            result_beside = compact(peer, f"compactions_{workers}_{number}", workers, plan)
            sides[peer.name].compactions.setdefault(workers, []).append(result_beside)
    return sides


def append(peer: Peer, table: str, writers: int, plan: Plan) -> Result:
    """So many writers on a new table."""
    peer.create(table)
    return _append(peer, table, writers, plan, plan.seconds_for(writers))


def grow(peer: Peer, plan: Plan) -> Grown:
    """The writers' rate on a new table; then one writer commits until it has grown; then again."""
    peer.create("grown")
    new = _append(peer, "grown", AT_WRITERS, plan, plan.seconds_grown)
    missing = max(plan.grown_commits - new.commits, 0)
    alone = [Task(partial(peer.appender, "grown", AT_WRITERS), steps_max=missing)]
    helpers = [Task(opener, helper=True) for opener in peer.committers("grown")]
    tallies = run_together(alone + helpers, plan.growth_seconds_max, plan.grace_seconds)
    between = summary(tallies[:1], plan.growth_seconds_max).commits
    return Grown(new, _append(peer, "grown", AT_WRITERS, plan, plan.seconds_grown), new.commits + between)


def _append(peer: Peer, table: str, writers: int, plan: Plan, seconds: float) -> Result:
    before = peer.conflicts()
    tasks = [Task(partial(peer.appender, table, number)) for number in range(writers)]
    helpers = [Task(opener, helper=True) for opener in peer.committers(table)]
    tallies = run_together(tasks + helpers, seconds, plan.grace_seconds)
    result = summary(tallies[:writers], seconds)
    if helpers:
        # the time is that until all is applied
        last = max((step.ended for tally in tallies[writers:] for step in tally.done), default=seconds)
        applied = summary(tallies[writers:], max(seconds, last))
        refused = result.refused + applied.refused
        result = replace(result, commits=applied.commits, seconds=applied.seconds, refused=refused)
    after = peer.conflicts()
    return result if before is None or after is None else replace(result, retries=after - before)


def compact(peer: Peer, table: str, workers: int, plan: Plan) -> Compactions:
    """So many compactors with partitions of their own, and one writer that appends meanwhile."""
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
    return Compactions(summary(tallies[:workers], seconds), summary(tallies[workers:], seconds))
