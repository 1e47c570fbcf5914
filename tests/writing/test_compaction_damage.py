"""Damaged inputs, which a compaction never commits because it compares each with its digest first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from data_files import SKETCHES, objects_of
from data_files import rows_of as rows

from dormouse.errors import ObjectDamaged
from dormouse.objects.fault import digest_of_object
from dormouse.writing import compaction_job
from tests.stored import query
from tests.support.state import TableContext
from tests.support.writing import compact, merge_sorted, run_compaction
from tests.support.writing import ingest_in_process as ingest

pytestmark = pytest.mark.objects

NewTable = Callable[..., TableContext]
PAIRS: dict[str, Any] = {
    "compaction_strategy": "basic", "compaction_batch_files": 2, "compaction_attempts_max": 2,
    "gc_delay_seconds": 0,
}  # fmt: skip


def ingested(new_table: NewTable, **options: Any) -> TableContext:
    """Returns a table with two files in each leaf, all with equally many rows."""
    table = new_table(**PAIRS, **options)
    for first in (0, 1):
        ingest(table, rows(table, range(first, 4_000, 2)))
    return table


def path_of(table: TableContext, name: str) -> Path:
    path = table.objects.local_path(name)
    assert path is not None
    path.chmod(0o600)
    return path


def names(table: TableContext) -> list[str]:
    return sorted(file.filename for file in table.store.all_files(99).files)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)


def in_data(path: Path) -> int:
    column = pq.read_metadata(path).row_group(0).column(0)
    return int(column.data_page_offset + column.total_compressed_size // 2)


def in_page_index(path: Path) -> int:
    """Returns an offset between the last column's data and the footer."""
    footer = int.from_bytes(path.read_bytes()[-8:-4], "little")
    return path.stat().st_size - 8 - footer - 3


def in_footer(path: Path) -> int:
    """Returns an offset in the name of the file's writer, where damage changes no answer."""
    return path.read_bytes().rindex(b"parquet-cpp-arrow")


def test_the_recorded_size_and_digest_are_those_of_the_file(new_table: NewTable) -> None:
    table = ingested(new_table)
    for _ in range(2):
        for file in table.store.all_files(0).files:
            assert (file.byte_count, file.digest) == digest_of_object(table.objects, file.filename)
        compact(table)


@pytest.mark.few(1)
@pytest.mark.parametrize("place", [in_data, in_page_index, in_footer])
def test_a_flipped_bit_fails_the_job_and_the_damaged_file_is_kept(
    new_table: NewTable, place: Callable[[Path], int]
) -> None:
    table = ingested(new_table)
    before = names(table)
    flip(path_of(table, before[0]), place(path_of(table, before[0])))
    report = compact(table)
    assert (report.jobs_run, report.given_up, report.files_out) == (0, 1, 0)
    [error] = report.errors
    for word in (f"file {before[0]!r}", f"table {table.table.name!r}", "partition 'root'", "backup"):
        assert word in error
    assert names(table) == before
    assert table.garbage.collect().deleted_files == ()
    assert {name.removesuffix(SKETCHES) for name in objects_of(table)} == set(before)


def test_files_swapped_between_leaves_are_noticed(new_table: NewTable) -> None:
    """The swapped files have equal row counts and no recorded size, so only their digests differ."""
    table = ingested(new_table, split_points=[2_000])
    query(table.supplier, "update file set byte_count = null")
    one, other = (path_of(table, found[0]) for found in table.store.partition_to_filenames().values())
    aside = one.rename(one.with_name("aside"))
    other.rename(one)
    aside.rename(other)
    report = compact(table)
    assert (report.jobs_run, report.given_up) == (0, 2)
    assert all("does not have the bytes that were written: its digest is" in error for error in report.errors)


def test_files_without_a_digest_are_compacted_into_one_that_has_it(new_table: NewTable) -> None:
    table = ingested(new_table)
    query(table.supplier, "update file set digest = null")
    report = compact(table)
    assert (report.jobs_run, report.files_in) == (1, 2)
    [file] = [file for file in table.store.all_files(0).files if file.references]
    assert (file.byte_count, file.digest) == digest_of_object(table.objects, file.filename)


class RemoteStore:
    """A store whose URL looks like that of a store on another machine."""

    url = "s3://bucket"

    def __init__(self, table: TableContext) -> None:
        self._store = table.objects
        self.fetched: list[str] = []

    def reader(self, name: str) -> Any:
        self.fetched.append(name)
        return self._store.reader(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_remote_inputs_are_fetched_once(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Inputs are copied and verified, and the copies are merged. A damaged input is not merged."""
    table = ingested(new_table)
    expected = table.store.totals.read().row_count
    table.jobs.create()
    [job] = table.jobs.take(1)
    remote = RemoteStore(table)
    inputs = compaction_job.JobInputs(remote, "t", job, lambda: None)  # type: ignore[arg-type]
    with inputs.verified(tmp_path) as places:
        assert sorted(remote.fetched) == names(table)
        assert all(Path(place).is_relative_to(tmp_path) for place in places)
        merged = merge_sorted(places, table.schema, tmp_path / "merged.parquet", now_ms=0)
    assert merged.row_count == expected
    assert sorted(remote.fetched) == names(table)
    [damaged, _] = names(table)
    flip(path_of(table, damaged), in_data(path_of(table, damaged)))
    with pytest.raises(ObjectDamaged, match=damaged), inputs.verified(tmp_path):
        pytest.fail("the damaged input is merged")


@pytest.mark.parametrize("limit", ["COPIED_BYTES_MAX", "COPIED_SHARE"])
def test_remote_inputs_too_large_to_copy_are_verified_during_the_merge(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str
) -> None:
    """The error of a merge that fails because of the damage names the damage, too."""
    monkeypatch.setattr(compaction_job, limit, {"COPIED_BYTES_MAX": 1, "COPIED_SHARE": 2**60}[limit])
    table = ingested(new_table)
    [damaged, _] = names(table)
    flip(path_of(table, damaged), in_data(path_of(table, damaged)))
    table.jobs.create()
    [job] = table.jobs.take(1)
    inputs = compaction_job.JobInputs(RemoteStore(table), "t", job, lambda: None)  # type: ignore[arg-type]
    for failure in (None, ValueError("the merge failed")):
        with pytest.raises(ObjectDamaged, match=damaged), inputs.verified(tmp_path) as places:
            assert places == [table.objects.uri(item.filename) for item in job.inputs]
            if failure:
                raise failure
    assert run_compaction(table, job, 0).outcome == "retry"
