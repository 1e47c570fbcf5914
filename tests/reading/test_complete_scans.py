"""Plans of DataFusion that leave out files which exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datafusion import lit
from query_lake import Lake, tuples

from dormouse.data.datafusion_session import column
from dormouse.errors import DormouseError, ObjectNotFound
from dormouse.postgres import ConnectionSupplier
from dormouse.reading import scan_session
from dormouse.reading.scan_session import executed, key_session, planned, stored_rows
from tests.support.model import LONG, Field, Range, Schema
from tests.support.objects import ObjectStore
from tests.support.reading import Interruption, KeyRanges, plan_query, query

NUMBERS = Schema([Field("k", LONG)])


@pytest.fixture
def lake(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> Lake:
    """A table of two files, whose names are encoded in URLs."""
    return filled(Lake(dsn, supplier, tmp_path / "a [b]*?%20é", NUMBERS))


def filled(lake: Lake) -> Lake:
    for number in (1, 2):
        lake.add([{"k": number}, {"k": number + 10}])
    return lake


def read(lake: Lake, wanted: Sequence[int], key: int) -> list[int]:
    """Returns the rows with a key; of each file, only those with one of the `wanted` keys are read."""
    context = lake.context
    [scans] = plan_query(context, KeyRanges())
    by_name = sorted(scans, key=lambda scan: scan.min_key or b"")
    slices = [(KeyRanges({"k": [Range(one, one, max_inclusive=True)]}),) for one in wanted]
    limited = [replace(scan, slices=part) for scan, part in zip(by_name, slices, strict=True)]

    def plan() -> Any:
        rows = stored_rows(key_session(context.objects), context.objects, lake.schema, limited)
        return rows.filter(column("k") == lit(key)).execution_plan()

    batches = executed(context, planned(context, limited, plan), Interruption())
    return [one for batch in batches for one in batch["k"].to_pylist()]


def test_a_plan_that_leaves_out_a_file_of_a_scan_is_refused(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DataFusion looks for all files of a scan in the store of the first one."""
    lost: list[str] = []

    def elsewhere(ctx: Any, urls: Sequence[str], schema: pa.Schema, *more: Any) -> Any:
        lost.append(urls[-1])
        return real(ctx, [*urls[:-1], "s3://elsewhere/a.parquet"], schema, *more)

    assert len(tuples(query(lake.context))) == 4
    real = scan_session.scan_of
    monkeypatch.setattr(scan_session, "scan_of", elsewhere)
    with pytest.raises(DormouseError, match=r"^internal error: ") as refused:
        tuples(query(lake.context))
    assert f"table 't' leaves out the file {lost[0]!r}" in str(refused.value)


def test_a_plan_without_the_scans_of_which_no_row_can_match_is_accepted(lake: Lake) -> None:
    assert read(lake, [1, 2], 1) == [1]
    assert read(lake, [1, 2], 2) == [2]
    assert read(lake, [1, 2], 3) == []


def test_a_missing_file_is_named_as_missing(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, s3_store: ObjectStore
) -> None:
    """The process has checked the size of the file before, so only the plan shows that it is missing."""
    lake = filled(Lake(dsn, supplier, tmp_path, NUMBERS, objects=s3_store))
    assert len(tuples(query(lake.context))) == 4
    s3_store.delete([max(name for name, _ in s3_store.list("data"))])
    with pytest.raises(ObjectNotFound, match="which does not exist: it is lost"):
        tuples(query(lake.context))
