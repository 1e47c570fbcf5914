"""Running numbers, which stay unique even if a load that assigns some freezes at any point."""

from __future__ import annotations

from pathlib import Path

import pytest

import dormouse as dm
from tests.frozen import Frozen

LOAD = """
from dormouse.api.tables import Tables
instance = dm.connect(sys.argv[1], sys.argv[2])
next_number = Tables.next_number

def frozen_number(self, *given):
    number = next_number(self, *given)
    if sys.argv[4] == "before":
        freeze("give numbers")
    return number

Tables.next_number = frozen_number
if sys.argv[4] == "before":
    transaction._commit = commit
try:
    instance.table("t").ingest(dm.Files(sys.argv[3], row_number="n"), ingest_id="first")
except dm.CommitFailed as error:
    print(f"said: {error}", flush=True)
instance.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "within"])
def test_a_load_that_froze_assigns_no_number_twice(
    instance: dm.Instance, dsn: str, tmp_path: Path, where: str
) -> None:
    table = instance.create_table("t", like={"n": [1], "v": [1]}, row_keys=["n"])
    path = tmp_path / "x.csv"
    path.write_text("v\n1\n2\n")
    frozen = Frozen(LOAD, dsn, instance.objects.url, str(path), where)
    stops = []
    for stop in frozen.stops():
        stops.append(stop)
        if stop in ("give numbers", "ingest"):
            table.ingest(dm.Files(str(path), row_number="n"), ingest_id="second")
    assert stops.count("give numbers") + stops.count("ingest") == 1
    (said,) = frozen.said
    assert "this process was frozen, while rows got running numbers" in said
    assert table.query(columns=["n"]).read_all()["n"].to_pylist() == [0, 1]
