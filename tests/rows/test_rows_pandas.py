"""Rows that go through pandas, Polars and Arrow, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import CommitIdReused, InvalidData, InvalidQuery, InvalidRow
from tests.support.api import Instance
from tests.support.rows import RowTable

FRAME = pd.DataFrame({"name": ["a", "b"], "n": [5.0, None]})


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    columns = [dm.Column("name", "STRING"), dm.Column("n", "INTEGER"), dm.Column("b", "BOOLEAN")]
    return instance.create_row_table("people", columns)


def test_a_download_that_pandas_wrote_again_changes_nothing(rows: RowTable, tmp_path: Path) -> None:
    rows.change([dm.Insert([{"name": "a", "n": 5, "b": True}, {"name": "b"}])])
    path, again = tmp_path / "rows.csv", tmp_path / "again.csv"
    rows.download_csv(path)
    pd.read_csv(path).to_csv(again, index=False)
    assert "5.0" in again.read_text()
    assert rows.upload_csv(again).changed["unchanged"] == 2
    more = pd.concat([pd.read_csv(path), pd.DataFrame({"name": ["new"], "n": [7]})])
    more.to_csv(again, index=False)
    assert "1.0,1.0" in again.read_text()
    done = rows.upload_csv(again).changed
    assert (done["unchanged"], done["inserted"]) == (2, 1)
    assert rows.row(3)["n"] == 7


def test_ids_that_pandas_wrote_are_accepted(rows: RowTable) -> None:
    rows.change([dm.Insert([{"name": "a", "n": 1}])])
    rows.change([dm.Patch(pd.DataFrame({"ROW_ID": [1.0], "ROW_VERSION": [1.0], "n": [2.0]}))])
    rows.change([dm.Update([{"ROW_ID": 1.0, "ROW_VERSION": 2.0, "n": 3.0}])])
    assert rows.row(1)["n"] == 3
    for wrong in (1.5, 0.0, -1.0, float("inf"), True, "1"):
        with pytest.raises(InvalidRow, match="is not the id of a row"):
            rows.change([dm.Update([{"ROW_ID": wrong, "ROW_VERSION": 3, "n": 4}])])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "data",
    [
        FRAME,
        FRAME.to_dict("records"),
        pl.DataFrame({"name": ["a", "b"], "n": [5, None]}),
        pa.table({"name": ["a", "b"], "n": [5, None]}),
        pa.RecordBatch.from_pydict({"name": ["a", "b"], "n": [5.0, None]}),
    ],
)
def test_frames_and_tables_are_inserted_and_upserted(rows: RowTable, data: Any) -> None:
    done = rows.change([dm.Insert(data)], change_id="one")
    assert list(done.row_ids) == [1, 2]
    assert [(rows.row(n)["name"], rows.row(n)["n"]) for n in (1, 2)] == [("a", 5), ("b", None)]
    assert rows.change([dm.Insert(data)], change_id="one") == done
    with pytest.raises(CommitIdReused):
        rows.change([dm.Insert(pd.DataFrame({"name": ["c"]}))], change_id="one")
    assert rows.upsert(data, on=["name"]).changed["unchanged"] == 2


def test_objects_without_rows_are_refused_with_an_alternative(rows: RowTable) -> None:
    for wrong in (5, "name", {"name": ["a"]}):
        with pytest.raises(InvalidRow, match="takes a list of rows, a DataFrame or a table of Arrow, not"):
            rows.change([dm.Insert(wrong)])
    with pytest.raises(InvalidData, match="column 'n' has values of several types"):
        rows.change([dm.Insert(pd.DataFrame({"n": [1, "a"]}))])


def test_ids_that_are_selected_are_shown_once(rows: RowTable, tmp_path: Path) -> None:
    rows.change([dm.Insert(FRAME)])
    path = tmp_path / "rows.csv"
    rows.download_csv(path, "select name, row_id, ROW_VERSION, n from people")
    assert path.read_text().splitlines()[0] == '"ROW_ID","ROW_VERSION","name","n"'
    assert rows.upload_csv(path).changed["unchanged"] == 2
    page = rows.query("select ROW_ID, name from people")
    assert (page.rows, page.beside_keys()) == ([(1, "a"), (2, "b")], [1])
    with pytest.raises(InvalidQuery, match="calls another value ROW_ID: give it another name"):
        rows.query("select n as ROW_ID, name from people")
    assert rows.query("select max(ROW_ID) as row_id from people").rows == [(2,)]
