"""Tables, which Python, commands and lambdas create, change and drop with the same results."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import TableNotFound
from tests.every_door import Door, Failed, House
from tests.table_doors import Lambdas, TablesByCommand, TablesInPython

SCHEMA = dm.Schema(
    [dm.Field("carrier", dm.STRING)],
    sort_keys=[dm.Field("time", dm.LONG)],
    values=[dm.Field("delay", dm.INT, nullable=True), dm.Field("late", dm.BOOLEAN)],
)
ROWS = [{"carrier": "AA", "time": n, "delay": n, "late": False} for n in range(3)]
TableDoors = tuple[TablesInPython, TablesByCommand, Lambdas]
_numbers = itertools.count(1)

CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("set", {"properties": {"gc_delay_seconds": 60, "compression": "none"}}),
    ("set", {"properties": {"compression": None}}),
    ("add_column", {"column": dm.Field("gate", dm.STRING, nullable=True)}),
    ("add_column", {"column": dm.Field("gates", dm.LONG), "default": 7}),
    ("rename_column", {"column": "delay", "new_name": "minutes"}),
    ("widen_column", {"column": "delay", "kind": dm.LONG}),
    ("drop_column", {"column": "late"}),
    ("drop_column", {"column": "late", "dry_run": True}),
    ("convert_layout", {"layout": "salted_counts"}),
    ("convert_layout", {"layout": "file_table"}),
    ("drop", {}),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("set", {"properties": {"gc_delay_seconds": -1}}, "InvalidProperties"),
    ("set", {"properties": {"aggregate": "sum(nothing)"}}, "InvalidProperties"),
    ("add_column", {"column": dm.Field("delay", dm.LONG, nullable=True)}, "InvalidSchema"),
    ("rename_column", {"column": "nothing", "new_name": "x"}, "InvalidSchema"),
    ("rename_column", {"column": "delay", "new_name": "late"}, "InvalidSchema"),
    ("widen_column", {"column": "delay", "kind": dm.STRING}, "InvalidSchema"),
    ("drop_column", {"column": "carrier"}, "InvalidSchema"),
    ("drop_column", {"column": "nothing"}, "InvalidSchema"),
    ("rename", {"new_name": "../x"}, "InvalidName"),
    ("rename", {"new_name": "flights"}, "TableAlreadyExists"),
]  # fmt: skip

MADE: list[dict[str, Any]] = [
    {},
    {"split_points": ["DL", "UA"]},
    {"layout": "salted_counts", "properties": {"gc_delay_seconds": 5}},
]


def state(house: House, name: str) -> Any:
    """Returns the columns, properties, layout, leaves and rows of a table, or None if it does not exist."""
    try:
        table = house.instance.table(name)
    except TableNotFound:
        return None
    leaves = len(table.partitions.leaves())
    rows = sorted(table.query().read_all().to_pylist(), key=repr)
    return table.schema.to_json(), table.properties.model_dump(), table.layout, leaves, rows


def done_by(door: Door, verb: str, how: dict[str, Any]) -> tuple[Any, Any]:
    """Runs a verb on a new table; returns the answer and the table's state."""
    name = f"shaped_{next(_numbers)}"
    door.house.instance.create_table(name, SCHEMA).ingest(ROWS)
    answer = plain(door.ask(verb, table=name, **how), name)
    return answer, state(door.house, name)


def plain(answer: Any, name: str) -> Any:
    """Returns an answer without the name of its table."""
    if isinstance(answer, Failed):
        return Failed(answer.text.replace(name, "TABLE"), answer.error)
    return None if answer is None else {key: value for key, value in answer.items() if key != "table"}


@pytest.mark.few(1)
@pytest.mark.parametrize(("verb", "how"), CHANGES)
def test_every_door_changes_a_table_alike(table_doors: TableDoors, verb: str, how: dict[str, Any]) -> None:
    (nothing, expected), (command, second), (answer, third) = (
        done_by(door, verb, how) for door in table_doors
    )
    assert nothing is None
    assert not isinstance(command, Failed), command
    assert (second, third) == (expected, expected)
    assert command == answer


@pytest.mark.parametrize(("verb", "how", "error"), REFUSED)
def test_every_door_refuses_the_same_change_of_a_table(
    table_doors: TableDoors, verb: str, how: dict[str, Any], error: str
) -> None:
    expected, unchanged = done_by(table_doors[0], verb, how)
    assert isinstance(expected, Failed) and expected.error == error, expected
    for door in table_doors[1:]:
        assert done_by(door, verb, how) == (expected, unchanged), type(door).__name__


@pytest.mark.few(1)
@pytest.mark.parametrize("how", MADE)
def test_every_door_makes_the_same_table(table_doors: TableDoors, how: dict[str, Any]) -> None:
    names = [f"made_{next(_numbers)}" for _ in table_doors]
    answers = [
        door.ask("create", table=name, schema=SCHEMA, **how)
        for door, name in zip(table_doors, names, strict=True)
    ]
    assert answers[0] is None
    first, *others = (state(door.house, name) for door, name in zip(table_doors, names, strict=True))
    assert first is not None
    assert others == [first, first]
    for door, name in zip(table_doors, names, strict=True):
        again = plain(door.ask("create", table=name, schema=SCHEMA, **how), name)
        assert isinstance(again, Failed), type(door).__name__
        assert again.error == "TableAlreadyExists"


@pytest.mark.slow
def test_every_door_sees_a_rename(table_doors: TableDoors) -> None:
    for door in table_doors:
        old, new = (f"named_{next(_numbers)}" for _ in range(2))
        door.house.instance.create_table(old, SCHEMA)
        assert not isinstance(door.ask("rename", table=old, new_name=new), Failed)
        for other in table_doors:
            assert new in other.ask("tables") and old not in other.ask("tables")


def test_a_command_and_a_lambda_describe_a_table_alike(table_doors: TableDoors) -> None:
    _, command, lambdas = table_doors
    described = command.ask("describe", table="flights")
    assert not isinstance(described, Failed) and described["row_count"] > 0
    assert described == lambdas.ask("describe", table="flights")
