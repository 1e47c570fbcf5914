"""The demo's steps on one table: ingest, compact, split, compact again, collect, ask."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dormouse.api.instance import Instance
from dormouse.demo.checks import compare
from dormouse.demo.dataset import Question
from dormouse.demo.flights import Flights
from dormouse.demo.lineitem import Lineitem
from dormouse.demo.report import Answer, Screen, Step
from dormouse.errors import JobFailed

if TYPE_CHECKING:
    import duckdb

ROUNDS_MAX = 64
Dataset = Flights | Lineitem
"""What a demo works on: raw data in DuckDB, tables to fill from it, and questions to ask of both."""


class Pipeline:
    """Runs the steps, and shows each as it ends."""

    def __init__(self, instance: Instance, dataset: Dataset, screen: Screen) -> None:
        self._instance = instance
        self._dataset = dataset
        self._screen = screen
        self.steps: list[Step] = []

    def run(self) -> None:
        """From empty tables to one that is compacted, split and collected."""
        self._screen.steps_begin()
        for made in self._dataset.tables():
            self._instance.create_table(
                made.name, made.schema, split_points=made.split_points, properties=made.properties
            )
        self._table = self._instance.table(self._dataset.main_table)
        self._ingest()
        self._compact("compact")
        self._split()
        self._compact("compact what was pushed down")
        self._split()  # counts are exact now, and may tell of another leaf over the threshold
        self._collect()

    def ask(self, db: duckdb.DuckDBPyConnection, questions: Sequence[Question]) -> list[Answer]:
        """Every question, to Dormouse and to DuckDB."""
        return [self._answer(db, question) for question in questions]

    def _ingest(self) -> None:
        for load in self._dataset.loads():
            table = self._instance.table(load.table)
            started = time.monotonic()
            with self._screen.working(load.label):
                table.ingest(load.data, engine=load.engine)  # type: ignore[arg-type]
            if load.shown:
                self._done(load.label, time.monotonic() - started)

    def _compact(self, label: str) -> None:
        with self._screen.working(label) as say:
            report = self._table.compact(
                engine="spark",
                progress=lambda done, jobs, rows: say(f"{label}: {done} of {jobs} Spark tasks"),
            )
        if report.given_up:
            raise JobFailed(f"compaction failed: {report.errors[0]}")
        if report.jobs_run:
            tasks = f"{report.jobs_run} Spark {'task' if report.jobs_run == 1 else 'tasks'}"
            self._done(f"{label}: {tasks}", report.seconds)

    def _split(self) -> None:
        for _ in range(ROUNDS_MAX):
            started = time.monotonic()
            with self._screen.working("split"):
                report = self._table.split()
            divided, pushed = len(report.partitions_split), report.references_pushed
            if not divided and not pushed:
                return
            self._done(f"split {divided}, push down {pushed}", time.monotonic() - started)

    def _collect(self) -> None:
        started = time.monotonic()
        deleted = self._table.collect_garbage().deleted
        deleted += self._table.collect_garbage().deleted
        self._done(f"collect: {deleted} files deleted", time.monotonic() - started)

    def _done(self, label: str, seconds: float) -> None:
        now = self._table.status()
        step = Step(
            label, now.row_count, now.rows_exact, now.partitions, now.leaves, now.files, now.references,
            now.unreferenced_files, seconds,
        )  # fmt: skip
        self.steps.append(step)
        self._screen.step(step)

    def _answer(self, db: duckdb.DuckDBPyConnection, question: Question) -> Answer:
        statement, where = question.sql, question.where
        with self._screen.working(f"{question.title}: {question.text}"):
            if statement is not None:
                plan = self._instance.explain_sql(statement)[self._dataset.main_table]
                found = compare(lambda: self._instance.sql(statement), db, question.duckdb_sql)
            else:
                plan = self._table.explain(where)
                found = compare(lambda: self._table.query(where, question.columns), db, question.duckdb_sql)
        return Answer(
            question=question.title,
            text=question.text,
            rows=found.rows,
            seconds=found.seconds,
            files_read=plan.files,
            files_total=self._table.status().files,
            matches_duckdb=found.matches,
            difference=found.difference,
        )
