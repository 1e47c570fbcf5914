"""Helpers for tests of commits: they build requests and drain the queue."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

from dormouse.state.commits.outcomes import CommitOutcome
from dormouse.state.commits.requests import AssignJobIds
from tests.stored import assign, file, live, query, ref, replace, wait_until
from tests.support.api import Instance
from tests.support.commits import AddFiles, CommitRequest, ReplaceFileReferences

_ids = itertools.count(1)


def add(table: str, name: str, commit_id: str | None = None, rows: int = 100, **more: Any) -> AddFiles:
    files = (file(name, ref(name, "root", rows)),)
    return AddFiles(commit_id=commit_id or f"add {name}", table=table, files=files, **more)


def assignment(table: str, job: str, *names: str, commit_id: str | None = None) -> AssignJobIds:
    requests = (assign(job, "root", *names),)
    return AssignJobIds(commit_id=commit_id or f"assign {job}", table=table, requests=requests)


def replacement(
    table: str, job: str, names: Iterable[str], output: str | None, commit_id: str | None = None
) -> ReplaceFileReferences:
    requests = (replace(job, names, output),)
    return ReplaceFileReferences(commit_id=commit_id or f"replace {job}", table=table, requests=requests)


def compaction(table: str, number: int) -> list[CommitRequest]:
    """Returns the requests of a compaction of one file of 100 rows.

    The last request comes first, because the queue has no order.
    """
    old, new, job = f"old {number}", f"new {number}", f"job {number}"
    return [replacement(table, job, [old], new), assignment(table, job, old), add(table, old)]


def drained(instance: Instance, *requests: Any, **options: Any) -> dict[str, CommitOutcome]:
    instance.submit(requests)
    return {outcome.commit_id: outcome for outcome in instance.committer(**options).drain()}


def drained_while_one_is_held(instance: Instance, show: str, **options: Any) -> list[CommitOutcome]:
    """Drains the requests of a compaction while another receiver holds the request that adds its file.

    After several tries of the other requests, runs the statement `show`. Returns the outcomes.
    """
    instance.submit([add("t", "old 1")])
    assert len(instance.commits.queues[0].receive(1, 0)) == 1
    instance.submit(compaction("t", 1)[:2])
    committer, outcomes = instance.committer(**options), list[CommitOutcome]()
    thread = threading.Thread(target=lambda: outcomes.extend(committer.drain()))
    thread.start()
    wait_until(lambda: committer.metrics().try_later >= 10)
    query(instance._supplier, show)
    thread.join(60)
    return outcomes


def states(outcomes: dict[str, CommitOutcome]) -> dict[str, str]:
    return {commit_id: outcome.state for commit_id, outcome in outcomes.items()}


def files_of(instance: Instance, table: str = "t") -> list[str]:
    return [name for _, name, _, _ in live(instance.table(table).files)]


def send_raw(instance: Instance, *bodies: str) -> None:
    instance.commits.queues[0].send(bodies)
