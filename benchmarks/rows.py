"""The cost of row tables: CSV in and out, an index, pages of queries, changes of rows.

The comparison is a plain table on the same PostgreSQL server: COPY of the same file, and the same queries
with the same indexes. The upload runs in a separate process, whose peak memory is reported. All commits are
durable.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

import dormouse as dm
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import Place, own_place
from benchmarks.harness.processes import begin_together, remote, remotes, resident_bytes, wait_until
from benchmarks.harness.report import Grid, percentile, turns, values
from dormouse.api.row_table import RowTable
from dormouse.rows.indexes import SLOW_SECONDS

COLUMNS = (
    dm.Column("name", "STRING"),
    dm.Column("n", "INTEGER"),
    dm.Column("x", "DOUBLE"),
    dm.Column("day", "DATE"),
    dm.Column("ok", "BOOLEAN"),
)
PLAIN = """
create table plain (
    id bigint generated always as identity, name text, n bigint, x float8, day bigint, ok bool
)
"""
PAGE_ROWS = 100
WRITERS = TABLES = 16
GROUPS = 5_000
ROUNDS = 10
_WAIT_SECONDS = 3_600.0
_SQL = {
    "filter": "select {} from {} where n = %s",
    "group": "select name, count(*) as c, sum(x) as s from {} where n between %s and %s "
    "group by name order by name",
    "page": "select {} from {} where n >= %s order by n",
}


@dataclass(frozen=True)
class Plan:
    rows: int = amount(10_000_000, 100_000, help="rows of the table [10,000,000]")
    queries: int = amount(300, 40, help="queries of each kind [300]")
    changes: int = amount(300, 40, help="changes of one row, made one after another [300]")
    seconds: int = amount(10, 2, help="seconds in which 16 writers change rows [10]")


def make_csv(path: Path, rows: int) -> None:
    """Writes a CSV file of rows. Every call writes the same rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    chance, step = np.random.default_rng(1), 500_000
    with path.open("wb") as file:
        for start in range(0, rows, step):
            count = min(step, rows - start)
            table = pa.table(
                {
                    "name": pa.array([f"sample {number % GROUPS}" for number in range(count)]),
                    "n": chance.integers(0, rows, count),
                    "x": chance.random(count).round(6),
                    "day": chance.integers(15_000, 20_000, count) * 86_400_000,
                    "ok": chance.random(count) > 0.5,
                }
            )
            pa_csv.write_csv(table, file, pa_csv.WriteOptions(include_header=start == 0))


def measure(plan: Plan, tell: Tell) -> Figures:
    with own_place() as place:
        path = place.folder / "rows.csv"
        tell("making a file")
        make_csv(path, plan.rows)
        tell("uploading")
        found: Figures = {"rows": plan.rows, "csv_bytes": path.stat().st_size}
        with remote(_uploader, place.dsn, place.objects) as uploader:
            seconds, peak = uploader.call("upload", str(path))
        found |= {"upload_rows_per_s": plan.rows / seconds, "upload_peak_mb": peak / 1e6}
        tell("copying")
        found["copy_rows_per_s"] = plan.rows / _copy(place, path)
        found["vs_copy"] = round(found["upload_rows_per_s"] / found["copy_rows_per_s"], 3)
        with dm.connect(place.dsn, place.objects) as instance:
            table = Table(instance.row_table("samples"), plan)
            for name, step in (
                ("indexing", table.index),
                ("querying", partial(table.queries, place)),
                ("fetching", table.fetch),
                ("changing a row", table.change),
                ("downloading", partial(table.download, place.folder)),
            ):
                tell(name)
                found |= step()
            for name in _names():
                instance.create_row_table(name, COLUMNS).change([_row_for_each_writer()])
        for tables in (1, TABLES):
            tell(f"{WRITERS} writers in {tables} tables")
            found[_key(tables)] = _changes_per_s(place, tables, plan.seconds)
    return found


def _names() -> list[str]:
    return [f"written_{number}" for number in range(TABLES)]


def _key(tables: int) -> str:
    return f"changes_per_s_{tables}_{'table' if tables == 1 else 'tables'}"


def _row_for_each_writer() -> dm.Insert:
    return dm.Insert([{"name": f"sample {number}", "n": number} for number in range(WRITERS)])


@contextmanager
def _uploader(dsn: str, objects: str) -> Iterator[Uploader]:
    with dm.connect(dsn, objects) as instance:
        yield Uploader(instance.create_row_table("samples", COLUMNS))


class Uploader:
    """An uploader, which runs in a separate process so that its memory can be measured."""

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def upload(self, path: str) -> tuple[float, int]:
        """Uploads a CSV file; returns the seconds and this process's peak resident memory in bytes."""
        began = time.perf_counter()
        self._table.upload_csv(path)
        return time.perf_counter() - began, resident_bytes()


def _copy(place: Place, path: Path) -> float:
    with (
        psycopg.connect(place.dsn, autocommit=True) as conn,
        conn.cursor() as cursor,
        path.open("rb") as file,
    ):
        conn.execute(PLAIN)
        began = time.perf_counter()
        columns = ", ".join(column.name for column in COLUMNS)
        with cursor.copy(f"copy plain ({columns}) from stdin (format csv, header)") as copy:
            while chunk := file.read(1 << 20):
                copy.write(chunk)
        return time.perf_counter() - began


class Table:
    """The uploaded table and its measured operations."""

    def __init__(self, table: RowTable, plan: Plan) -> None:
        self._table = table
        self._plan = plan
        self._chance = random.Random(7)

    def index(self) -> Figures:
        began = time.perf_counter()
        self._table.query("select n from samples limit 1", wait_seconds=_WAIT_SECONDS)
        return {"index_rows_per_s": self._plan.rows / (time.perf_counter() - began)}

    def queries(self, place: Place) -> Figures:
        found: Figures = {}
        names = ", ".join(column.name for column in COLUMNS)
        with psycopg.connect(place.dsn, autocommit=True) as conn:
            conn.execute("create index on plain (n, id)")
            conn.execute("vacuum analyze plain")
            self._wait_for_index()
            conn.execute("checkpoint")  # so that earlier writes do not slow the queries
            for kind, text in _SQL.items():
                limit = PAGE_ROWS + 1
                plain = text.format(f"id, {names}", "plain") + (
                    f", id limit {limit}" if kind == "page" else ""
                )
                if kind == "group":
                    plain = text.format("plain")
                ours = text.format("*", "samples") if kind != "group" else text.format("samples")
                parameters = [self._values(kind) for _ in range(self._plan.queries)]
                ask = {kind: partial(self._ask, ours), f"plain_{kind}": partial(_fetch, conn, plain)}
                sides: dict[str, list[float]] = {}
                for number, side in turns(list(ask), ROUNDS):
                    of_round = parameters[number::ROUNDS]
                    sides.setdefault(side, []).extend(_seconds(ask[side], given) for given in of_round)
                for side, seconds in sides.items():
                    found |= {f"{side}_ms_p{p}": 1_000 * percentile(seconds, p) for p in (50, 99)}
        found["page_vs_plain"] = round(found["plain_page_ms_p50"] / found["page_ms_p50"], 3)
        return found

    def _wait_for_index(self) -> None:
        """Repeats the filter query until it is fast, for at most an hour.

        Slow queries make Dormouse index the column of their condition, which the plain table has indexed.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        text = _SQL["filter"].format("*", "samples")
        while _seconds(self._ask, text, (1,)) > SLOW_SECONDS and time.monotonic() < deadline:
            time.sleep(0.2)

    def _values(self, kind: str) -> tuple[int, ...]:
        first = self._chance.randrange(self._plan.rows)
        return (first, first + 1_000) if kind == "group" else (first,)

    def _ask(self, sql: str, given: Sequence[int]) -> None:
        numbered = sql.replace("%s", "${}").format(*range(1, len(given) + 1))
        self._table.query(numbered, PAGE_ROWS, parameters=given, wait_seconds=60)

    def fetch(self) -> Figures:
        row_ids = [self._chance.randrange(1, self._plan.rows + 1) for _ in range(self._plan.queries)]
        seconds = [_seconds(self._table.row, row_id, _first_version(row_id)) for row_id in row_ids]
        return {f"fetch_ms_p{p}": 1_000 * percentile(seconds, p) for p in (50, 99)}

    def change(self) -> Figures:
        row_ids = self._chance.sample(range(1, self._plan.rows + 1), self._plan.changes)
        seconds = []
        for number, row_id in enumerate(row_ids):
            cells = {"ROW_ID": row_id, "ROW_VERSION": _first_version(row_id), "n": number}
            seconds.append(_seconds(self._table.change, [dm.Patch([cells])]))
        return {f"one_row_change_ms_p{p}": 1_000 * percentile(seconds, p) for p in (50, 99)}

    def download(self, folder: Path) -> Figures:
        began = time.perf_counter()
        rows = self._table.download_csv(folder / "downloaded.csv")
        return {"download_rows_per_s": rows / (time.perf_counter() - began)}


def _first_version(row_id: int) -> int:
    """Returns the version of an uploaded row. An upload gives one version to each block of 25,000 rows."""
    return 1 + (row_id - 1) // 25_000


def _fetch(conn: psycopg.Connection[Any], sql: str, given: Sequence[int]) -> None:
    conn.execute(sql.encode(), given).fetchall()


def _seconds(call: Callable[..., object], *given: Any) -> float:
    began = time.perf_counter()
    call(*given)
    return time.perf_counter() - began


@contextmanager
def _writer(dsn: str, objects: str, table: str, row_id: int, seconds: int) -> Iterator[Writer]:
    with dm.connect(dsn, objects) as instance:
        yield Writer(instance.row_table(table), row_id, seconds)


class Writer:
    """A writer that changes its own row again and again."""

    def __init__(self, table: RowTable, row_id: int, seconds: int) -> None:
        self._table = table
        self._row_id = row_id
        self._seconds = seconds

    def run(self, start: float) -> int:
        """Changes the row again and again, from `start` on; returns the number of changes."""
        version = self._table.row(self._row_id)["ROW_VERSION"]
        wait_until(start)
        done = 0
        while time.monotonic() < start + self._seconds:
            cells = {"ROW_ID": self._row_id, "ROW_VERSION": version, "n": WRITERS + version}
            version = self._table.change([dm.Patch([cells])]).versions[-1]
            done += 1
        return done


def _changes_per_s(place: Place, tables: int, seconds: int) -> float:
    openers = [
        partial(_writer, place.dsn, place.objects, _names()[number % tables], 1 + number, seconds)
        for number in range(WRITERS)
    ]
    with remotes(openers) as writers:
        begin_together(writers)
        return float(sum(writer.result() for writer in writers) / seconds)


_KINDS = {"filter": "one value", "group": "groups of 1,000 values", "page": "a page of 100 rows"}
BENCHMARK = Benchmark(
    "rows",
    __doc__,
    Plan,
    measure,
    [
        "{rows:,} rows, {csv_bytes:,} bytes of CSV",
        values(
            {
                "upload_rows_per_s": "upload, rows/s",
                "upload_peak_mb": "  peak memory, MB",
                "copy_rows_per_s": "COPY, rows/s",
                "vs_copy": "  upload ÷ COPY",
                "download_rows_per_s": "download, rows/s",
                "index_rows_per_s": "index, rows/s",
                "page_vs_plain": "page, time of the plain table ÷ ours",
            }
        ),
        Grid(
            {
                **{kind: f"Dormouse, {label}" for kind, label in _KINDS.items()},
                **{f"plain_{kind}": f"plain table, {label}" for kind, label in _KINDS.items()},
                "fetch": "a row by id and version",
                "one_row_change": "a change of one row",
            },
            {"{}_ms_p50": "p50, ms", "{}_ms_p99": "p99, ms"},
        ),
        values(
            {
                _key(1): f"{WRITERS} writers, one table, changes/s",
                _key(TABLES): f"{WRITERS} writers, {TABLES} tables, changes/s",
            }
        ),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
