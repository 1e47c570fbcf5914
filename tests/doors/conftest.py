"""Fixtures for tests of the doors: one instance with standard tables, and the doors to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.client import connect
from dormouse.settings.lambdas import DatabaseEnvironment
from tests.every_door import CommandLine, Door, House, Http, Job, Python, Remote
from tests.serving import serving
from tests.support.reading import arrow_schema
from tests.table_doors import Lambdas, TablesByCommand, TablesInPython

FLIGHTS = dm.Schema(
    row_keys=[dm.Field("carrier", dm.STRING), dm.Field("flight", dm.LONG)],
    sort_keys=[dm.Field("time", dm.INT)],
    values=[
        dm.Field("delay", dm.DOUBLE, nullable=True),
        dm.Field("late", dm.BOOLEAN),
        dm.Field("code", dm.BYTES),
        dm.Field("at", dm.TIMESTAMP, nullable=True),
        dm.Field("day", dm.DATE, nullable=True),
        dm.Field("price", dm.DECIMAL(9, 2), nullable=True),
        dm.Field("tags", dm.LIST(dm.STRING), nullable=True),
        dm.Field("counts", dm.MAP(dm.STRING, dm.LONG), nullable=True),
    ],
)
DELAYS = [None, 0.0, -0.0, 1.5, float("nan"), float("inf"), -float("inf"), -3.25]


def rows_of(first: int, count: int) -> pa.Table:
    """Returns rows with all unusual values that the columns can have."""
    rows = [
        {
            "carrier": ("AA", "DL", "UA", 'Ü"x')[n % 4],
            "flight": n // 2,
            "time": n % 3,
            "delay": DELAYS[n % len(DELAYS)],
            "late": n % 2 == 0,
            "code": bytes([n % 256, 0, 255]),
            "at": None if n % 5 == 0 else datetime(2026, 1, 1 + n % 28, 12, n % 60, 1, n, tzinfo=UTC),
            "day": None if n % 7 == 0 else date(1 + n * 37 % 9998, 1 + n % 12, 1),
            "price": None if n % 6 == 0 else Decimal(n * 7 - 100) / 4,
            "tags": None if n % 4 == 0 else [f"t{n}", "ü"][: n % 3],
            "counts": None if n % 3 == 0 else [("a", n), ("b", -n)],
        }
        for n in range(first, first + count)
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(FLIGHTS))


@pytest.fixture(scope="session")
def house(
    new_database: Callable[[str], str], template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    """Yields the shared instance, with the table `flights`, the keyed table `prices` and the row table
    `staff`.
    """
    folder = tmp_path_factory.mktemp("doors")
    dsn, objects = new_database(template_database), (folder / "objects").as_uri()
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("flights", FLIGHTS, split_points=["DL"])
        table.ingest(rows_of(0, 60))
        table.history.record_cut("first")
        table.ingest(rows_of(60, 40))
        table.delete({"carrier": "UA", "flight": dm.Range(3, 9)})
        prices = instance.create_table(
            "prices",
            dm.Schema([dm.Field("id", dm.LONG)], values=[dm.Field("price", dm.DOUBLE, nullable=True)]),
            properties=dm.TableProperties(keep="newest_row"),
        )
        prices.upsert([{"id": n, "price": n / 4} for n in range(20)])
        prices.upsert([{"id": n, "price": None} for n in range(0, 20, 5)])
        staff = instance.create_row_table(
            "staff",
            [dm.Column("name", "STRING"), dm.Column("age", "INTEGER"), dm.Column("pay", "DOUBLE"),
             dm.Column("since", "DATE"), dm.Column("info", "JSON")],
        )  # fmt: skip
        people = (("Ann", 30, 1.5), ("Bob", 40, float("nan")), ("Cy", None, None))
        staff.change([dm.Insert([dict(zip(("name", "age", "pay"), one, strict=True)) for one in people])])
        staff.change([dm.Patch([{"ROW_ID": 2, "ROW_VERSION": 1, "age": 41, "info": {"a": [1, "x"]}}])])
        staff.change([dm.Remove([(3, 1)])])
        with serving(instance, job_threads=2, shutdown_seconds_max=10) as url, connect(url) as client:
            yield House(instance, client, url, dsn, objects, folder)


@pytest.fixture
def environment(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment variables by which the command line and the lambdas find the instance."""
    for name, value in DatabaseEnvironment.variables(dsn=house.dsn, objects=house.objects).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def doors(house: House, cli: Callable[..., tuple[int, str, str]], environment: None) -> dict[str, Door]:
    """Returns all doors that need no Spark, by name."""
    found: list[Door] = [
        Python(house), Remote(house), Http(house), Job(house), CommandLine(house, cli), Lambdas(house),
    ]  # fmt: skip
    return {type(door).__name__: door for door in found}


@pytest.fixture
def table_doors(
    house: House, cli: Callable[..., tuple[int, str, str]], environment: None
) -> tuple[TablesInPython, TablesByCommand, Lambdas]:
    """Returns the doors that create, change and drop tables."""
    return TablesInPython(house), TablesByCommand(house, cli), Lambdas(house)
