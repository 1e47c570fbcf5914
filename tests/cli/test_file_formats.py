"""Output files of tables and row tables: the file's name chooses the format and compression."""

from __future__ import annotations

import bz2
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import dormouse as dm
from dormouse.cli import main
from dormouse.errors import InvalidInput
from tests.standard import OF_K_AND_TEXTS

Run = Callable[..., tuple[int, str, str]]
AS_IT_IS: Callable[[bytes], bytes] = bytes


@pytest.fixture
def run(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Run:
    """Returns a function that runs a command on an instance with a table and a row table of two rows each."""
    monkeypatch.chdir(tmp_path)
    objects = (tmp_path / "objects").as_uri()
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("t", OF_K_AND_TEXTS)
        table.ingest(pa.table({"k": [1, 2], "v": ["a", "b"]}))
        rows = instance.create_row_table("r", [dm.Column("v", "STRING")])
        rows.change([dm.Insert([{"v": "a"}, {"v": "b"}])])

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["dormouse", *arguments, "--dsn", dsn, "--objects", objects])
        capfdbinary.readouterr()
        code = main()
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return call


TEXTS = {
    "csv": '"k","v"\n1,"a"\n2,"b"\n',
    "tsv": '"k"\t"v"\n1\t"a"\n2\t"b"\n',
    "json": '[{"k":1,"v":"a"},\n{"k":2,"v":"b"}]\n',
    "jsonl": '{"k":1,"v":"a"}\n{"k":2,"v":"b"}\n',
}
UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "": AS_IT_IS,
    ".gz": gzip.decompress,
    ".zst": lambda data: zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read(),
    ".bz2": bz2.decompress,
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("form", "packed"), [*((form, ".gz") for form in TEXTS), ("tsv", ""), ("csv", ".zst"), ("csv", ".BZ2")]
)
@pytest.mark.parametrize("command", [["query", "t"], ["sql", "select k, v from t order by k"]])
def test_the_name_of_an_output_chooses_its_format(
    run: Run, command: list[str], form: str, packed: str
) -> None:
    name = f"x.{form}{packed}"
    assert run(*command, "-o", name) == (0, f"wrote 2 rows to {name}\n", "")
    assert UNPACK[packed.lower()](Path(name).read_bytes()).decode() == TEXTS[form]


def lines_of(name: str) -> list[Any]:
    """Returns the objects in a compressed file of JSON lines."""
    return [json.loads(line) for line in gzip.decompress(Path(name).read_bytes()).splitlines()]


def test_the_name_of_a_file_of_changes_chooses_its_format(run: Run) -> None:
    assert run("changes", "t", "--after", "beginning", "-o", "x.jsonl.gz")[0] == 0
    assert [
        json.loads(line)["k"] for line in gzip.decompress(Path("x.jsonl.gz").read_bytes()).splitlines()
    ] == [1, 2]
    assert run("changes", "t", "--after", "beginning", "-o", "x.tsv")[0] == 0
    assert Path("x.tsv").read_text().count("\t") == 6


@pytest.mark.slow
def test_a_written_file_can_be_ingested(run: Run) -> None:
    for name in ("x.csv.gz", "x.tsv", "x.jsonl.gz"):
        assert run("query", "t", "-o", name)[0] == 0
        assert run("ingest", "t", name)[0] == 0
    assert json.loads(run("sql", "select count(*) n from t", "--json")[1]) == [
        {"n": 16}
    ]  # each ingest doubled the rows


def test_a_compressed_name_of_a_compressing_format_is_refused(run: Run) -> None:
    code, out, err = run("query", "t", "-o", "x.parquet.gz")
    assert (code != 0, out, err) == (
        True,
        "",
        "dormouse: parquet is not written as .gz: call the file 'x.parquet'\n",
    )
    code, _, err = run("query", "t", "-o", "x.gz")
    assert code and "does not give a format" in err
    assert not list(Path().glob("x*"))


DOWNLOADED = [{"ROW_ID": 1, "ROW_VERSION": 1, "v": "a"}, {"ROW_ID": 2, "ROW_VERSION": 1, "v": "b"}]


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [[], ["--sql", "select v from r order by ROW_ID"]])
def test_the_name_of_a_download_chooses_its_format(run: Run, more: list[str]) -> None:
    for name in ("x.parquet", "x.json", "x.jsonl.gz", "x.csv.gz", "x.tsv.gz"):
        assert run("rows", "download", "r", name, *more) == (0, f"wrote 2 rows to {name}\n", "")
    assert pq.read_table("x.parquet").to_pylist() == DOWNLOADED
    assert json.loads(Path("x.json").read_text()) == DOWNLOADED
    assert [
        json.loads(line) for line in gzip.decompress(Path("x.jsonl.gz").read_bytes()).splitlines()
    ] == DOWNLOADED
    text = '"ROW_ID","ROW_VERSION","v"\n1,1,"a"\n2,1,"b"\n'
    assert gzip.decompress(Path("x.csv.gz").read_bytes()).decode() == text
    assert gzip.decompress(Path("x.tsv.gz").read_bytes()).decode() == text.replace(",", "\t")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.xlsx"], "cannot write .xlsx files: name the file x.csv, x.tsv or x.csv.gz"),
        (["x.parquet", "--no-header"], "are for CSV and TSV, and 'x.parquet' is parquet by its name"),
        (["x.parquet.gz"], "parquet is not written as .gz"),
    ],
)
def test_an_impossible_download_is_refused(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run("rows", "download", "r", *arguments)
    assert code
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert not list(Path().glob("x.*"))


def test_python_writes_csv_compressed_and_refuses_names_of_other_formats(
    instance: Any, tmp_path: Path
) -> None:
    rows = instance.create_row_table("r", [dm.Column("v", "STRING")])
    rows.change([dm.Insert([{"v": "a"}])])
    rows.download_csv(tmp_path / "x.csv.gz")
    assert gzip.decompress((tmp_path / "x.csv.gz").read_bytes()) == b'"ROW_ID","ROW_VERSION","v"\n1,1,"a"\n'
    with pytest.raises(InvalidInput, match="means parquet, and this writes CSV"):
        rows.download_csv(tmp_path / "x.parquet")


@pytest.mark.slow
def test_a_piped_table_is_not_shortened(run: Run) -> None:
    columns = ", ".join(f"'{'x' * 70}{n}' as c{n}" for n in range(150))
    code, out, _ = run("sql", f"select {columns} from t")
    assert code == 0
    assert "…" not in out
    rows = [line for line in out.splitlines() if "xxx" in line]
    assert [line.count("x" * 70) for line in rows] == [150, 150]
    assert len(max(out.splitlines(), key=len)) < 150 * 80
    long = "y" * 5_000
    out = run("sql", f"select '{long}' as c, k from t limit 1")[1]
    assert out.count("y") == 5_000


def test_a_page_converts_to_other_libraries(instance: Any) -> None:
    rows = instance.create_row_table(
        "r", [dm.Column("v", "STRING"), dm.Column("j", "JSON"), dm.Column("at", "DATE")]
    )
    rows.change([dm.Insert([{"v": "a", "j": [1], "at": 0}, {"v": "b"}, {"v": "b"}])])
    page = rows.query("select v, j, at from r", 2)
    assert page.arrow().column_names == ["ROW_ID", "ROW_VERSION", "v", "j", "at"]
    assert page.arrow() == pa.table(page) == rows.rows_of("select v, j, at from r").read_all().slice(0, 2)
    assert page.df().shape == page.pl().shape == (2, 5)
    groups = rows.query("select v, count(*) n from r group by v order by v")
    assert groups.arrow().to_pylist() == [{"v": "a", "n": 1}, {"v": "b", "n": 2}]
    assert rows.query("select v from r where v = 'no'").df().shape == (0, 3)


def test_an_answer_shows_its_columns(instance: Any) -> None:
    table = instance.create_table("t", dm.Schema(row_keys=[dm.Field(f"k{n}", dm.LONG) for n in range(2)]))
    expected = (
        "Answer(k0 int64, k1 int64; a reader, whose rows are read once: by batches, arrow(), df() or pl())"
    )
    assert repr(table.query()) == expected
    wide = ", ".join(f"k0 as c{n}" for n in range(22))
    assert "c19 int64, … 2 more; a reader" in repr(instance.sql(f"select {wide} from t"))
