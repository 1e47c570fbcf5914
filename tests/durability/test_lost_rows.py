"""Lost database rows: each is reported at once as damage, and not mistaken for a conversion or a drop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import MetadataDamaged
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance

SCHEMA = OF_KEYS
ROW_OF_FILE = {
    "file_table": "delete from file",
    "salted_counts": "delete from file_count where salt = -1",
    "dummy_reference": "delete from file_reference where partition_id = ''",
}
WORKS: list[Callable[[Instance], object]] = [
    lambda instance: instance.table("t").query({"key": 1}).read_all(),
    lambda instance: instance.table("t").query().read_all(),
    lambda instance: instance.sql("select count(*) from t").read_all(),
    lambda instance: instance.table("t").files.files_in(["root"]),
    lambda instance: instance.table("t").files.all_files(10),
]


@pytest.mark.parametrize("layout", ROW_OF_FILE)
def test_a_lost_row_of_a_file_is_reported(dsn: str, tmp_path: Path, layout: str) -> None:
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        table = instance.create_table("t", SCHEMA, layout=layout)
        table.ingest(pa.table({"key": [1, 2, 3]}))
        [name] = [reference.filename for reference in table.files.file_references()]
        query(instance._supplier, ROW_OF_FILE[layout])
        for work in WORKS:
            began = time.monotonic()
            with pytest.raises(MetadataDamaged) as error:
                work(instance)
            assert name in str(error.value)
            assert "dormouse check --table t" in str(error.value)
            assert time.monotonic() - began < 5


def test_a_lost_partition_is_reported(dsn: str, tmp_path: Path) -> None:
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        table = instance.create_table("t", SCHEMA, split_points=[2])
        table.ingest(pa.table({"key": [1, 2, 3]}))
        query(instance._supplier, "delete from partition where partition_id <> 'root'")
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        for work in WORKS[:3]:
            with pytest.raises(MetadataDamaged, match="run 'dormouse check' to see which"):
                work(instance)


@pytest.mark.objects
def test_a_lost_row_of_an_epoch_is_reported(dsn: str, tmp_path: Path) -> None:
    url = (tmp_path / "objects").as_uri()
    with dm.connect(dsn, url) as instance:
        table = instance.create_table("t", SCHEMA)
        table.ingest(pa.table({"key": [1, 2, 3]}))
        query(instance._supplier, "delete from epoch")
    with dm.connect(dsn, url) as instance:
        found = instance.table("t")
        for work in (lambda: found.ingest(pa.table({"key": [4]})), found.partitions.tree):
            with pytest.raises(MetadataDamaged, match="lost its row of epoch 0"):
                work()
