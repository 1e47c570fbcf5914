"""Compactions, ingests and splits at a steady rate, which run while queries are planned."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from threading import Event
from typing import Any
from uuid import uuid4

from benchmarks.committers import apply_all
from benchmarks.planner.planning import Probe, keys_of, planned
from benchmarks.state_tables import KEYS_PER_LEAF, StateTable, keys_between, new_file
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    FileWithReferences,
    ReplaceFileReferencesRequest,
)
from dormouse.state.commits.apply import Tables
from dormouse.state.commits.requests import (
    AddFiles,
    AssignJobIds,
    CommitRequest,
    Envelope,
    ReplaceFileReferences,
)
from dormouse.state.context import TableAddress, TableContext

BATCH = 100
_SPLIT_SECONDS = 0.5


class Load:
    """A load on the database: compactions of random leaves, in batches.

    A leaf without a job first gets new files and a job. After each batch, this process checks one plan, and
    the process at the other end of `probes` checks another plan.
    """

    def __init__(self, context: TableContext, table: StateTable, probes: Connection, stop: Event) -> None:
        self._table = table
        self._context = context
        context.partitions.tree()
        self._tables = Tables(context.supplier)
        self._tables.named([(table.record.table_id, "")])
        self._probes = probes
        self._stop = stop
        self._random = random.Random(1)
        numbers = list(range(table.leaves))
        self._random.shuffle(numbers)
        self._waiting = deque(numbers)
        self._now: dict[int, str] = {}
        """The present file of each compacted leaf."""
        self._held: int | None = None
        """The leaf whose plan the other process is checking."""
        self.facts = {"commits": 0, "splits": 0, "probes": 0, "stale": 0}

    @property
    def _name(self) -> str:
        return self._table.record.name

    def run(self, per_second: int) -> dict[str, float]:
        """Works until the event `stop` is set; returns the counts and the seconds."""
        self.facts = dict.fromkeys(self.facts, 0)
        began = split_at = time.monotonic()
        while not self._stop.is_set():
            ahead = self.facts["commits"] / per_second - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(ahead)
            self.batch()
            if time.monotonic() > split_at:
                self.split()
                split_at += _SPLIT_SECONDS
        return {**self.facts, "seconds": time.monotonic() - began}

    def batch(self) -> None:
        """Applies a batch of compactions like a committer, and checks plans."""
        self._probe(self._compact([self._next() for _ in range(min(BATCH, self._table.leaves // 4))]))

    def _next(self) -> int:
        """Returns the next leaf to compact, which is not the one that the other process is checking."""
        leaf = self._waiting.popleft()
        if leaf == self._held:
            self._waiting.append(leaf)
            leaf = self._waiting.popleft()
        self._waiting.append(leaf)
        return leaf

    def _compact(self, leaves: Sequence[int]) -> list[Probe]:
        """Applies one batch of compactions, and returns a check for the plans of each leaf.

        Before the batch, it ingests files and makes new jobs for leaves that have no job.
        """
        again = {leaf: self._ingested(leaf) for leaf in leaves if leaf in self._now}
        requests = {leaf: self._job(leaf, again.get(leaf)) for leaf in leaves}
        if again:
            added = tuple(file for files in again.values() for file in files)
            claimed = [requests[leaf] for leaf in again]
            claims = tuple(
                AssignJobIdRequest(
                    job_id=each.job_id, partition_id=each.partition_id, filenames=each.input_filenames
                )
                for each in claimed
            )
            self._apply([AddFiles(commit_id=str(uuid4()), table=self._name, files=added)])
            self._apply([AssignJobIds(commit_id=str(uuid4()), table=self._name, requests=claims)])
        self._apply(
            [
                ReplaceFileReferences(commit_id=str(uuid4()), table=self._name, requests=(request,))
                for request in requests.values()
            ]
        )
        self.facts["commits"] += len(requests)
        self._now |= {leaf: each.new_file.filename for leaf, each in requests.items() if each.new_file}
        return [Probe(leaf, self._now[leaf], each.input_filenames) for leaf, each in requests.items()]

    def _job(self, leaf: int, ingested: Sequence[FileWithReferences] | None) -> ReplaceFileReferencesRequest:
        """Returns the request for the leaf's first job, or for a job of its compacted file and `ingested`."""
        if ingested is None:
            return self._table.request(leaf)
        inputs = (self._now[leaf], *(file.filename for file in ingested))
        return self._table.request(leaf, str(uuid4()), inputs)

    def _ingested(self, leaf: int) -> list[FileWithReferences]:
        """Returns so many new files that a compacted leaf has its first number of files again."""
        partition_id, keys = self._table.partition_id(leaf), keys_between(leaf, leaf + 1)
        prefix = self._table.record.object_prefix
        return [
            new_file(f"{prefix}{uuid4()}/{partition_id}.parquet", partition_id, keys)
            for _ in range(self._table.files_per_leaf - 1)
        ]

    def split(self) -> None:
        """Splits the leaf that was compacted last. Later batches leave it out."""
        leaf = self._waiting.pop()
        if leaf == self._held:
            self._waiting.appendleft(leaf)
            return
        middle = leaf * KEYS_PER_LEAF + KEYS_PER_LEAF // 2
        self._context.partitions.split(self._table.partition_id(leaf), middle)
        self.facts["splits"] += 1
        self._check(Probe(leaf, self._now[leaf], ()))

    def _check(self, probe: Probe) -> None:
        self.facts["probes"] += 1
        plan = planned(self._context, keys_of(probe.leaf, self._random.randrange(KEYS_PER_LEAF)))
        self.facts["stale"] += probe.is_stale(plan.filenames)

    def _probe(self, probes: Sequence[Probe]) -> None:
        """Checks a probe in this process. Sends another to the planner, if that has answered the last one."""
        here, there = self._random.sample(probes, 2)
        self._check(here)
        if self._held is not None and self._probes.poll():
            self._probes.recv()
            self._held = None
        if self._held is None:
            self._held = there.leaf
            self._probes.send(there)

    def _apply(self, requests: Sequence[CommitRequest]) -> None:
        apply_all(self._tables, [Envelope(request, self._table.record.table_id) for request in requests])


@contextmanager
def load(dsn: str, objects: str, table: StateTable, probes: Connection, stop: Any) -> Iterator[Load]:
    with TableAddress(dsn, objects, {}, table.record).open() as context:
        yield Load(context, table, probes, stop)
