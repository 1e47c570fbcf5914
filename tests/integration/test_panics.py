"""A panic in DataFusion is an error as any other, wherever DataFusion is driven.

Python sees a panic as an exception that is no `Exception`; which input makes the library panic changes from
version to version, so here its entry points do it on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data_files import rows_of, write_object
from datafusion import SessionContext

from dormouse.context import TableContext
from dormouse.data.leaf_sorter import LeafSorter
from dormouse.data.merge import merge_sorted
from dormouse.errors import InvalidData, InvalidQuery, JobFailed
from dormouse.query.statements import sql


class PanicException(BaseException):
    """What the binding raises has this name."""


@pytest.fixture
def panics(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a method of DataFusion's sessions panic."""

    def panic(*args: Any, **options: Any) -> None:
        raise PanicException("index out of bounds")

    return lambda method: monkeypatch.setattr(SessionContext, method, panic)


@pytest.mark.parametrize("method", ["register_parquet", "sql"])
def test_of_the_merge_of_spilled_rows(
    new_table: Callable[..., TableContext], panics: Callable[[str], None], method: str
) -> None:
    table = new_table()
    [batch] = rows_of(table, [2, 1]).to_batches()
    panics(method)
    with LeafSorter(table.schema, 1, by_leaf=False, memory_bytes=1) as sorter:
        sorter.add(batch, pa.array([0, 0], pa.int32()))
        with pytest.raises(JobFailed, match="index out of bounds"):
            list(sorter.sorted_batches())


def test_of_a_compaction(
    new_table: Callable[..., TableContext],
    panics: Callable[[str], None],
    tmp_path: Path,
) -> None:
    table = new_table()
    write_object(table.objects, table.schema, "file", rows_of(table, [1]))
    panics("sql")
    with pytest.raises(InvalidData, match=r"file.*index out of bounds"):
        merge_sorted(
            [table.objects.uri("file")], table.schema, tmp_path / "out", now_ms=0, store=table.objects
        )


def test_of_a_statement(new_table: Callable[..., TableContext], panics: Callable[[str], None]) -> None:
    panics("sql_with_options")
    with pytest.raises(InvalidQuery, match="index out of bounds"):
        sql({"t": new_table()}, "select 1")
