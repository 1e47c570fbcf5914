"""Change ids of row tables: one change for each id of a table, through every interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import dormouse as dm
from dormouse.client import Client, connect
from dormouse.client.rows import RemoteRowTable, result_of
from dormouse.errors import CommitIdReused, InvalidInput
from dormouse.rows.changes import Changed
from tests.serving import serving
from tests.support.api import Instance

AT = datetime(2024, 1, 1, tzinfo=UTC)


@pytest.fixture
def client(instance: Instance) -> Iterator[Client]:
    with serving(instance, job_threads=2, shutdown_seconds_max=10) as url, connect(url) as found:
        yield found


@pytest.fixture
def rows(client: Client) -> RemoteRowTable:
    return client.create_row_table("samples", [dm.Column("name", "STRING"), dm.Column("d", "DATE")])


def made_by(door: str, client: Client, instance: Instance, path: Path) -> dict[str, Callable[..., Changed]]:
    """Returns the functions of an interface that change a row table.

    Each takes the table's name, a value and a change id.
    """

    def inserts(text: str) -> list[dm.Insert]:
        return [dm.Insert([{"name": text, "d": AT}])]

    table = {"client": client.row_table, "library": instance.row_table}[door]

    def upload(name: str, text: str, change_id: str) -> Changed:
        path.write_text(f"name\n{text}\n", "utf-8")
        return table(name).upload_csv(path, change_id=change_id)

    return {
        "change": lambda name, text, one: table(name).change(
            [dm.Insert([{"name": text, "d": AT}])], change_id=one
        ),
        "upsert": lambda name, text, one: table(name).upsert([{"name": text}], on=["name"], change_id=one),
        "upload": upload,
    }


@pytest.mark.slow
@pytest.mark.parametrize("call", ["change", "upsert", "upload"])
@pytest.mark.parametrize("doors", [("client", "library"), ("library", "client"), ("client", "client")])
def test_a_change_id_is_the_same_in_a_client_and_the_library(
    rows: RemoteRowTable,
    client: Client,
    instance: Instance,
    tmp_path: Path,
    call: str,
    doors: tuple[str, str],
) -> None:
    client.create_row_table("others", rows.columns())
    first, second = (made_by(door, client, instance, tmp_path / "rows.csv")[call] for door in doors)
    done = first("samples", "a", "one")
    assert second("samples", "a", "one") == done
    with pytest.raises(CommitIdReused, match="for another change of table 'samples'"):
        second("samples", "b", "one")
    assert second("others", "b", "one").changed["inserted"] == 1  # an id belongs to one table
    assert (len(rows), len(client.row_table("others"))) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["client", "library"])
def test_a_job_names_its_change_and_finds_the_change_of_an_earlier_release(
    client: Client, instance: Instance, rows: RemoteRowTable, door: str
) -> None:
    asked = {"table": "samples", "changes": [{"insert": [{"name": "a"}]}]}
    result_of(client.jobs, client.jobs.start("row_change", asked, job_id="mine"))
    insert = [dm.Insert([{"name": "a"}])]
    table = client.row_table("samples") if door == "client" else instance.row_table("samples")
    assert list(table.change(insert, change_id="mine").row_ids) == [1]
    instance.row_table("samples").change(insert, change_id="job:older")
    result_of(client.jobs, client.jobs.start("row_change", asked, job_id="older"))
    assert list(table.change(insert, change_id="older").row_ids) == [2]
    assert len(rows) == 2


def test_an_id_that_is_too_long_is_refused_when_it_is_sent(client: Client, rows: RemoteRowTable) -> None:
    asked = {"table": "samples", "changes": [{"insert": [{"name": "a"}]}], "change_id": "x" * 205}
    with pytest.raises(InvalidInput, match="204 bytes"):
        client.jobs.start("row_change", asked)
