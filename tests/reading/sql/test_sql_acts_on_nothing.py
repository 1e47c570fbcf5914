"""A refused statement is only parsed: no file is opened, and nothing is fetched or written."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.client import Client, connect
from dormouse.errors import InvalidQuery
from tests.serving import serving
from tests.standard import OF_K

REFUSED = {
    "ALTER": ["alter table t add column b int", "comment on table t is 'x'"],
    "ATTACH": [
        "attach '{path}'",
        "attach '{url}/x.db' as y (type sqlite)",
        "attach if not exists 's3://x/y'",
    ],
    "CALL": [
        "call read_text('{path}/schema.sql')",
        "call pragma_version()",
        "checkpoint",
        "force checkpoint t",
    ],
    "COPY": ["copy t to '{path}/never.csv'", "copy t from '{path}/schema.sql'", "copy t from '{url}/x'"],
    "COPY_DATABASE": ["copy from database memory to t", "pragma copy_database('memory', 'x')"],
    "CREATE": [
        "create table x as from '{path}/schema.sql'",
        "create view v as from read_text('{path}/schema.sql')",
        "create persistent secret s (type s3, provider credential_chain)",
        "create type e as enum (from read_text('{path}/schema.sql'))",
        "create macro f() as table from read_text('{path}/schema.sql')",
        "create sequence s",
    ],
    "DELETE": ["delete from t", "truncate t"],
    "DETACH": ["detach database memory"],
    "DROP": ["drop table t", "drop persistent secret s", "deallocate p"],
    "EXECUTE": ["execute p('{path}/schema.sql')"],
    "EXPLAIN": [
        "explain import database '{path}'",
        "explain pragma import_database('{path}')",
        "explain analyze copy t to '{path}/never.csv'",
        "explain (format json) pragma import_database('{path}')",
        "explain (analyze) (pragma import_database('{path}'))",
        "explain (format (x)) pragma import_database('{path}')",
        "explain (format json pragma import_database('{path}')",
        "explain import database '{path}' garbage",
        "explain from read_text('{path}/schema.sql')",
        "explain analyze from '{path}/schema.sql'",
    ],
    "EXPORT": ["export database '{path}/never'", "export database '{path}/never' (format parquet)"],
    "INSERT": [
        "insert into t from read_text('{path}/schema.sql')",
        "with x as (select 1) insert into t from x",
    ],
    "LOAD": [
        "load '{path}/schema.sql'",
        "load spatial",
        "install spatial",
        "force install httpfs from '{url}'",
    ],
    "MERGE_INTO": ["merge into t using (from '{path}/schema.sql') s on true when matched then delete"],
    "PRAGMA": [
        "import database '{path}'",
        "IMPORT\n DATABASE/* */'{path}' -- x",
        ";; import database '{path}';",
        "import database '{url}/x'",
        "import database 's3://nowhere/x'",
        "pragma import_database('{path}')",
        "PRAGMA Import_Database('{url}/x')",
        "pragma import_database('{path}' || '')",
        "/* select */ pragma import_database('{path}')",
        "select 1; import database '{path}'",
        "import database '{path}'; select 1",
        "select 'a;b'; pragma import_database('{path}')",
        "pragma version",
        "pragma show_tables",
        "pragma table_info('{path}/schema.sql')",
        "pragma storage_info('{path}/schema.sql')",
        "pragma json_execute_serialized_sql('x')",
        "pragma threads = 1",
        "pragma temp_directory = '{path}/never'",
        "pragma of_an_extension('{path}')",
    ],
    "PREPARE": ["prepare p as from '{path}/schema.sql'", "prepare p as import database '{path}'"],
    "SELECT": [
        "from '{path}/schema.sql'",
        "from '{url}/x.parquet'",
        "from read_csv('{url}/x.csv')",
        "from sniff_csv('{path}/schema.sql')",
        "from glob('{path}/*')",
        "from query('import database ''{path}''')",
        "from query_table('{path}/schema.sql')",
        "from json_execute_serialized_sql(json_serialize_sql('from \"{path}/schema.sql\"'))",
        "pivot '{path}/schema.sql' on content",
        "pivot (from read_text('{path}/schema.sql')) on content using count(*)",
        "from (pivot t on k) semi join read_text('{path}/schema.sql') on true",
        "with x as (from '{path}/schema.sql') from x",
        "select st_read('{path}/schema.sql')",
        "select (from read_text('{path}/schema.sql'))",
        "select pg_get_viewdef(k) from t",
        "describe '{path}/schema.sql'",
        "summarize '{path}/schema.sql'",
        "show tables from '{path}'",
        "values ((from read_text('{path}/schema.sql')))",
    ],
    "SET": [
        "set home_directory = '{path}/never'",
        "set variable x = (from read_text('{path}/schema.sql'))",
        "reset threads",
        "use '{path}'",
        "set global extension_directory = '{path}'",
    ],
    "TRANSACTION": ["begin", "commit", "rollback"],
    "UPDATE": ["update extensions", "update t set k = (from read_text('{path}/schema.sql'))"],
    "VACUUM": ["vacuum", "analyze t"],
    "syntax": ["import database '{path}' garbage", "pragma import_database('{path}'", "import '{path}'", "("],
}
"""The refused statements, by DuckDB's type of statement; those that it cannot parse are under "syntax"."""
NO_STATEMENTS = {
    "ANALYZE", "CREATE_FUNC", "EXTENSION", "INVALID", "LOGICAL_PLAN", "MULTI", "RELATION", "VARIABLE_SET",
}  # fmt: skip
"""DuckDB's types of statements that its parser never returns."""
STATEMENTS = [statement for some in REFUSED.values() for statement in some]
SOME = [REFUSED["PRAGMA"][0], REFUSED["PRAGMA"][5], REFUSED["SELECT"][0], REFUSED["COPY"][2]]
IN_OPEN, IN_CREATE = 0x20, 0x100


class Watched:
    """A record of every access to a folder, a home folder and a server."""

    def __init__(self, folder: Path, home: Path, server: socket.socket) -> None:
        self.folder, self.home = folder, home
        self.url = f"http://127.0.0.1:{server.getsockname()[1]}"
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = self._libc.inotify_init1(os.O_NONBLOCK)
        for path in (folder, home):
            assert self._libc.inotify_add_watch(self._events, os.fsencode(path), IN_OPEN | IN_CREATE) >= 0
        self._requests: list[object] = []
        threading.Thread(target=self._serve, args=(server,), daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                accepted, address = server.accept()
            except OSError:
                return
            self._requests.append(address)
            accepted.close()

    def texts(self, statement: str) -> tuple[str, str]:
        """Returns the statement with the path of the watched folder, and with that of a missing folder.

        Both paths have the same length, so that error messages only differ by the name.
        """
        return (
            statement.replace("{path}", str(self.folder)).replace("{url}", self.url),
            statement.replace("{path}", str(self.folder.with_name("nosuch"))).replace("{url}", self.url),
        )

    def seen(self) -> list[object]:
        """Returns the requests and the events of files since the last call; empty if there were none."""
        found, self._requests[:] = list(self._requests), []
        with suppress(BlockingIOError):
            found.append(os.read(self._events, 1 << 16))
        return found


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    for name in ("folder", "home"):
        (tmp_path / name).mkdir()
    for name in ("schema.sql", "load.sql"):
        (tmp_path / "folder" / name).write_text("a word of it\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Watched(tmp_path / "folder", tmp_path / "home", server)


@pytest.fixture(scope="module")
def instance(module_instance: dm.Instance) -> dm.Instance:
    module_instance.create_table("t", OF_K).ingest(pa.table({"k": [1, 2]}))
    return module_instance


def refusal(door: dm.Instance | Client, statement: str) -> str:
    with pytest.raises(InvalidQuery) as error:
        door.sql(statement).read_all()
    return str(error.value)


def check(watched: Watched, answers: Sequence[str], statement: str) -> None:
    """Checks that nothing was accessed, and that both answers are one equal line.

    `answers` are those to the two forms of the statement that `Watched.texts` returns.
    """
    there, nowhere = answers
    assert there.replace("/folder", "/nosuch") == nowhere, statement
    assert "word" not in there
    assert len(there.splitlines()) == 1
    assert watched.seen() == [], statement
    assert list(watched.home.iterdir()) == []
    assert {path.name for path in watched.folder.iterdir()} == {"schema.sql", "load.sql"}
    watched.seen()  # the accesses of this test itself


def test_every_type_of_statement_is_covered() -> None:
    types = {name for name in vars(duckdb.StatementType) if name.isupper()}
    assert types - NO_STATEMENTS == REFUSED.keys() - {"syntax"}


def test_the_watcher_sees_accesses_by_duckdb(watched: Watched) -> None:
    with duckdb.connect(config={"autoinstall_known_extensions": False}) as connection:
        there, _ = watched.texts("import database '{path}'")
        with pytest.raises(duckdb.ParserException):
            connection.extract_statements(there)
    assert watched.seen()
    socket.create_connection(("127.0.0.1", int(watched.url.rpartition(":")[2]))).close()
    while not watched.seen():
        pass


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_statement_that_is_refused_touches_nothing(
    instance: dm.Instance, watched: Watched, statement: str
) -> None:
    check(watched, [refusal(instance, text) for text in watched.texts(statement)], statement)


@pytest.mark.slow
def test_a_refused_statement_touches_nothing_through_a_service(
    instance: dm.Instance, watched: Watched
) -> None:
    """The service's workers have the same home and folder as this process."""
    with serving(instance, sql_workers=1) as url, closing(connect(url)) as client:
        client.sql("select count(*) from t").read_all()
        watched.seen()
        for statement in SOME:
            check(watched, [refusal(client, text) for text in watched.texts(statement)], statement)
