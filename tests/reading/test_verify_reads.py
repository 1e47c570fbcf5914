"""The table property `verify_reads`: no reader returns rows of a file with a flipped bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import dormouse as dm
import dormouse.client
from dormouse.errors import DormouseError, InvalidQuery, ObjectDamaged
from dormouse.objects.folder import FolderStore
from tests.flipped_bits import damage, flipped, path_of, written
from tests.serving import http_post, serving
from tests.support.api import Instance, Table
from tests.support.model import DOUBLE, LONG, STRING, Field, Schema
from tests.support.reading import Interruption
from tests.support.verbs import functions

pytestmark = pytest.mark.objects

SCHEMA = Schema(
    [Field("k", LONG)], values=[Field("v", DOUBLE, nullable=True), Field("s", STRING, nullable=True)]
)
ROWS = [{"k": k, "v": k / 7, "s": [None, "a", "bb", str(k)][k % 4]} for k in range(500)]
VERIFIES = dm.TableProperties(verify_reads=True)
FLIPS = 12
SELECT = "select * from t order by k"
Door = Callable[[Instance, Table], Any]
DOORS: dict[str, Door] = {
    "query": lambda on, t: t.query().read_all(),
    "key": lambda on, t: t.query({"k": 7}).read_all(),
    "descending": lambda on, t: t.query(descending=True).read_all(),
    "head": lambda on, t: t.head(1),
    "count": lambda on, t: t.count(),
    "count where": lambda on, t: t.count({"k": dm.Range(3, 9)}),
    "sql": lambda on, t: on.sql(SELECT).read_all(),
    "sql limit": lambda on, t: on.sql(f"{SELECT} limit 2").read_all(),
    "table.sql": lambda on, t: t.sql("select sum(v) as v from t").read_all(),
    "as_of": lambda on, t: t.query(as_of="cut").read_all(),
    "sql as_of": lambda on, t: on.sql(SELECT, as_of="cut").read_all(),
    "changes": lambda on, t: t.changes(None).read_all(),
    "consumer": lambda on, t: t.changes(None, "cut").read_all(),
}


def make(instance: Instance, properties: dm.TableProperties = VERIFIES) -> Table:
    table = instance.create_table("t", SCHEMA, properties=properties)
    table.ingest(ROWS)
    table.history.record_cut("cut")
    return table


def test_no_interface_returns_rows_of_a_file_with_a_flipped_bit(instance: Instance) -> None:
    table = make(instance)
    path, chosen = path_of(table), random.Random(53)
    content = path.read_bytes()
    for read in DOORS.values():
        read(instance, table)  # of a whole file
    views = instance.duckdb().sql(SELECT).to_arrow_table()
    assert views.num_rows == len(ROWS)
    for bit in [0, 8 * len(content) - 1, *(chosen.randrange(8 * len(content)) for _ in range(FLIPS))]:
        for name, read in DOORS.items():
            written(path, flipped(content, bit))
            with pytest.raises(ObjectDamaged) as raised:
                read(instance, table)
            said = str(raised.value)
            assert path.name in said and "'t'" in said and "\n" not in said, name
            assert "'dormouse check --deep'" in said and "backup" in said
        written(path, flipped(content, bit))
        with pytest.raises(Exception, match=path.name):
            instance.duckdb().sql(SELECT).to_arrow_table()
    written(path, content)
    assert instance.sql(SELECT).read_all().num_rows == len(ROWS)


@pytest.mark.parametrize("door", ["query", "sql", "count", "duckdb"])
def test_verify_at_a_read_overrides_the_tables_property(instance: Instance, door: str) -> None:
    table = make(instance, dm.TableProperties())
    path = damage(table)
    with pytest.raises(Exception, match=path.name):
        match door:
            case "query":
                table.query(verify=True).read_all()
            case "sql":
                instance.sql(SELECT, verify=True).read_all()
            case "count":
                table.count(verify=True)
            case _:
                instance.duckdb(verify=True).sql(SELECT).to_arrow_table()


@pytest.mark.slow
def test_the_property_is_set_later_and_seen_by_other_handles(
    instance: Instance,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Callable[..., tuple[int, str, str]],
) -> None:
    table = make(instance, dm.TableProperties())
    table.query().read_all()
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", (tmp_path / "objects").as_uri())
    assert cli("table", "set", "t", "verify_reads=yes")[0] == 2
    assert cli("table", "set", "t", "verify_reads=true")[0] == 0
    path = damage(table)
    with pytest.raises(ObjectDamaged, match=path.name):
        table.query().read_all()
    with pytest.raises(ObjectDamaged, match=path.name):
        table.query(as_of="cut").read_all()
    for command in (["query", "t"], ["sql", SELECT]):
        code, _, err = cli(*command, "--format", "csv")
        assert code == 1 and path.name in err
    assert cli("table", "set", "t", "verify_reads=")[0] == 0
    assert not instance.table("t").properties.verify_reads
    code, _, err = cli("sql", SELECT, "--verify", "--format", "csv")
    assert code == 1 and path.name in err


def test_the_service_names_a_damaged_file(instance: Instance) -> None:
    path = damage(make(instance))
    with serving(instance) as url, dormouse.client.connect(url) as client:
        for at, body in (("tables/t/query", {}), ("sql", {"statement": SELECT})):
            answer = http_post(f"{url}/v1/{at}", json=body)
            problem = answer.json()
            assert (answer.status_code, problem["type"]) == (500, "urn:dormouse:object-damaged")
            assert problem["table"] == "t" and problem["filename"].endswith(path.name)
            assert str(path.parent) not in answer.text and "Retry-After" not in answer.headers
        table = client.table("t")
        reads: list[Callable[[], object]] = [
            lambda: table.query().read_all(),
            lambda: table.changes(None).read_all(),
            table.count,
            lambda: client.sql(SELECT).read_all(),
        ]
        for read in reads:
            with pytest.raises(ObjectDamaged, match=path.name):
                read()


def test_the_service_verifies_on_request(instance: Instance) -> None:
    path = damage(make(instance, dm.TableProperties()))
    with serving(instance) as url, dormouse.client.connect(url) as client:
        table = client.table("t")
        for read in (
            lambda: table.query(verify=True).read_all(),
            lambda: table.sql(SELECT, verify=True).read_all(),
            lambda: table.count(verify=True),
            lambda: table.count({"k": 7}, verify=True),
        ):
            with pytest.raises(ObjectDamaged, match=path.name):
                read()


@pytest.mark.parametrize("query", [{"table": "t"}, {"statement": SELECT}])
def test_a_job_of_a_query_writes_no_rows_of_a_damaged_file(instance: Instance, query: dict[str, Any]) -> None:
    path = damage(make(instance, dm.TableProperties()))
    job = instance.jobs.start("query", {**query, "verify": True})
    instance.jobs.worker(functions(instance)).run(drain=True)
    ended = instance.jobs.status(job)
    assert ended.state == "FAILED" and path.name in str(ended.error)


def test_changes_of_a_keyed_table_are_verified(instance: Instance) -> None:
    keyed = dm.TableProperties(keep="newest_row", verify_reads=True)
    table = make(instance, keyed)
    path = damage(table)
    with pytest.raises(ObjectDamaged, match=path.name):
        table.changes(None).read_all()


def test_rows_of_a_row_table_are_verified(instance: Instance, tmp_path: Path) -> None:
    rows = instance.create_row_table("staff", [dm.Column("name", "STRING")], properties=VERIFIES)
    rows.change([dm.Insert([{"name": "Ada"}, {"name": "Bo"}])])
    table = instance.table("staff$versions")
    path = damage(table)
    for read in (
        lambda: rows.row(1, 1),
        lambda: rows.current().read_all(),
        lambda: rows.changed(0).read_all(),
        lambda: rows.download_csv(tmp_path / "staff.csv"),
        lambda: instance.sql("select * from staff").read_all(),
        lambda: instance.sql('select * from "staff$versions"').read_all(),
    ):
        with pytest.raises(ObjectDamaged, match=path.name):
            read()
    # rows that the change leaves untouched are read from the file, and would be written again
    with pytest.raises(ObjectDamaged, match=path.name):
        rows.change(
            [dm.AddColumn(dm.Column("n", "INTEGER")), dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "n": 1}])]
        )


@pytest.mark.parametrize("properties", [VERIFIES, dm.TableProperties()], ids=["verifies", "plain"])
def test_compactions_and_erasures_never_write_damaged_rows(
    instance: Instance, properties: dm.TableProperties
) -> None:
    table = make(instance, properties)
    path = damage(table)
    table.ingest([{"k": 1000, "v": 0.0, "s": "later"}])
    with suppress(DormouseError):  # the job is retried later
        table.compact(full=True)
    with pytest.raises(DormouseError, match=path.name):
        table.erase({"k": 2})
    content = path.read_bytes()
    written(path, flipped(content, 4 * len(content)))  # the bit flips back
    table.query().read_all()
    assert path.exists()
    found = table.query({"k": dm.Range(max=1000)}).read_all()
    assert found.to_pylist() == [row for row in ROWS if row["k"] != 2]


def test_a_view_of_a_file_without_a_digest_is_an_error(instance: Instance) -> None:
    table = make(instance)
    with table.reading.supplier.connection() as conn:
        conn.execute("update file set digest = null")
    with pytest.raises(InvalidQuery, match="--note-digests"):
        instance.sql(SELECT).read_all()
    with instance.duckdb() as views, pytest.raises(Exception, match="--note-digests"):
        views.sql(SELECT).to_arrow_table()


class Hanging:
    """A fake store that never returns the first byte of a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, self.let = threading.Event(), threading.Event()

        def reader(store: FolderStore, name: str) -> BinaryIO:
            self.reads.set()
            assert self.let.wait(60)
            return store._path(name).open("rb")

        monkeypatch.setattr(FolderStore, "reader", reader)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    found = Hanging(monkeypatch)
    yield found
    found.let.set()


@pytest.mark.parametrize("door", ["query", "sql", "changes"])
def test_an_interruption_ends_a_read_while_it_waits_for_a_digest(
    instance: Instance, hanging: Hanging, door: str
) -> None:
    table, interruption = make(instance), Interruption()
    raised: list[BaseException] = []

    def read() -> None:
        try:
            if door == "sql":
                instance.sql(SELECT, interruption=interruption).read_all()
            elif door == "changes":
                table.changes(None, interruption=interruption).read_all()
            else:
                table.query(interruption=interruption).read_all()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert hanging.reads.wait(60)
    interruption.set()
    thread.join(60)
    assert not thread.is_alive() and not hanging.let.is_set()
    [error] = raised
    assert isinstance(error, DormouseError) and "interrupted" in str(error)
