"""Data that lacks a column of its table or has a new one. The rules are the same at every door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.client import connect
from dormouse.datasource.options import StreamOptions, WriteOptions
from dormouse.datasource.streams import StreamWriter, TableWriter
from dormouse.spark.frames import struct_of
from tests.serving import serving
from tests.standard import OF_K_AND_TEXTS
from tests.support.api import Instance
from tests.working import until

SCHEMA = OF_K_AND_TEXTS
LACKS = pa.table({"k": [1], "v": ["a"]})
HAS_MORE = pa.table({"k": [2], "v": ["b"], "extra": [1.5]})


class Doors:
    """The ways to load rows into one table. Each raises an error, or fails an assertion, with the error's
    message.
    """

    def __init__(self, instance: Instance, dsn: str, folder: Path, cli: Any, patch: Any) -> None:
        self.instance, self.dsn, self.folder, self.cli, self.patch = instance, dsn, folder, cli, patch

    def python(self, rows: pa.Table, evolve: Any) -> None:
        self.instance.table("t").ingest(rows, evolve=evolve)

    def upsert(self, rows: pa.Table, evolve: Any) -> None:
        self.instance.table("t").upsert(rows, evolve=evolve)

    def command(self, rows: pa.Table, evolve: Any, verb: str = "ingest") -> None:
        self.patch.setenv("DORMOUSE_DSN", self.dsn)
        self.patch.setenv("DORMOUSE_OBJECTS", self.instance.objects.url)
        pq.write_table(rows, self.folder / "rows.parquet")
        more = ["--add-columns"] if evolve else []
        code, _, err = self.cli(verb, "t", str(self.folder / "rows.parquet"), *more)
        assert code == 0, err

    def upsert_command(self, rows: pa.Table, evolve: Any) -> None:
        self.command(rows, evolve, "upsert")

    def job(self, rows: pa.Table, evolve: Any) -> None:
        name = f"incoming/{rows.num_columns}{evolve}.parquet"
        (self.folder / "objects" / "incoming").mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, self.folder / "objects" / name)
        request = {"table": "t", "objects": [name], **({"evolve": evolve} if evolve else {})}
        opened = serving(self.instance, job_threads=1, shutdown_seconds_max=10)
        with opened as url, connect(url) as client:
            job_id = client.jobs.start("ingest", request)
            until(lambda: client.jobs.status(job_id).has_ended)
            status = client.jobs.status(job_id)
        assert status.state == "COMPLETE", status.error

    def _options(self, evolve: Any) -> dict[str, str]:
        given = {"table": "t", "dsn": self.dsn, "objects": self.instance.objects.url}
        return {**given, **({"evolve": evolve} if evolve else {})}

    def spark_write(self, rows: pa.Table, evolve: Any) -> None:
        writer = TableWriter.begun(WriteOptions.parse(self._options(evolve)), struct_of(rows.schema))
        writer.commit([writer.write(iter(rows.to_batches()))])

    def spark_stream(self, rows: pa.Table, evolve: Any) -> None:
        task = SimpleNamespace(getLocalProperty=lambda name: "query")
        self.patch.setattr("dormouse.datasource.streams.TaskContext", SimpleNamespace(get=lambda: task))
        options = StreamOptions.parse({**self._options(evolve), "stream": f"s{rows.num_columns}"})
        writer = StreamWriter(options, struct_of(rows.schema))
        writer.commit([writer.write(iter(rows.to_batches()))], 0)


DOORS: list[Callable[[Doors, pa.Table, Any], None]] = [
    Doors.python, Doors.upsert, Doors.command, Doors.upsert_command, Doors.job, Doors.spark_write,
    Doors.spark_stream,
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("load", DOORS)
def test_a_door_fills_missing_columns_and_refuses_or_adds_new_ones(
    dsn: str,
    tmp_path: Path,
    cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    load: Callable[[Doors, pa.Table, Any], None],
) -> None:
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(keep="newest_row"))
        table.add_column(dm.Field("src", dm.STRING), "web")
        table.add_column(dm.Field("note", dm.STRING, nullable=True))
        doors = Doors(instance, dsn, tmp_path, cli, monkeypatch)
        load(doors, LACKS, None)
        filled = {"src": "web", "note": None}
        assert table.query().read_all().to_pylist() == [{"k": 1, "v": "a", **filled}]
        with pytest.raises(
            (dm.DormouseError, AssertionError), match=r"'extra' is not in the schema; .*evolve"
        ):
            load(doors, HAS_MORE, None)
        load(doors, HAS_MORE, "add")
        assert table.query().read_all().to_pylist() == [
            {"k": 1, "v": "a", **filled, "extra": None},
            {"k": 2, "v": "b", **filled, "extra": 1.5},
        ]
