"""Commands that fail: their output names the remedy, and scripts can use the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from commits import add, drained, replacement
from data_files import add_file

import dormouse as dm
from dormouse.durability.maintaining import InstanceRound
from dormouse.errors import CommitOutcomeUnknown, InstanceIsACopy, InvalidData
from dormouse.objects.folder import FolderStore
from dormouse.state.files.holds import Hold
from tests.stored import remove

pytestmark = pytest.mark.usefixtures("table_t")

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(
    cli: Cli, instance: dm.Instance, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Cli:
    """Returns a function that runs a command line on the instance."""
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", (tmp_path / "objects").as_uri())
    return cli


def test_a_job_that_is_given_up_is_an_error_with_a_remedy(command: Cli, instance: dm.Instance) -> None:
    command("table", "set", "t", "compaction_batch_files=2", "size_ratio=1")
    table = instance.table("t").context
    bad = add_file(table, "bad", [1])
    add_file(table, "good", [2])
    table.objects.delete([bad])
    table.objects.put(bad, b"PAR1 this is no Parquet PAR1")
    code, out, err = command("compact", "t")
    assert (code, out) == (1, "no job succeeded\n")
    assert err.startswith("dormouse: given up: 1 job; the first: ") and bad in err
    assert err.endswith(". Files are not merged: fix the cause, then run: dormouse compact t\n")


def test_failed_deletes_are_an_error_and_not_reported_as_waiting(
    command: Cli, instance: dm.Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("table", "set", "t", "gc_delay_seconds=0")
    table = instance.table("t").context
    name = add_file(table, "a", [1])
    remove(table.store, name)
    with monkeypatch.context() as broken:
        broken.setattr(FolderStore, "delete", lambda _, names: [(name, OSError("no")) for name in names])
        code, out, err = command("gc", "t")
    assert (code, out) == (1, "deleted 0 files\n")
    assert err.startswith(f"dormouse: 2 objects could not be deleted, first {name}: no. ")
    assert err.endswith(". Unused files are not deleted: fix the cause, then run: dormouse gc t\n")
    assert command("gc", "t") == (0, "deleted 1 file\n", "")


def test_the_exit_code_shows_the_outcome_of_a_commit(command: Cli, instance: dm.Instance) -> None:
    instance.submit([add("t", "a", "one")])
    assert command("commit-status", "one") == (0, "pending\n", "")
    drained(instance, replacement("t", "j", ["none"], "x"), receives_max=1)
    assert command("commit-status", "one") == (0, "applied\n", "")
    assert command("commit-status", "never sent") == (1, "unknown\n", "")
    code, out, _ = command("commit-status", "replace j")
    assert code == 1 and out.startswith("rejected: ")


def test_the_help_explains_the_commit_id_of_an_ingest(command: Cli, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("key\n1\n")
    assert command("ingest", "t", str(tmp_path / "t.csv"), "--id", "first")[0] == 0
    assert command("commit-status", "ingest:first") == (0, "applied\n", "")
    assert "for an ingest it is ingest:ID" in " ".join(command("commit-status", "--help")[1].split())


def test_a_commit_with_a_later_rejected_request_is_still_reported_as_applied(
    command: Cli, instance: dm.Instance
) -> None:
    drained(instance, add("t", "a", "id"))
    drained(instance, add("t", "b", "id"))
    code, out, _ = command("commit-status", "id")
    assert code == 0
    assert out.startswith(
        "applied: a later request with this id was rejected: commit id 'id' is that of another"
    )


def test_a_repeated_ingest_is_reported(command: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("key\n1\n")
    assert command("ingest", "t", "a.csv", "--id", "x")[1].startswith("added 1 row in 1 file (")
    _, out, _ = command("ingest", "t", "a.csv", "--id", "x")
    assert out.startswith("nothing was added to t: the ingest with the id 'x' was committed before (")


@pytest.mark.few(2)
@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("error", [InvalidData("bad"), CommitOutcomeUnknown("cut")])
def test_a_failed_load_does_not_drop_a_table_with_rows_of_others(
    command: Cli, instance: dm.Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception,
    others: bool,
) -> None:  # fmt: skip
    path = tmp_path / "rows.csv"
    path.write_text("k\n1\n")

    def fails(table: dm.Table, *data: object, **how: object) -> None:
        if others:
            add_file(instance.table("new").context, "theirs", [7])
        raise error

    monkeypatch.setattr(dm.Table, "ingest", fails)
    assert command("ingest", "new", str(path), "--create", "--key", "k")[0] == 1
    stays = others or isinstance(error, CommitOutcomeUnknown)
    assert ["new"] * stays == [one.name for one in instance.tables() if one.name != "t"]


def test_the_json_status_shows_problems_of_the_instance(
    command: Cli, instance: dm.Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    failed = InstanceRound("check", now, now, "it is damaged", None)
    monkeypatch.setattr(dm.Instance, "rounds", lambda _: [failed])
    monkeypatch.setattr(dm.Instance, "holds", lambda _: [Hold("adoption 2", now, now)])
    monkeypatch.setattr(dm.Instance, "refusal", InstanceIsACopy("it is a copy"))
    for name in ("t", None):
        [shown] = json.loads(command("status", "--json")[1])
        assert (shown.get("name"), shown["refusal"]) == (name, "it is a copy")
        assert (shown["instance_rounds"][0]["error"], shown["holds"][0]["holder"]) == (
            "it is damaged",
            "adoption 2",
        )
        if name is not None:
            instance.drop_table(name)
    monkeypatch.setattr(dm.Instance, "refusal", None)
    assert command("status", "--json")[1] == "[]\n"


def test_explain_refuses_a_format_and_an_unknown_column(command: Cli) -> None:
    for command_line in (["query", "t"], ["sql", "select * from t"]):
        for more in (["-f", "csv"], ["-f", "csv", "-o", "rows.csv"]):
            code, out, err = command(*command_line, *more, "--explain")
            assert (code, out) == (2, "")
            assert "--explain reads no rows" in err
    code, out, err = command("query", "t", "--columns", "kee", "--explain")
    assert (code, out) == (2, "")
    assert "did you mean 'key'?" in err
    assert command("query", "t", "--columns", "key", "--explain")[0] == 0


def test_names_in_brackets_are_shown_unchanged(command: Cli, instance: dm.Instance) -> None:
    """The library that formats output would read the brackets as markup, or as faulty markup."""
    instance.table("t").add_column(dm.Field("[/x]", dm.LONG, nullable=True))
    instance.table("t").set_properties(bloom_filter_columns="[/x]")
    code, out, err = command("table", "describe", "t")
    assert (code, err) == (0, "")
    assert "bloom_filter_columns=[/x]\n" in out and "version 2 of its columns" in out
    instance.create_row_table("r", [dm.Column("n", "INTEGER")]).snapshot("v[1] [/]")
    code, out, err = command("rows", "show", "r")
    assert (code, err, "snapshots v[1] [/] (0)" in " ".join(out.split())) == (0, "", True)


def test_the_help_lists_all_properties(cli: Cli) -> None:
    assert "table set --help" in " ".join(cli("table", "create", "--help")[1].split())
    listed = " ".join(cli("table", "set", "--help")[1].split())
    assert "gc_batch_files=10000: files deleted in one transaction (a whole number from 1 to" in listed
    for name in dm.TableProperties.model_fields:
        assert f" {name}=" in listed


def test_the_reason_of_a_dead_letter_is_shown_in_full(command: Cli, instance: dm.Instance) -> None:
    drained(instance, replacement("t", "j", ["none"], "x" * 200), receives_max=1)
    [letter] = instance.commits.dead_letters(1)
    out = command("queue")[1]
    assert len(letter.reason) > 100 and letter.reason in out and letter.body in out


@pytest.mark.parametrize("given", [["1=", "3="], ["2=a"], ["1=a", "name=b"]])
def test_a_missing_parameter_is_named(command: Cli, given: list[str]) -> None:
    options = [part for item in given for part in ("--param", item)]
    missing = 1 if given == ["2=a"] else 2
    code, _, err = command("sql", "select 1", *options)
    assert (code, err.partition(": number them")[0]) == (2, f"dormouse: parameter ${missing} is not given")


@pytest.mark.slow
def test_small_leaves_are_listed_and_merged_if_the_table_has_a_threshold(
    command: Cli, instance: dm.Instance
) -> None:
    table = instance.table("t")
    table.partitions.split("root", 5)
    code, out, err = command("merge", "t")
    assert (code, out) == (2, "")
    assert "dormouse table set t merge_threshold_rows=" in err and err.count("\n") == 1
    command("table", "set", "t", "merge_threshold_rows=1000")
    assert ": 0 rows\n" in command("merge", "t", "--dry-run")[1]
    assert '"would_merge"' in command("merge", "t", "--dry-run", "--json")[1]
    assert command("merge", "t") == (0, "merged 1 pair of leaves\n", "")
    assert command("merge", "t", "--dry-run")[1] == "nothing would be merged\n"
    assert table.partitions.tree().leaf_count == 1
