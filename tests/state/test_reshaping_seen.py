"""Changes of columns as seen by the command line, the service, backups, times and old files."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.client import connect as connect_client
from dormouse.errors import InvalidQuery
from tests.reshaped import Shaped, ingest
from tests.served import service
from tests.support.api import Instance

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    values=[dm.Field("at", dm.TIMESTAMP), dm.Field("note", dm.STRING, nullable=True)],
)
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shaped(instance: Instance) -> Shaped:
    made = Shaped.made(instance, SCHEMA)
    made.ingest({"k": 1, "at": NOON, "note": "x"})
    made.cut("first")
    return made


def test_a_time_has_the_columns_that_the_table_had_then(shaped: Shaped) -> None:
    """Reads at a time between two changes of columns have the columns of that time.

    Nothing but columns changes in between.
    """
    times = []
    for number in range(3):
        times.append((datetime.now(UTC), shaped.model))
        shaped.rename(shaped.table.schema.names[-1], f"note{number}")
    shaped.add(dm.Field("new", dm.LONG), 7)
    for at, model in times:
        shaped.moments["then"] = model
        assert shaped.table.schema_at(at).names == tuple(model.names)
        assert shaped.table.query(as_of=at).read_all().to_pylist() == model.shown()
        assert shaped.instance.sql("select * from t", as_of=at).read_all().to_pylist() == model.shown()
        assert shaped.table.explain({"k": 1}, as_of=at).files == 1
    with pytest.raises(InvalidQuery, match="unknown column 'new'"):
        shaped.table.query({"new": 7}, as_of=times[0][0])


@pytest.mark.slow
def test_the_service_and_its_client_have_the_columns_of_each_moment(shaped: Shaped) -> None:
    """A client that described the table before the changes uses new names, types and columns at once."""
    with service(shaped.instance) as url, connect_client(url) as client:
        remote = client.table("t")
        assert remote.query({"note": "x"}).read_all().num_rows == 1
        shaped.rename("at", "moment")
        shaped.rename("note", "at")
        shaped.add(dm.Field("n", dm.INT), 7)
        wanted = shaped.model.shown()
        assert remote.query().read_all().to_pylist() == wanted
        assert remote.query({"moment": NOON, "at": "x"}).read_all().to_pylist() == wanted
        assert remote.query({"n": 7}, ["n"]).read_all().to_pylist() == [{"n": 7}]
        assert remote.explain({"n": 7}).files == 1
        assert remote.schema == shaped.table.schema
        with pytest.raises(InvalidQuery, match="unknown column 'note'"):
            remote.query({"note": "x"})
        shaped.table.widen_column("n", dm.LONG)
        assert remote.query({"n": dm.Range(max=1 << 40)}).read_all().num_rows == 1
        then = shaped.moments["first"].shown()
        assert remote.query({"at": NOON, "note": "x"}, as_of="first").read_all().to_pylist() == then
        assert remote.explain({"note": "x"}, as_of="first").files == 1
        changed = remote.changes("first").read_all()
        assert changed.column_names == ["k", "moment", "at", "n", "_change"]


@pytest.mark.slow
def test_a_backup_has_the_versions(tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake") as instance:
        shaped = Shaped.made(instance, SCHEMA)
        shaped.ingest({"k": 1, "at": NOON, "note": "x"})
        shaped.drop("note")
        shaped.add(dm.Field("note", dm.STRING, nullable=True), "old")
        shaped.ingest({"k": 2, "at": NOON, "note": None})
        instance.backup(tmp_path / "backups")
        shaped.drop("note")
        model = shaped.model
    dm.restore(tmp_path / "backups", tmp_path / "new")
    with dm.local(tmp_path / "new") as instance:
        restored = Shaped(instance, instance.table("t"), model)
        assert restored.table.schema.version == 3
        assert [row["note"] for row in restored.table.query().read_all().to_pylist()] == ["old", None]
        restored.table.drop_column("note")
        restored.check()
        assert instance.check(deep=True).problems == ()


def test_a_consumer_goes_on_with_the_current_columns(shaped: Shaped) -> None:
    consumer = shaped.table.consumer("etl")
    swapped = shaped.instance.table("t")
    swapped.rename_column("note", "remark")
    ingest(swapped, [{"k": 2, "at": NOON, "remark": "y"}])
    read = consumer.read().read_all()
    assert read.column_names == ["k", "at", "remark", "_change"]
    assert read["remark"].to_pylist() == ["y"]


@pytest.mark.slow
def test_the_command_line_changes_columns_and_shows_them(cli: Cli) -> None:
    create = ("table", "create", "t", "--row-key", "k:long", "--value", "i:int?", "--value", "note:string?")
    assert cli(*create)[0] == 0
    assert cli("table", "add-column", "t", "gate:string", "--default", "none") == (
        0, "added gate to table t; version 2 of its columns\n", "",
    )  # fmt: skip
    assert cli("table", "rename-column", "t", "note", "remark")[0] == 0
    code, out, _ = cli("table", "widen-column", "t", "i", "long", "--json")
    assert (code, json.loads(out)["schema_version"]) == (0, 4)
    assert json.loads(out)["schema"]["values"][0] == {"name": "i", "type": "long", "nullable": True}
    code, out, _ = cli("table", "drop-column", "t", "remark", "--dry-run", "--json")
    assert (code, json.loads(out)["dropped"], json.loads(out)["schema_version"]) == (0, False, 4)
    code, _, err = cli("table", "drop-column", "t", "remark")
    assert (code, err.count("\n")) == (2, 1)
    assert "--yes is needed to drop column remark of table t" in err
    assert cli("table", "drop-column", "t", "remark", "--yes")[1] == (
        "dropped column remark of table t; version 5 of its columns\n"
    )
    shown = json.loads(cli("table", "show", "t", "--json")[1])
    assert (shown["schema_version"], shown["column_ids"]) == (5, {"k": 1, "i": 2, "gate": 4})
    assert [one["change"] for one in shown["schema_changes"]] == [
        "added gate: string, by default 'none'", "renamed note to remark", "widened i from int to long",
        "dropped remark",
    ]  # fmt: skip
    assert "version 5 of its columns: added gate" in cli("table", "show", "t")[1]


REFUSED = [
    (("add-column", "t", "i:long?"), "there is a column 'i' already"),
    (("add-column", "t", "x:long"), "'x' must not be null"),
    (("add-column", "t", "x:long", "--default", "soon"), "the default does not fit: 'x' is long; 'soon'"),
    (("add-column", "t", "x"), "field 'x': write name:type"),
    (("rename-column", "t", "x", "y"), "there is no column 'x'"),
    (("widen-column", "t", "i", "string"), "cannot hold all of its values"),
    (("widen-column", "t", "k", "int"), "cannot hold all of its values"),
    (("drop-column", "t", "k", "--dry-run"), "'k' is a key"),
    (("drop-column", "u", "k", "--dry-run"), "table 'u' does not exist"),
]


@pytest.mark.slow
def test_refusals_on_the_command_line_have_one_line(cli: Cli) -> None:
    """Covers also a query at a moment before a rename, which must use the old name."""
    assert cli("table", "create", "t", "--row-key", "k:long", "--value", "i:int?")[0] == 0
    for args, said in REFUSED:
        code, out, err = cli("table", *args)
        assert (code != 0, out, err.count("\n")) == (True, "", 1)
        assert said in err
    Path("rows.csv").write_text("k,i\n1,2\n")
    assert cli("ingest", "t", "rows.csv")[0] == 0
    assert cli("history", "cut", "t", "first")[0] == 0
    assert cli("table", "rename-column", "t", "i", "n")[0] == 0
    found = cli("query", "t", "--where", "i=2", "--as-of", "first", "--format", "csv")
    assert found == (0, '"k","i"\n1,2\n', "")
    assert cli("query", "t", "--where", "n=2", "--format", "csv")[1] == '"k","n"\n1,2\n'


def test_files_without_column_ids_are_read_as_the_first_version(shaped: Shaped) -> None:
    """Files without column ids and without a version in their names are read by column names."""
    [file] = shaped.table.files.all_files(0).files
    store = shaped.table.context.objects
    path = store.local_path(file.filename)
    assert path is not None
    rows = pq.read_table(path)
    with shaped.table.context.supplier.connection() as conn:
        old = pa.table(rows.to_pydict(), schema=pa.schema([f.remove_metadata() for f in rows.schema]))
        pq.write_table(old, path)
        conn.execute("update file set byte_count = %s, digest = null", [path.stat().st_size])
    assert pq.read_schema(path).field("k").metadata is None
    shaped.rename("note", "remark")
    shaped.add(dm.Field("note", dm.STRING, nullable=True))
    shaped.check()
