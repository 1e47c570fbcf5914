"""Bad input of every kind: the error is one clear line of the right class, and the table works as before."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse import errors
from dormouse.model.file_reference import FileReference

DORMOUSE = str(Path(sys.executable).with_name("dormouse"))
ROWS = {"carrier": ["AA", "DL", "UA"], "flight": [7, 1, 2], "time": [1, 2, 3], "delay": [5, None, -1]}
SCHEMA = dm.Schema(
    row_keys=[dm.Field("carrier", dm.STRING), dm.Field("flight", dm.LONG)],
    sort_keys=[dm.Field("time", dm.LONG)],
    values=[dm.Field("delay", dm.LONG, nullable=True)],
)


@pytest.fixture
def flights(instance: dm.Instance) -> dm.Table:
    table = instance.create_table("flights", SCHEMA, split_points=["DL"])
    table.ingest(pa.table(ROWS))
    return table


@contextmanager
def refused(kind: type[errors.DormouseError], *words: str) -> Iterator[None]:
    """Checks that the block raises an error of this class, whose message is one line with these words."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def assert_as_before(table: dm.Table) -> None:
    assert table.query().read_all().to_pydict() == ROWS
    assert table.status().row_count == 3


KEY = [dm.Field("id", dm.LONG)]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: dm.Schema(None), "row_keys must be a list of dm.Field, not None"),  # type: ignore[arg-type]
        (lambda: dm.Schema(row_keys=[]), "at least one row key"),
        (lambda: dm.Schema(row_keys=KEY, values=[dm.Field("id", dm.STRING)]), "'id'"),
        (lambda: dm.Schema(row_keys=KEY, values=[dm.Field("ID", dm.STRING)]), "case does not count"),
        (lambda: dm.Schema(row_keys=[dm.Field("d", dm.DOUBLE)]), "'d' is double"),
        (lambda: dm.Schema(row_keys=[dm.Field("l", dm.LIST(dm.LONG))]), "'l'"),
        (lambda: dm.Schema(row_keys=[dm.Field("n", dm.LONG, nullable=True)]), "nullable"),
        (lambda: dm.Field("x", "decimal"), "'decimal' is not a type"),  # type: ignore[arg-type]
        (lambda: dm.Field("__a", dm.LONG), "'__a'"),
        (lambda: dm.MAP(dm.DOUBLE, dm.LONG), "map's key"),
    ],
)
def test_an_invalid_schema_is_refused(make: Callable[[], Any], word: str) -> None:
    with refused(errors.InvalidSchema, word):
        make()


@pytest.mark.parametrize(
    "points", [[7], ["B", "A"], ["A", "A"], [""], [None]], ids=["type", "order", "twice", "minimum", "none"]
)
def test_invalid_split_points_are_refused(instance: dm.Instance, points: list[Any]) -> None:
    with refused(errors.InvalidRange, "split point"):
        instance.create_table("t", SCHEMA, split_points=points)
    assert instance.tables() == []


def test_a_schema_or_split_points_of_another_type_are_refused(instance: dm.Instance) -> None:
    with refused(errors.InvalidSchema, "must be dm.Schema"):
        instance.create_table("t", None)  # type: ignore[arg-type]
    with refused(errors.InvalidRange, "split points must be a list, not 5"):
        instance.create_table("t", SCHEMA, split_points=5)  # type: ignore[arg-type]
    assert len(instance.create_table("t", SCHEMA, split_points=None).partitions.leaves()) == 1


def test_instances_and_tables_cannot_be_pickled(instance: dm.Instance, flights: dm.Table) -> None:
    for one in (instance, flights):
        with pytest.raises(TypeError, match=r"open (it|its instance) again"):
            pickle.dumps(one)


def test_a_split_outside_its_partition_is_refused(flights: dm.Table) -> None:
    left, _ = flights.partitions.leaves()
    with refused(errors.InvalidRange, "'ZZ'", "does not lie inside"):
        flights.partitions.split(left.partition_id, "ZZ")
    with refused(errors.InvalidRange, "split point"):
        flights.partitions.split(left.partition_id, 7)
    with refused(errors.InvalidRange, "'delay' is not a row key"):
        flights.partitions.split(left.partition_id, 7, "delay")
    assert len(flights.partitions.leaves()) == 2
    assert_as_before(flights)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"flight": None}, "'flight' (long) is missing"),
        ({"extra": [1, 2, 3]}, "'extra' is not in the schema"),
        ({"flight": ["a", "b", "c"]}, "'flight' is string"),
        ({"delay": [1.5, 2.5, 3.5]}, "'delay'"),
        ({"carrier": ["AA", None, "UA"]}, "'carrier' must not be null"),
        ({"time": [1, 2, None]}, "'time' must not be null"),
    ],
    ids=["missing", "extra", "type", "lossy", "null in a row key", "null in a sort key"],
)
def test_data_that_does_not_fit_the_schema_is_refused(
    flights: dm.Table, tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    columns = {name: values for name, values in (ROWS | change).items() if values is not None}
    with refused(errors.InvalidData, word):
        flights.ingest(pa.table(columns))
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table(columns), path)
    with refused(errors.InvalidData, word):
        flights.ingest(path)
    assert_as_before(flights)


def damaged(path: Path) -> None:
    pq.write_table(pa.table(ROWS), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "write", [damaged, lambda path: path.write_bytes(b""), lambda path: path.write_text("not Parquet at all")]
)
def test_a_file_that_is_not_parquet_is_refused(
    flights: dm.Table, tmp_path: Path, write: Callable[[Path], Any]
) -> None:
    path = tmp_path / "bad.parquet"
    write(path)
    with refused(errors.InvalidData, "bad.parquet"):
        flights.ingest(path)
    assert_as_before(flights)


def test_creating_an_existing_table_or_using_a_missing_one_is_refused(
    instance: dm.Instance, flights: dm.Table
) -> None:
    instance.create_table("other", SCHEMA)
    with refused(errors.TableAlreadyExists, "'flights'"):
        instance.create_table("flights", SCHEMA)
    with refused(errors.TableAlreadyExists, "'flights'"):
        instance.rename_table("other", "flights")
    for use in (instance.table, instance.drop_table, lambda name: instance.rename_table(name, "x")):
        with refused(errors.TableNotFound, "'missing'"):
            use("missing")
    with refused(errors.InvalidQuery, "missing"):
        instance.sql("select * from missing").read_all()
    assert_as_before(flights)


def test_every_method_of_a_dropped_table_raises_table_not_found(
    instance: dm.Instance, flights: dm.Table
) -> None:
    instance.drop_table("flights")
    leaf = "0-0"
    uses: list[Callable[[], Any]] = [
        lambda: flights.ingest(pa.table(ROWS)), flights.compact, flights.split, flights.collect_garbage,
        flights.query, flights.explain, flights.status, lambda: list(flights.garbage_ready()),
        lambda: flights.set_properties(compression="none"), lambda: flights.partitions.split(leaf, "B"),
        lambda: list(flights.files.file_references()), flights.partitions.tree,
    ]  # fmt: skip
    for use in uses:
        with refused(errors.TableNotFound, "'flights' no longer exists"):
            use()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "a b", "../../etc/passwd", "a/b", "x'; drop table flights; --", 'a"b', "a\0b", "a\nb"),
        *("é", "table.x", "-x", "1x", "%s", "{0}", "x" * 129),
    ],
)
def test_table_names_with_odd_characters_are_refused(
    instance: dm.Instance, flights: dm.Table, name: str
) -> None:
    with refused(errors.InvalidName, "table name"):
        instance.create_table(name, SCHEMA)
    with refused(errors.InvalidName, "table name"):
        instance.rename_table("flights", name)
    with refused(errors.TableNotFound):
        instance.table(name)
    assert [table.name for table in instance.tables()] == ["flights"]
    assert_as_before(flights)


def test_queries_of_missing_columns_and_invalid_sql_are_refused(
    instance: dm.Instance, flights: dm.Table
) -> None:
    with refused(errors.InvalidQuery, "'colour'"):
        flights.query(where={"colour": 1})
    with refused(errors.InvalidQuery, "'colour'"):
        flights.query(columns=["colour"])
    with refused(errors.InvalidQuery, "'flight' is long"):
        flights.query(where={"flight": "seven"})
    with refused(errors.InvalidRange, "is empty"):
        flights.query(where={"flight": dm.Range(9, 1)})
    with refused(errors.InvalidQuery, "colour"):
        instance.sql("select colour from flights").read_all()
    with refused(errors.InvalidQuery):
        instance.sql("selec 1")
    for statement in ("drop table flights", "delete from flights", "copy flights to '/tmp/x.csv'"):
        with refused(errors.InvalidQuery):
            instance.sql(statement).read_all()
    assert_as_before(flights)


def test_a_folder_that_is_not_an_instance_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with refused(errors.NotAnInstance, str(tmp_path)):
        dm.local(tmp_path)
    with refused(errors.NotAnInstance, "is not a folder"):
        dm.local(tmp_path / "thesis.txt")
    with refused(errors.NotAnInstance, "new"):
        dm.local(tmp_path / "new", read_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    for path in (None, 5):
        with refused(errors.InvalidName, f"not {path}"):
            dm.local(path)  # type: ignore[arg-type]
    (tmp_path / "dormouse.json").write_bytes(b"\xff\xfe{")
    with refused(errors.NotAnInstance, "dormouse.json was not written by Dormouse"):
        dm.local(tmp_path)


@pytest.mark.slow
def test_an_instance_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dormouse.json").write_text(json.dumps({"format": 99}))
    with refused(errors.InstanceTooNew, "99", "upgrade"):
        dm.local(tmp_path)
    done = cli("status", "-i", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_a_read_only_folder_is_one_clear_error(tmp_path: Path) -> None:
    """The folder is one of /proc, because root may write everywhere except in /proc and /sys."""
    folder = Path("/proc/dormouse") if os.geteuid() == 0 else tmp_path / "lake"
    tmp_path.chmod(0o500)
    try:
        with pytest.raises((errors.InstanceReadOnly, errors.InstanceError), match=str(folder)):
            dm.local(folder)
    finally:
        tmp_path.chmod(0o700)


def test_an_instance_opened_read_only_changes_nothing(tmp_path: Path, dsn: str, flights: dm.Table) -> None:
    with dm.connect(dsn, f"file://{tmp_path}/objects", read_only=True) as reader:
        table = reader.table("flights")
        changes: list[Callable[[], Any]] = [
            lambda: table.ingest(pa.table(ROWS)), table.compact, table.split, table.collect_garbage,
            lambda: table.set_properties(compression="none"), lambda: reader.drop_table("flights"),
            lambda: reader.create_table("t", SCHEMA), lambda: reader.rename_table("flights", "t"),
            lambda: table.partitions.split(table.partitions.leaves()[0].partition_id, "B"),
            lambda: table.files.add_files([FileReference(filename="f", partition_id="0-0", row_count=1)]),
        ]  # fmt: skip
        for change in changes:
            with refused(errors.InstanceReadOnly, "read-only"):
                change()
        assert_as_before(table)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("properties", "word"),
    [
        ({"gc_delay_seconds": -1}, "gc_delay_seconds"),
        ({"colour": "red"}, "colour"),
        ({"compression": "rar"}, "compression"),
        ({"aggregate": "sum(nothing)"}, "nothing"),
        ({"filter": "age_off(carrier, 1)"}, "carrier"),
    ],
)
def test_invalid_properties_are_refused(flights: dm.Table, properties: dict[str, Any], word: str) -> None:
    before = flights.properties
    with refused(errors.InvalidProperties, word):
        flights.set_properties(**properties)
    assert flights.properties == before


def cli(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([DORMOUSE, *args], capture_output=True, text=True, check=False, **options)


@contextmanager
def small_disk(folder: Path) -> Iterator[dict[str, Any]]:
    """Mounts a file system of 1 MB at `folder`. Where mounting is not allowed, limits the size of files
    instead.

    Yields the options with which `subprocess.run` starts a process that has the limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        limit = 1 << 20
        yield {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
        return
    try:
        yield {}
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def objects_in(folder: Path) -> set[Path]:
    """Returns the files of an object store, except its milestones."""
    return {path for path in folder.rglob("*") if path.is_file() and path.parent.name != "now"}


@pytest.mark.objects  # a reader of inlined files writes local files
@pytest.mark.slow
def test_a_disk_that_fills_during_an_ingest_is_one_clear_error(dsn: str, tmp_path: Path) -> None:
    """The error is one line, and there are no new rows or objects. Ingests work again when there is room."""
    count = 400_000
    large = tmp_path / "large.parquet"
    keys = {"carrier": ["UA"] * count, "flight": range(count), "time": range(count)}
    noise = pa.array(int.from_bytes(os.urandom(7)) for _ in range(count))
    pq.write_table(pa.table({**keys, "delay": noise}), large)
    where = ("--dsn", dsn, "--objects", f"file://{tmp_path}/objects")
    with (
        small_disk(tmp_path / "objects") as options,
        dm.connect(dsn, f"file://{tmp_path}/objects") as instance,
    ):
        table = instance.create_table("flights", SCHEMA)
        table.ingest(pa.table(ROWS))
        before = objects_in(tmp_path / "objects")
        done = cli("ingest", "flights", str(large), "--id", "large", *where, **options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "space" in done.stderr or "too large" in done.stderr
        assert_as_before(table)
        assert objects_in(tmp_path / "objects") == before
        table.ingest(pa.table({name: values[:1] for name, values in ROWS.items()}))
        assert table.status().row_count == 4
