"""The flights of a year: eight processes edit the table at once for a minute; then a download and upload.

At the end, a model repeats the accepted changes in the order of their versions. The current rows, every
version and the answer of each query must equal those of the model.
"""

from __future__ import annotations

import csv
import json
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.demo.datasets import flights_csv
from dormouse.rows.batches import BLOCK_ROWS_MAX
from tests import forks
from tests.row_editors import NOTE
from tests.support.rows import RowTable

FLIGHTS = 60_000
"""A number for three blocks of rows, and a query of several pages."""
PROCESSES, SECONDS = 8, 20.0
Cells = dict[str, Any]


@dataclass
class Model:
    """A model of the table: each row version by id and version, None for a deletion."""

    rows: dict[int, tuple[int, Cells]] = field(default_factory=dict)
    versions: dict[tuple[int, int], Cells | None] = field(default_factory=dict)
    next_id: int = 1
    new: Cells = field(default_factory=dict)
    """The cells of a row to which no values were given: the defaults."""
    shared: dict[str, int] = field(default_factory=dict)
    """The ids of rows that upserts inserted, by their keys. None of these rows is deleted."""

    def put(self, row_id: int, version: int, cells: Cells) -> None:
        self.rows[row_id] = version, cells
        self.versions[row_id, version] = cells

    def add(self, version: int, cells: Mapping[str, Any]) -> int:
        row_id, self.next_id = self.next_id, self.next_id + 1
        self.put(row_id, version, self.new | {n: v for n, v in cells.items() if v is not None})
        return row_id

    def apply(self, change: Mapping[str, Any], version: int) -> list[int]:
        """Applies an accepted change, and returns the ids of new rows."""
        [(kind, given)] = change.items()
        if kind == "insert":
            return [self.add(version, row) for row in given]
        if kind == "add_column":
            name, default = given["name"], given["default"]
            self.new[name] = default
            for _, cells in self.rows.values():
                cells[name] = default
        elif kind == "remove":
            for row_id, sent in given:
                assert self.rows.pop(row_id)[0] == sent
                self.versions[row_id, version] = None
        elif kind in ("update", "patch"):
            for row in given:
                known, cells = self.rows[row["ROW_ID"]]
                assert known == row["ROW_VERSION"]
                sent = {n: v for n, v in row.items() if n not in ("ROW_ID", "ROW_VERSION")}
                whole = self.new | {n: v for n, v in sent.items() if v is not None}
                self.put(row["ROW_ID"], version, cells | sent if kind == "patch" else whole)
        elif kind == "upsert":
            return self._upsert(given, version)
        return []

    def _upsert(self, rows: list[Cells], version: int) -> list[int]:
        made = []
        for row in rows:
            row_id = self.shared.get(row["tailnum"])
            if row_id is None:
                made.append(self.add(version, row))
                self.shared[row["tailnum"]] = made[-1]
            elif (cells := self.rows[row_id][1]) | row != cells:
                self.put(row_id, version, cells | row)
        return made


def write_flights(path: Path, rows: int) -> list[Cells]:
    """Writes the published file, or its first rows. Returns the rows as a table has them."""
    with zipfile.ZipFile(flights_csv()) as archive, archive.open("flights.csv") as file:
        path.write_bytes(b"".join(islice(file, rows + 1)))
    with path.open(newline="") as text:
        return [{name: value_of(name, cell) for name, cell in row.items()} for row in csv.DictReader(text)]


def value_of(name: str, cell: str) -> Any:
    if cell in ("NA", ""):
        return None
    if name == "time_hour":
        return int(datetime.fromisoformat(cell).timestamp() * 1_000)
    return cell if name in ("carrier", "tailnum", "origin", "dest") else int(cell)


@pytest.fixture
def dormouse(cli: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """Returns a function that runs a command and returns its JSON output."""

    def run(*arguments: object) -> Any:
        code, out, err = cli(*map(str, arguments), "--json")
        assert code == 0, err
        return json.loads(out)

    return run


def edited(folder: Path, processes: int, rows: int, seconds: float) -> list[dict[str, Any]]:
    """Runs processes that edit the table; returns the changes and answers that they recorded."""
    until = time.time() + seconds
    logs = [folder / f"log {number}" for number in range(processes)]
    lake = folder / "lake"
    program = "from tests.row_editors import main; main()"
    started = [forks.start(program, lake, number, rows, until, log) for number, log in enumerate(logs)]
    try:
        for one in started:
            one.join(seconds + 300)
        assert [one.exitcode for one in started] == [0] * processes
    finally:
        for one in started:
            one.kill()
            one.join()
    return [json.loads(line) for log in logs for line in log.read_text().splitlines()]


def rows_of(table: RowTable) -> Iterator[dict[str, Any]]:
    return (row for batch in table.current() for row in batch.to_pylist())


def check(table: RowTable, model: Model) -> None:
    """Compares the current rows and all versions with the model."""
    found = {row.pop("ROW_ID"): (row.pop("ROW_VERSION"), row) for row in rows_of(table)}
    assert found.keys() == model.rows.keys()
    empty = dict.fromkeys(column.name for column in table.columns())
    wrong = [i for i, (version, cells) in model.rows.items() if found[i] != (version, empty | cells)]
    assert not wrong
    old = {}
    for batch in table.changed(0):
        for row in batch.to_pylist():
            key = row.pop("ROW_ID"), row.pop("ROW_VERSION")
            old[key] = None if row.pop("ROW_DELETED") else row
    assert old.keys() == model.versions.keys()
    for key, cells in model.versions.items():
        found_cells = old[key]
        assert (cells is None) == (found_cells is None)
        if cells is not None and found_cells is not None:
            assert all(found_cells[name] == value for name, value in cells.items())


def replay(model: Model, notes: list[dict[str, Any]]) -> None:
    """Applies the recorded changes by version, and compares each recorded answer with the model at its
    version.
    """
    changes = sorted((one for one in notes if one.get("versions")), key=lambda one: one["versions"][0])
    queries = sorted((one for one in notes if "query" in one), key=lambda one: one["version"])
    for one in changes:
        [version] = one["versions"]
        while queries and queries[0]["version"] < version:
            check_query(model, queries.pop(0)["query"])
        assert model.apply(one["change"], version) == one["ids"]
    for one in queries:
        check_query(model, one["query"])


def check_query(model: Model, rows: list[list[Any]]) -> None:
    expected = sorted(
        [i, cells.get("flight"), cells.get("dep_delay")]
        for i, (_, cells) in model.rows.items()
        if cells.get("carrier") == "UA"
    )
    assert sorted(rows, key=lambda row: row[0]) == expected
    delays = [row[2] for row in rows if row[2] is not None]
    assert delays == sorted(delays, reverse=True)


@pytest.mark.slow
def test_many_processes_edit_the_table_at_once(tmp_path: Path, dormouse: Callable[..., Any]) -> None:
    lake, path = tmp_path / "lake", tmp_path / "flights.csv"
    flights = write_flights(path, FLIGHTS)
    assert len(flights) == FLIGHTS
    done = dormouse("rows", "upload", "flights", path, "--create", "--null", "NA", "-i", lake)
    assert done["changed"]["inserted"] == FLIGHTS
    model = Model()
    for number, cells in enumerate(flights):
        model.add(1 + number // BLOCK_ROWS_MAX, cells)
    with dm.local(lake) as instance:
        table = instance.row_table("flights")
        table.query("select flight from flights where carrier = 'UA' limit 1", wait_seconds=300)
        notes = edited(tmp_path, PROCESSES, FLIGHTS, SECONDS)
        replay(model, notes)
        check(table, model)
        kinds = {kind for one in notes if one.get("versions") for kind in one["change"]}
        assert kinds == {"insert", "update", "patch", "remove", "upsert", "add_column"}
        assert any("query" in one for one in notes)
        assert NOTE.name in [column.name for column in table.columns()]
        history = table.history(limit=100_000)
        assert sum(one.last_version - one.first_version + 1 for one in history) == table.version()
    round_trip(dormouse, lake, tmp_path / "download.csv", len(model.rows))


def round_trip(dormouse: Callable[..., Any], lake: Path, path: Path, rows: int) -> None:
    """Downloads the rows, edits some, and uploads all. The edited rows are updated, and no row is
    duplicated.
    """
    assert dormouse("rows", "download", "flights", path, "-i", lake)["rows"] == rows
    with path.open(newline="") as file:
        header, *lines = list(csv.reader(file))
    wanted = [header.index(name) for name in ("ROW_ID", "ROW_VERSION", "distance")]
    some = [[line[at] for at in wanted[:2]] + ["77"] for line in lines[::100]]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["ROW_ID", "ROW_VERSION", "distance"], *some])
    tried = dormouse("rows", "upload", "flights", path, "--dry-run", "-i", lake)
    done = dormouse("rows", "upload", "flights", path, "-i", lake)
    assert tried["changed"] == done["changed"]
    assert (done["changed"]["inserted"], done["changed"]["updated"]) == (0, len(some))
    with dm.local(lake) as instance:
        found = list(rows_of(instance.row_table("flights")))
    assert len(found) == rows
    assert [row["distance"] for row in found[::100]] == [77] * len(some)
    assert [str(row["distance"] or "") for row in found[1::100]] == [
        line[wanted[2]] for line in lines[1::100]
    ]
