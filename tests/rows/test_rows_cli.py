"""`dormouse rows`: each command, as text and as JSON. Errors have one line and leave no partial change."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.cli import main
from dormouse.errors import InvalidData
from tests.support.rows import RowTable

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        opens = arguments[:1] != ("preview",)
        where = ["--dsn", dsn, "--objects", (tmp_path / "objects").as_uri()] if opens else []
        monkeypatch.setattr("sys.argv", ["dormouse", "rows", *arguments, *where])
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capfdbinary.readouterr()
        code = main()
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return call


def output_of(run: Run, *arguments: str, stdin: str = "") -> Any:
    code, out, err = run(*arguments, "--json", stdin=stdin)
    assert (code, err) == (0, "")
    return json.loads(out)


def failed(run: Run, *arguments: str, stdin: str = "") -> tuple[int, str]:
    code, out, err = run(*arguments, stdin=stdin)
    assert out == ""
    assert err.count("\n") == 1
    return code, err.removeprefix("dormouse: ").rstrip("\n")


def make(run: Run) -> None:
    columns = ["name:STRING(9)", "n:INTEGER=3", "data:JSON=[1, 2]"]
    output_of(run, "create", "t", *(part for column in columns for part in ("--column", column)))


def test_a_table_is_made_of_columns(run: Run) -> None:
    make(run)
    assert output_of(run, "show", "t")["columns"] == [
        {"column_id": 4, "name": "name", "type": "STRING", "size_max": 9},
        {"column_id": 5, "name": "n", "type": "INTEGER", "default": 3},
        {"column_id": 6, "name": "data", "type": "JSON", "default": [1, 2]},
    ]
    assert [one["table"] for one in output_of(run, "show")] == ["t"]
    assert "name" in run("show", "t")[1]


def test_a_table_is_made_of_a_list_or_like_a_file(run: Run, tmp_path: Path) -> None:
    Path("columns.json").write_text('[{"name": "a", "type": "STRING", "enum": ["x"]}]')
    assert output_of(run, "create", "t", "--schema", "columns.json")["columns"][0]["enum"] == ["x"]
    Path("rows.csv").write_text("a;b\n1;NA\n2;2024-01-31\n")
    made = output_of(run, "create", "u", "--like", "rows.csv", "--separator", ";", "--null", "NA")
    assert [one["type"] for one in made["columns"]] == ["INTEGER", "DATE"]
    output_of(run, "upload", "u", "rows.csv", "--separator", ";", "--null", "NA")
    assert run("download", "u", "-", "--no-header")[1] == '1,1,1,\n2,1,2,"2024-01-31T00:00:00.000Z"\n'


def test_an_edited_download_is_uploaded(run: Run) -> None:
    Path("rows.csv").write_text("the name,n\na,1\nb,NA\n")
    assert run("upload", "t", "rows.csv", "--create", "--null", "NA")[1:] == (
        "changed t: 2 inserted; version 1\n",
        "",
    )
    assert output_of(run, "download", "t", "out.csv") == {"file": "out.csv", "rows": 2}
    assert Path("out.csv").read_text() == '"ROW_ID","ROW_VERSION","the_name","n"\n1,1,"a",1\n2,1,"b",\n'
    Path("out.csv").write_text("ROW_ID,ROW_VERSION,n\n2,1,5\n")
    assert "would change t: 1 updated" in run("upload", "t", "out.csv", "--dry-run")[1]
    assert output_of(run, "upload", "t", "out.csv", "--id", "once")["versions"] == [2]
    assert output_of(run, "upload", "t", "out.csv", "--id", "once")["versions"] == [2]
    assert failed(run, "upload", "t", "out.csv") == (
        1,
        "table 't': rows were changed after you read them: row 2 (sent 1, now 2); nothing was changed: "
        "read them "
        "again, and send the change with their new versions",
    )
    assert run("download", "t", "-", "--separator", "tab", "--no-header")[1] == '1\t1\t"a"\t1\n2\t2\t"b"\t5\n'
    assert run("download", "t", "-", "--sql", "select n from t where n > 2")[1].endswith("\n2,2,5\n")
    assert run("upload", "t", "-", "--columns", "n", "--no-header", stdin="7\n8\n")[0] == 0
    assert [one["inserted"] for one in output_of(run, "history", "t")] == [2, 0, 2]
    assert "version 2" in run("history", "t")[1]


def test_a_table_whose_file_is_refused_is_not_made(run: Run) -> None:
    Path("rows.csv").write_text("ROW_ID,ROW_VERSION,n\n1,1,5\n")
    code, said = failed(run, "upload", "t", "rows.csv", "--create")
    assert (code, "no row" in said or "unknown" in said) == (1, True)
    assert output_of(run, "show") == []


@pytest.mark.parametrize("theirs", [dm.Insert([{"n": 7}]), dm.AddColumn(dm.Column("m", "INTEGER"))])
def test_a_failed_upload_undoes_no_change_of_another_process(
    run: Run, monkeypatch: pytest.MonkeyPatch, theirs: Any
) -> None:
    Path("rows.csv").write_text("n\n1\n")

    def fails(table: RowTable, *data: object, **how: object) -> None:
        table.change([theirs])
        raise InvalidData("bad")

    monkeypatch.setattr(RowTable, "upload_csv", fails)
    assert failed(run, "upload", "t", "rows.csv", "--create") == (1, "bad")
    assert [(one["table"], one["version"]) for one in output_of(run, "show")] == [("t", 1)]


@pytest.mark.slow
def test_pages_of_a_query(run: Run) -> None:
    make(run)
    rows = [{"name": f"r{n}", "n": n} for n in range(5)]
    output_of(run, "change", "t", "-", stdin=json.dumps([{"insert": rows}]))
    page = output_of(run, "query", "t", "select name from t order by n desc", "--page-rows", "2")
    assert (page["rows"], page["count"]) == ([["r4"], ["r3"]], 5)
    following = output_of(run, "query", "t", "--page", page["next_page"])
    assert following["rows"] == [["r2"], ["r1"]]
    assert "r4" in run("query", "t", "select * from t order by n desc")[1]
    token = page["next_page"]
    code, said = failed(run, "query", "t", "--page", ("y" if token[0] == "x" else "x") + token[1:])
    assert (code, "token" in said) == (1, True)
    assert failed(run, "query", "t", "delete from t")[0] == 2
    text = "select name from t where n >= $least and name <> $1"
    assert failed(run, "query", "t", text, "--param", "least=3", "--param", "1=r4")[0] == 2
    text = text.replace("$1", "$other")
    page = output_of(run, "query", "t", text, "--param", "least=3", "--param", "other=r4")
    assert page["rows"] == [["r3"]]


def test_times_are_text_for_people_and_numbers_in_json(run: Run) -> None:
    output_of(run, "create", "t", "--column", "d:DATE")
    moments = [1_388_350_800_000, -1, 2**62, None]
    output_of(run, "change", "t", "-", stdin=json.dumps([{"insert": [{"d": one} for one in moments]}]))
    query = ("query", "t", "select d, max(d) as m from t group by d order by d")
    assert [row[0] for row in output_of(run, *query)["rows"]] == [-1, 1_388_350_800_000, 2**62, None]
    shown = run(*query)[1]
    for one in ("1969-12-31T23:59:59.999Z", "2013-12-29T21:00:00.000Z", str(2**62)):
        assert shown.count(one) == 2


def test_the_command_line_makes_changes_of_all_kinds(run: Run) -> None:
    make(run)
    Path("more.csv").write_text("name\nz\n")
    changes = [
        {"insert": [{"name": "a"}, {"name": "b"}]},
        {"add_column": {"name": "c", "type": "DOUBLE"}},
        {"rename_column": {"name": "c", "new_name": "d"}},
        {"retype_column": {"name": "d", "type": "STRING", "size_max": 5}},
        {"drop_column": "data"},
        {"load_csv": {"path": "more.csv"}},
    ]
    Path("changes.json").write_text(json.dumps(changes))
    assert output_of(run, "change", "t", "changes.json", "--dry-run")["changed"]["inserted"] == 3
    assert output_of(run, "show", "t")["version"] == 0
    assert output_of(run, "change", "t", "changes.json")["changed"]["inserted"] == 3
    assert [one["name"] for one in output_of(run, "show", "t")["columns"]] == ["name", "n", "d"]
    newest = output_of(run, "query", "t", "select name from t order by name")["row_versions"]
    edits = [
        {"update": [{"ROW_ID": 1, "ROW_VERSION": newest[0], "name": "A"}]},
        {"patch": [{"ROW_ID": 2, "ROW_VERSION": newest[1], "n": 9}]},
        {"remove": [[3, newest[2]]]},
    ]
    done = output_of(run, "change", "t", "-", stdin=json.dumps(edits))["changed"]
    assert (done["updated"], done["deleted"]) == (2, 1)


def test_upserts(run: Run) -> None:
    make(run)
    output_of(run, "upsert", "t", "-", "--on", "name", stdin='[{"name": "a", "n": 1}]')
    done = output_of(run, "upsert", "t", "-", "--on", "name", stdin='[{"name": "a", "n": 2}, {"name": "b"}]')
    assert (done["changed"]["inserted"], done["changed"]["updated"]) == (1, 1)


@pytest.mark.slow
def test_snapshots(run: Run) -> None:
    make(run)
    output_of(run, "change", "t", "-", stdin='[{"insert": [{"name": "a"}]}]')
    assert run("snapshot", "t", "v1")[1] == "snapshot v1 is version 1 of table t\n"
    output_of(run, "change", "t", "-", stdin='[{"remove": [[1, 1]]}]')
    assert output_of(run, "query", "t", "select name from t", "--snapshot", "v1")["rows"] == [["a"]]
    assert [one["name"] for one in output_of(run, "snapshot", "t")] == ["v1"]
    assert run("snapshot", "t", "v1", "--drop")[0] == 0
    assert failed(run, "snapshot", "t", "v1", "--drop")[1].startswith("table 't' has no snapshot 'v1'")


def test_a_preview_shows_columns_rows_and_faults_of_a_file(run: Run) -> None:
    Path("rows.tsv").write_text("a\tb\n1\tx\n2\ty\n")
    found = output_of(run, "preview", "rows.tsv", "--rows", "1")
    assert (found["rows"], found["row_count"]) == ([["1", "x"]], 2)
    assert [one["type"] for one in found["columns"]] == ["INTEGER", "STRING"]
    Path("rows.csv").write_text("ROW_ID,ROW_VERSION,n\n1,1,5\n")
    assert run("preview", "rows.csv")[1].endswith("1 row in all\nits rows have ids: an upload updates them\n")
    assert "2 rows in all" in run("preview", "-", "--separator", "tab", stdin="a\tb\n1\tx\n2\ty\n")[1]
    wide = ",".join(f"c{n}" for n in range(150)) + "\n" + ",".join(str(1000 + n) for n in range(150)) + "\n"
    shown = run("preview", "-", stdin=wide)[1]
    assert all(f"c{n} " in shown and str(1000 + n) in shown for n in range(150))
    assert shown.endswith("\n1 row in all\n")
    shown = run(
        "preview", "-", "--rows", "4", stdin=wide + "1," * 149 + "1\n" + wide[wide.index("\n") + 1 :] * 8
    )[1]
    assert shown.endswith(
        "\n10 rows in all\n3 of 4 rows are shown, as there are 150 columns; --json has all 4\n"
    )


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["create", "u"], 2, "give the columns by --column, by --schema FILE or by --like FILE"),
        (
            ["create", "u", "--column", "n"],
            2,
            "--column 'n': write NAME:TYPE, like name:STRING(50) or n:INTEGER=0",
        ),
        (
            ["create", "u", "--column", "n:INTEGER=x"],
            1,
            "the default, column 'n' (INTEGER): 'x' is not a whole number",
        ),
        (["upload", "t", "none.csv"], 1, "file 'none.csv' cannot be read: No such file or directory"),
        (
            ["upload", "t", "bad.csv"],
            1,
            "file 'bad.csv', line 3: it has 3 cells, not 2 as the others: '2,b,c'",
        ),
        (
            ["upload", "t", "nme.csv"],
            1,
            "file 'nme.csv' has column 'nme', which the table does not have; did you mean 'name'?",
        ),
        (["upload", "none", "nme.csv"], 1, "table 'none' does not exist"),
        (
            ["upload", "t", "nme.csv", "--separator", "::"],
            2,
            "separator must be one ASCII character, not '::'",
        ),
        (["change", "t", "bad.csv"], 2, "bad.csv is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (["change", "t", "none.json"], 2, "cannot read none.json: No such file or directory"),
        (["download", "t", "none/x.csv"], 2, "cannot write 'none/x.csv': No such file or directory"),
        (
            ["download", "t", "x.csv", "--version", "1", "--snapshot", "v"],
            2,
            "give a version, or the name of a snapshot",
        ),
        (["history", "none"], 1, "table 'none' does not exist"),
        *(
            (
                ["query", "t", option, "-1"],
                2,
                f"Invalid value for '{option}': Input should be greater than or equal to 0 "
                "(see dormouse rows query --help)",
            )
            for option in ("--version", "--wait-seconds")
        ),
    ],
)
def test_errors_have_one_line(run: Run, arguments: list[str], code: int, said: str) -> None:
    make(run)
    Path("bad.csv").write_text("n,name\n1,a\n2,b,c\n3,d\n")
    Path("nme.csv").write_text("nme\na\n")
    assert failed(run, *arguments) == (code, said)
    assert output_of(run, "show", "t")["version"] == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, 'changes are a list, like [{"insert": [{"name": "a"}]}]'),
        ([], 'changes are a list, like [{"insert": [{"name": "a"}]}]'),
        (
            [{"insert": [{}]}, {"merge": 1}],
            "change 2: 'merge' is none of insert, update, patch, remove, add_column, rename_column, "
            "retype_column, load_csv, drop_column",
        ),
        ([{"insert": {}}], "change 1: insert has a list of rows"),
        ([{"drop_column": 1}], "change 1: drop_column has the name of a column"),
        (
            [{"rename_column": {"name": "a"}}],
            "change 1: rename_column is an object with name, new_name, and may have nothing else",
        ),
    ],
)
def test_changes_that_cannot_be_read(run: Run, changes: Any, said: str) -> None:
    make(run)
    assert failed(run, "change", "t", "-", stdin=json.dumps(changes)) == (2, said)


def test_a_row_is_shown_by_its_id_and_version(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name\nann\n")
    assert run("upload", "staff", "a.csv", "--create")[0] == 0
    (tmp_path / "b.csv").write_text("ROW_ID,ROW_VERSION,name\n1,1,eve\n")
    assert run("upload", "staff", "b.csv")[0] == 0
    assert output_of(run, "get", "staff", "1") == {"ROW_ID": 1, "ROW_VERSION": 2, "name": "eve"}
    assert output_of(run, "get", "staff", "1", "--version", "1")["name"] == "ann"
    assert "eve" in run("get", "staff", "1")[1]
    assert failed(run, "get", "staff", "7") == (1, "table 'staff' has no row of ROW_ID 7")
