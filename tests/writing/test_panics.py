"""Panics in DataFusion, which become ordinary errors.

In Python, a panic is a `BaseException`. The inputs that make DataFusion panic differ between versions. So
these tests replace its entry points with functions that panic.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data_files import rows_of, write_object
from datafusion import DataFrame, SessionContext

from dormouse.data.leaf_sorter import LeafSorter
from dormouse.errors import InvalidData, JobFailed
from tests.support.state import TableContext
from tests.support.writing import merge_sorted


class PanicException(BaseException):
    """An error of the same name as the one that DataFusion's binding raises."""


@pytest.fixture
def panics(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], None]:
    """A function that makes a method of a class of DataFusion panic."""

    def panic(*args: Any, **options: Any) -> None:
        raise PanicException("index out of bounds")

    return lambda kind, method: monkeypatch.setattr(kind, method, panic)


@pytest.mark.parametrize(
    ("kind", "method"), [(SessionContext, "read_parquet"), (DataFrame, "sort"), (DataFrame, "execute_stream")]
)
def test_a_panic_in_the_merge_of_spilled_rows_is_an_error(
    new_table: Callable[..., TableContext], panics: Callable[[type, str], None], kind: type, method: str
) -> None:
    table = new_table()
    [batch] = rows_of(table, [2, 1]).to_batches()
    panics(kind, method)
    with LeafSorter(table.schema, 1, by_leaf=False, memory_bytes=1) as sorter:
        for _ in range(2):
            sorter.add(batch, pa.array([0, 0], pa.int32()))
        with pytest.raises(JobFailed, match="index out of bounds"):
            list(sorter.sorted_batches())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "method", "error"),
    [
        (SessionContext, "read_parquet", InvalidData),
        (DataFrame, "write_parquet_with_options", JobFailed),
        (DataFrame, "sort", JobFailed),
    ],
)
def test_a_panic_in_a_compaction_is_an_error(
    new_table: Callable[..., TableContext],
    panics: Callable[[type, str], None],
    tmp_path: Path,
    kind: type,
    method: str,
    error: type[Exception],
) -> None:
    table = new_table()
    write_object(table.objects, table.schema, "file", rows_of(table, [1]))
    panics(kind, method)
    with pytest.raises(error, match=r"index out of bounds") as found:
        merge_sorted(
            [table.objects.uri("file")], table.schema, tmp_path / "out", now_ms=0, store=table.objects
        )
    assert error is JobFailed or "file" in str(found.value)
