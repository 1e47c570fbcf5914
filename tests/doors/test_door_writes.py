"""Changes, which give the same report and leave the same rows through every door."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

import dormouse as dm
from tests.every_door import Door, Failed, House, of_arrow
from tests.tiers import sampled

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.STRING, nullable=True)])
COLUMNS = [dm.Column("name", "STRING"), dm.Column("n", "INTEGER", default=7)]
CSV, LATE = b"k,v\n5,e\n6,\n", b"k,v,w\n7,g,1\n"
MARKED = b"k,v,gone\n8,,true\n9,i,false\n"
JSON = b'[{"k": 5, "v": "e"}, {"k": 6}]'
Make = Callable[[House, str], None]


def plain_table(house: House, name: str) -> None:
    """Makes a table of four rows in two files."""
    table = house.instance.create_table(name, SCHEMA)
    for rows in ([{"k": 1, "v": "a"}, {"k": 2, "v": None}], [{"k": 3, "v": "c"}, {"k": 4, "v": "d"}]):
        table.ingest(rows)


def keyed_table(house: House, name: str) -> None:
    """Makes a table that keeps the newest row of each key."""
    properties = dm.TableProperties(keep="newest_row")
    table = house.instance.create_table(name, SCHEMA, properties=properties)
    table.upsert([{"k": 5, "v": "old"}, {"k": 8, "v": "h"}])


def row_table(house: House, name: str) -> None:
    """Makes a row table of two rows."""
    table = house.instance.create_row_table(name, COLUMNS)
    table.change([dm.Insert([{"name": "a"}, {"name": "b", "n": 2}])])


CHANGES: list[tuple[Make, str, dict[str, Any]]] = [
    (plain_table, "ingest", {"content": CSV, "name": "new.csv"}),
    (plain_table, "ingest", {"content": JSON, "name": "new.json"}),
    (plain_table, "ingest", {"content": LATE, "name": "late.csv", "evolve": "add"}),
    (plain_table, "ingest", {"content": CSV, "name": "once.csv", "ingest_id": "once"}),
    (plain_table, "delete", {"where": {"k": dm.Range(2, 4)}}),
    (plain_table, "delete", {"where": {"v": None}}),
    (plain_table, "delete", {"where": None}),
    (plain_table, "delete", {"where": {"k": 1}, "dry_run": True}),
    (plain_table, "compact", {"full": True}),
    (plain_table, "compact", {}),
    (plain_table, "compact", {"full": True, "engine": "local"}),
    (plain_table, "ingest", {"content": CSV, "name": "local.csv", "engine": "local"}),
    (plain_table, "split", {}),
    (keyed_table, "upsert", {"content": CSV, "name": "new.csv"}),
    (keyed_table, "upsert", {"content": MARKED, "name": "d.csv", "deletes": "gone"}),
    (keyed_table, "ingest", {"content": CSV, "name": "new.csv"}),
    (plain_table, "execute", {"statement": "insert into TABLE values (7, 'g'), ($1, $2)",
                              "parameters": ["8", "h"]}),
    (plain_table, "execute", {"statement": "delete from TABLE where k = $n", "parameters": {"n": "2"}}),
    (plain_table, "execute", {"statement": "update TABLE set v = v || '!' where k > 1", "edit_id": "once"}),
    (plain_table, "execute", {"statement": "update TABLE set v = 'x'", "dry_run": True}),
    (keyed_table, "execute", {"statement": "insert or replace into TABLE values (5, 'new'), (6, null)"}),
    (keyed_table, "execute", {"statement": "merge into TABLE as t using (values (5, 'n'), (9, 'i')) s(k, v) "
     "using (k) when matched then update set v = t.v || s.v when not matched then insert"}),
    (row_table, "rows_change", {"changes": [{"insert": [{"name": "c"}]}, {"remove": [[1, 1]]}]}),
    (row_table, "rows_change", {"changes": [{"patch": [{"ROW_ID": 2, "ROW_VERSION": 1, "n": 5}]}]}),
    (row_table, "rows_change", {"changes": [{"insert": [{"name": "c"}]}], "dry_run": True}),
    (row_table, "rows_change", {"changes": [{"add_column": {"name": "x", "type": "DOUBLE"}}]}),
    (row_table, "rows_upsert", {"rows": [{"name": "a", "n": 1}, {"name": "z"}], "on": ["name"]}),
    (row_table, "rows_upload", {"content": b"name,n\nq,1\nr,\n"}),
    (row_table, "rows_upload", {"content": b"ROW_ID,ROW_VERSION,name,n\n1,1,A,7\n,,new,3\n"}),
]  # fmt: skip

WAITING: list[tuple[str, dict[str, Any]]] = [
    ("rows_change", {"changes": [{"insert": [{"name": "c"}]}]}),
    ("rows_upsert", {"rows": [{"name": "a", "n": 1}], "on": ["name"]}),
    ("rows_upload", {"content": b"name,n\nq,1\n"}),
]

REFUSED: list[tuple[Make, str, dict[str, Any], str]] = [
    (plain_table, "ingest", {"content": LATE, "name": "late.csv"}, "InvalidData"),
    (plain_table, "ingest", {"content": b"k,v\nx,1\n", "name": "bad.csv"}, "InvalidData"),
    (plain_table, "ingest", {"content": b"v\n1\n", "name": "less.csv"}, "InvalidData"),
    (plain_table, "ingest", {"content": b"k,v", "name": "strange.xyz"}, "InvalidData"),
    (plain_table, "delete", {"where": {"k": dm.Range()}}, "InvalidQuery"),
    (plain_table, "delete", {"where": {"x": 1}}, "InvalidQuery"),
    (plain_table, "upsert", {"content": CSV, "name": "new.csv"}, "InvalidInput"),
    (row_table, "delete", {"where": {"name": "a"}}, "NotARowTable"),
    (row_table, "execute", {"statement": "delete from TABLE"}, "NotARowTable"),
    (plain_table, "execute", {"statement": "update TABLE set w = 1"}, "InvalidQuery"),
    (plain_table, "execute", {"statement": "select * from TABLE"}, "InvalidQuery"),
    (plain_table, "execute", {"statement": "update TABLE set v = 1; drop table TABLE"}, "InvalidQuery"),
    (keyed_table, "execute", {"statement": "insert into TABLE values (5, 'again')"}, "InvalidInput"),
    (row_table, "rows_change", {"changes": [{"remove": [[1, 9]]}]}, "InvalidRow"),
    (row_table, "rows_change", {"changes": [{"patch": [{"ROW_ID": 99, "n": 1}]}]}, "InvalidRow"),
    (row_table, "rows_change", {"changes": [{"insert": [{"x": 1}]}]}, "InvalidRow"),
    (row_table, "rows_change", {"changes": [{"remove": [[1, 1]]}, {"remove": [[1, 1]]}]}, "InvalidRow"),
    (row_table, "rows_upsert", {"rows": [{"name": "a"}], "on": ["x"]}, "InvalidColumn"),
    (row_table, "rows_upload", {"content": b"name,n\nq,abc\n"}, "InvalidRow"),
]  # fmt: skip


def label(case: Any) -> str:
    """Returns the verb, which is the id of a test case. pytest appends numbers to equal ids."""
    return str(case) if isinstance(case, str) else ""


def done_by(door: Door, make: Make, verb: str, how: dict[str, Any]) -> tuple[Any, Any]:
    """Runs a verb on a new table; returns the answer and the table's rows."""
    number = uuid4().hex[:12]
    name = f"own_{number}"
    make(door.house, name)
    if "name" in how:
        how = {**how, "name": f"{number}-{how['name']}"}
    answer = door.ask(verb, table=name, **how)
    if isinstance(answer, Failed):
        # a job reads objects below incoming/, other doors read files of a folder
        text = re.sub(rf"(file|object) '(incoming/|{door.house.folder}/)?{number}-", "file '", answer.text)
        answer = Failed(text.replace(name, "TABLE"), answer.error)
    rows = of_arrow(door.house.instance.table(name).query())
    return answer, sorted(rows, key=repr)


@pytest.mark.parametrize(("make", "verb", "how"), sampled(CHANGES, 16), ids=label)
def test_every_door_makes_the_same_change(
    doors: dict[str, Door], make: Make, verb: str, how: dict[str, Any]
) -> None:
    expected = done_by(doors["Python"], make, verb, how)
    assert not isinstance(expected[0], Failed), expected
    for name, door in doors.items():
        if hasattr(door, verb) and name != "Python":
            assert done_by(door, make, verb, how) == expected, name


@pytest.mark.parametrize(("make", "verb", "how", "error"), sampled(REFUSED, 8), ids=label)
def test_every_door_refuses_the_same_change(
    doors: dict[str, Door], make: Make, verb: str, how: dict[str, Any], error: str
) -> None:
    expected, rows = done_by(doors["Python"], make, verb, how)
    assert isinstance(expected, Failed) and expected.error == error, expected
    for name, door in doors.items():
        if hasattr(door, verb):
            failed, then = done_by(door, make, verb, how)
            assert isinstance(failed, Failed), name
            # a door that gets the file's content does not know its path
            sent = expected.text.replace(f"file {str(door.house.folder / 'upload.csv')!r}", "the file")
            assert failed.text in (expected.text, sent), name
            assert then == rows, name
            assert failed.error in (None, error), name


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "how"), WAITING, ids=label)
def test_every_door_waits_for_a_lock_for_the_given_time(
    doors: dict[str, Door], verb: str, how: dict[str, Any]
) -> None:
    """The test sets the time. The default is a minute for a command, but hours for a job."""
    with_verb = {name: door for name, door in doors.items() if hasattr(door, verb)}
    assert {"Python", "Remote", "CommandLine"} <= with_verb.keys()
    for name, door in with_verb.items():
        table = f"own_{uuid4().hex[:12]}"
        row_table(door.house, table)
        with door.house.instance.row_table(table).locks.read():
            failed = door.ask(verb, table=table, wait_seconds=0.2, **how)
        assert isinstance(failed, Failed) and failed.error == "RowLockHeld", (name, failed)
        assert not isinstance(door.ask(verb, table=table, wait_seconds=60, **how), Failed), name
