"""A query with `verify` returns no row of a file in which any bit was flipped."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InvalidQuery, ObjectDamaged
from dormouse.reading import checked_files
from tests.flipped_bits import damage, flipped, path_of, written
from tests.standard import OF_K_AND_TEXTS
from tests.support.api import Instance, Table

pytestmark = pytest.mark.objects

SCHEMA = OF_K_AND_TEXTS
FLIPS = 40
HOW: list[dict[str, Any]] = [{}, {"where": {"k": 7}}, {"descending": True}, {"limit": 1}]


@pytest.fixture
def table(instance: Instance) -> Table:
    made = instance.create_table("t", SCHEMA)
    made.ingest([{"k": k, "v": f"value {k % 17}"} for k in range(500)])
    return made


@pytest.mark.few(2)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_each_flipped_bit_is_found(table: Table, how: dict[str, Any]) -> None:
    path = path_of(table)
    content, expected = path.read_bytes(), table.query(**how).read_all()
    assert table.query(**how, verify=True).read_all() == expected
    chosen = random.Random(53)
    ends = [0, 8 * len(content) - 1]
    for bit in [*ends, *(chosen.randrange(8 * len(content)) for _ in range(FLIPS))]:
        written(path, flipped(content, bit))
        with pytest.raises(ObjectDamaged) as raised:
            table.query(**how, verify=True).read_all()
        said = str(raised.value)
        assert path.name in said and "does not have the bytes that were written" in said
        assert "'dormouse check --deep'" in said and "backup" in said
    written(path, content)
    assert table.query(**how, verify=True).read_all() == expected


@pytest.mark.parametrize("layout", ["file_table", "dummy_reference", "salted_counts"])
def test_a_moment_is_verified_by_the_digests_of_files_that_were_replaced(
    instance: Instance, layout: str
) -> None:
    table = instance.create_table("t", SCHEMA, layout=layout)
    table.ingest([{"k": k, "v": f"value {k % 17}"} for k in range(500)])
    path = path_of(table)
    cut = table.history.record_cut()
    expected = table.query().read_all()
    table.ingest([{"k": 1000, "v": "later"}])
    table.compact(full=True)
    assert table.query(as_of=cut, verify=True).read_all() == expected
    content = path.read_bytes()
    written(path, flipped(content, 4 * len(content)))
    assert table.query(verify=True).read_all().num_rows == 501
    with pytest.raises(ObjectDamaged, match=path.name):
        table.query(as_of=cut, verify=True).read_all()


def test_a_row_table_is_verified(instance: Instance) -> None:
    rows = instance.create_row_table("staff", [dm.Column("name", "STRING")])
    rows.change([dm.Insert([{"name": "Ada"}, {"name": "Bo"}])])
    table = instance.table("staff")
    expected = table.query(verify=True).read_all()
    assert expected.num_rows == 2
    path = damage(table)
    with pytest.raises(ObjectDamaged, match=path.name):
        table.query(verify=True).read_all()


def test_a_file_is_read_whole_once_in_a_process(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    digest = checked_files.digest_of_object

    def counted(objects: Any, name: str, *more: Any) -> tuple[int, bytes]:
        read.append(name)
        return digest(objects, name, *more)

    monkeypatch.setattr(checked_files, "digest_of_object", counted)
    table.query().read_all()
    assert not read
    for how in HOW:
        table.query(**how, verify=True).read_all()
    assert len(read) == 1


def test_a_file_without_a_digest_cannot_be_verified(table: Table) -> None:
    with table.reading.supplier.connection() as conn:
        conn.execute("update file set digest = null")
    with pytest.raises(InvalidQuery, match="--note-digests"):
        table.query(verify=True).read_all()
    assert table.query().read_all().num_rows == 500


def test_the_command_verifies(
    table: Table,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", (tmp_path / "objects").as_uri())
    command = ["query", "t", "--verify", "--format", "csv"]
    assert cli(*command)[0] == 0
    path = damage(table)
    code, out, err = cli(*command)
    assert code == 1 and path.name in err and len(out.splitlines()) == 1  # the columns' names
