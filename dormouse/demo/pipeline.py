"""The steps of the demo: ingest, compact, split, compact again, collect garbage, and query."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dormouse.api.instance import Instance
from dormouse.api.table import Table
from dormouse.demo.datasets import Flights, Lineitem, Question
from dormouse.embedded.local import local, prepare
from dormouse.embedded.running import close_lock, open_lock, try_lock
from dormouse.errors import InstanceError, InstanceLocked, JobFailed, not_installed

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa


# The comparison of an answer with DuckDB's, row by row and in the same order.

HELD_ROWS_MAX = 5_000_000
BATCH_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison: the rows of Dormouse's answer, its seconds, and the first difference."""

    rows: int
    seconds: float
    difference: str | None

    @property
    def matches(self) -> bool:
        return self.difference is None


def compare(
    ask: Callable[[], pa.RecordBatchReader], db: duckdb.DuckDBPyConnection, statement: str
) -> Comparison:
    """Compares an answer with DuckDB's. The measured time is that of the answer alone."""
    started = time.monotonic()
    reader = ask()
    ours = _Timed(reader, time.monotonic() - started)
    held, rows = [], 0
    while rows < HELD_ROWS_MAX and (batch := next(ours, None)) is not None:
        held.append(batch)
        rows += batch.num_rows
    theirs = db.execute(statement).to_arrow_reader(BATCH_ROWS)
    difference = _names_differ(reader.schema, theirs.schema) or _first_difference(
        chain(held, ours), iter(theirs), reader.schema
    )
    return Comparison(ours.rows, ours.seconds, difference)


class _Timed:
    """A stream of batches that counts the rows and measures the time spent waiting for them."""

    def __init__(self, batches: Iterator[pa.RecordBatch], seconds: float) -> None:
        self._batches = iter(batches)
        self.rows = 0
        self.seconds = seconds

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        started = time.monotonic()
        try:
            batch = next(self._batches)
        finally:
            self.seconds += time.monotonic() - started
        self.rows += batch.num_rows
        return batch


def _names_differ(ours: pa.Schema, theirs: pa.Schema) -> str | None:
    return None if ours.names == theirs.names else f"columns {ours.names}, DuckDB has {theirs.names}"


def _first_difference(
    ours: Iterator[pa.RecordBatch], theirs: Iterator[pa.RecordBatch], schema: pa.Schema
) -> str | None:
    position = 0
    left = right = None
    while True:
        left, right = _more(left, ours), _more(right, theirs)
        if left is None or right is None:
            break
        count = min(left.num_rows, right.num_rows)
        if not left.slice(0, count).equals(right.slice(0, count).cast(schema)):
            return _describe(left, right.cast(schema), count, position)
        left, right, position = left.slice(count), right.slice(count), position + count
    if left is None and right is None:
        return None
    return f"{'more' if right is None else 'fewer'} rows than DuckDB, which has {position:,} of ours"


def _more(batch: pa.RecordBatch | None, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    """Returns the batch, or the next one that has rows; None at the end."""
    while batch is None or batch.num_rows == 0:
        batch = next(batches, None)
        if batch is None:
            return None
    return batch


def _describe(left: pa.RecordBatch, right: pa.RecordBatch, count: int, position: int) -> str:
    for row in range(count):
        mine, other = left.slice(row, 1).to_pylist(), right.slice(row, 1).to_pylist()
        if mine != other:
            return f"row {position + row:,} is {mine[0]}, DuckDB has {other[0]}"
    return f"rows {position:,} to {position + count:,} differ"


# The report of the demo, and the screen that shows its progress.


@dataclass(frozen=True, slots=True)
class Step:
    """The table after a step. For a file in several leaves, the rows of a leaf are estimates until
    compaction.
    """

    step: str
    rows: int
    rows_exact: bool
    partitions: int
    leaves: int
    files: int
    references: int
    unreferenced_files: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question, and whether it is the same as DuckDB's."""

    question: str
    text: str
    rows: int
    seconds: float
    files_read: int
    files_total: int
    matches_duckdb: bool
    difference: str | None = None


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The report of a demo: its steps and answers."""

    data: str
    rows: int
    folder: str
    steps: tuple[Step, ...]
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def all_match(self) -> bool:
        return all(answer.matches_duckdb for answer in self.answers)


class Screen(Protocol):
    """The display of a running demo."""

    def say(self, text: str = "") -> None: ...

    def working(self, text: str) -> AbstractContextManager[Callable[[str], None]]: ...

    def steps_begin(self) -> None: ...

    def step(self, step: Step) -> None: ...

    def tree(self, table: Table) -> None: ...

    def answers(self, answers: list[Answer]) -> None: ...


# The folder of a demo: one demo at a time, in an instance of its own.

# names that an instance's folder may contain
LOCK = ".dormouse-demo.lock"


OWN = ".dormouse-demo.own"


WORK = ".dormouse-demo"


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Locks the folder for this demo. Yields a scratch folder in it, which is deleted at the end.

    The kernel releases the lock when the process ends. Raises `InstanceLocked`.
    """
    prepare(folder, read_only=False)
    lock = open_lock(folder / LOCK)
    try:
        if not try_lock(lock):
            raise InstanceLocked(
                f"another demo is running in {folder}: wait for it, or give this one another --folder"
            )
        work = folder / WORK
        shutil.rmtree(work, ignore_errors=True)  # left by a demo that was killed
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        close_lock(lock)


def start_afresh(instance: Instance, folder: Path, names: Sequence[str]) -> None:
    """Drops the tables of an earlier demo. Raises `InstanceError` if the instance is not a demo's own."""
    tables = [table.name for table in instance.tables()]
    if tables and not (folder / OWN).exists():
        raise InstanceError(
            f"the instance in {folder} has tables that are not a demo's ({', '.join(tables[:3])}…): "
            "give the demo a --folder of its own"
        )
    (folder / OWN).touch()
    for name in tables:
        if name in names:
            instance.drop_table(name)


def remove(instance: Instance, folder: Path, names: Sequence[str]) -> bool:
    """Drops the demo's tables. Returns True if no other table is left, so that the folder can be deleted."""
    for table in instance.tables():
        if table.name in names:
            instance.drop_table(table.name)
    return not instance.tables()


ROUNDS_MAX = 64


Dataset = Flights | Lineitem
"""A data set of the demo: raw data in DuckDB, tables to fill from it, and questions for both."""


class Pipeline:
    """The steps of a demo. Each is shown when it ends."""

    def __init__(self, instance: Instance, dataset: Dataset, screen: Screen) -> None:
        self._instance = instance
        self._dataset = dataset
        self._screen = screen
        self.steps: list[Step] = []

    def run(self) -> None:
        """Creates the tables, and runs all steps from ingest to garbage collection."""
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
        self._split()  # row counts are exact now, and may show another leaf over the threshold
        self._collect()

    def ask(self, db: duckdb.DuckDBPyConnection, questions: Sequence[Question]) -> list[Answer]:
        """Returns the answer to each question, compared with DuckDB's."""
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
                engine="spark", progress=lambda done, jobs: say(f"{label}: {done} of {jobs} Spark tasks")
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
                result = compare(lambda: self._instance.sql(statement), db, question.duckdb_sql)
            else:
                plan = self._table.explain(where)
                result = compare(lambda: self._table.query(where, question.columns), db, question.duckdb_sql)
        return Answer(
            question=question.title,
            text=question.text,
            rows=result.rows,
            seconds=result.seconds,
            files_read=plan.files,
            files_total=self._table.status().files,
            matches_duckdb=result.matches,
            difference=result.difference,
        )


def run_demo(folder: Path, *, screen: Screen, rows: int | None = None, keep: bool = True) -> DemoReport:
    """Runs the demo in the instance of `folder`, with the flights or with `rows` rows of lineitem.

    The instance must be the demo's own. Raises `InstanceLocked` if another demo is running there,
    `DependencyMissing`, and the errors of the pipeline.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise not_installed("duckdb", "demo") from None
    given_folder, folder = str(folder), folder.expanduser().absolute()
    dataset: Dataset = Flights() if rows is None else Lineitem(rows)
    started = time.monotonic()
    with claimed(folder) as work:
        screen.say(f"[bold]Dormouse[/bold]: {dataset.title}")
        screen.say()
        with (
            duckdb.connect(config={"autoinstall_known_extensions": "false"}) as db,
            local(folder) as instance,
        ):
            start_afresh(instance, folder, dataset.table_names)
            with screen.working("getting ready") as say:
                count = dataset.prepare(db, work, say)
            pipeline = Pipeline(instance, dataset, screen)
            pipeline.run()
            screen.tree(instance.table(dataset.main_table))
            answers = pipeline.ask(db, dataset.questions())
            screen.answers(answers)
            removable = not keep and remove(instance, folder, dataset.table_names)
        seconds = time.monotonic() - started
        report = DemoReport(
            dataset.title, count, given_folder, tuple(pipeline.steps), tuple(answers), seconds
        )
        if removable:
            shutil.rmtree(folder)
        _close(screen, report, dataset, keep=keep)
    return report


def _close(screen: Screen, report: DemoReport, dataset: Dataset, *, keep: bool) -> None:
    verdict = (
        f"all {len(report.answers)} answers match DuckDB's"
        if report.all_match
        else "[red]NOT all answers match DuckDB's[/red]"
    )
    screen.say()
    screen.say(f"{report.seconds:.0f} seconds in all; {verdict}.")
    if not keep:
        return
    screen.say(f"The data is in {report.folder} (gc_delay_seconds=0: unused files are deleted at once). Try:")
    screen.say(f'  dormouse sql -i {shlex.quote(report.folder)} "{dataset.next_statement()}"')
