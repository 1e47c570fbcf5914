"""The limits of transactions in PostgreSQL. A frozen process delays no other process for long."""

from __future__ import annotations

import ast
import time
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from dormouse.durability.maintaining import InstanceRounds
from dormouse.errors import RowLockHeld, TableBusy
from dormouse.postgres import ConnectionSupplier, run_statement, run_transaction, session
from dormouse.postgres.migrate import migrate
from dormouse.postgres.session import (
    ALONE,
    COMMIT,
    IDLE,
    KEPT,
    LOCK,
    LONG,
    PAGED,
    SHORT,
    STATEMENT,
    TRANSACTION,
)
from dormouse.postgres.transaction import bounded, run_alone
from tests.cooling import AT
from tests.frozen import Frozen
from tests.pooler import PGBOUNCER, pgbouncer
from tests.support.api import Instance

ROOT = Path(dm.__file__).parent
NAMES = (IDLE, LOCK, STATEMENT, TRANSACTION)
SCHEMA = dm.Schema(row_keys=[dm.Field("key", dm.LONG)], values=[dm.Field("v", dm.LONG)])

PREPARE = """
i = dm.connect(*sys.argv[1:])
t = i.table('t')
"""
CHANGES = {
    "deletion": "t.delete({'key': 1})",
    "ingest": "t.ingest({'key': [5], 'v': [1]}, ingest_id='five')",
    "change of rows": """
try:
    i.row_table('r').change([dm.Insert([{'n': 1}])], wait_seconds=60)
except dm.errors.RowLockLost as error:
    print('said: lost', flush=True)
""",
    "cut": "t.history.record_cut('a')",
    "column": "t.add_column(dm.Field('z', dm.LONG, nullable=True))",
    "split": "t.split()",
    "restore": "t.restore('before')",
    "conversion": "t.convert_layout('salted_counts')",
    "compaction": "t.compact()",
    "offload": """
from tests.cooling import DAY, SMALL
from dataclasses import replace
i.payloads._options = replace(SMALL, lease_seconds=2, lock_timeout_ms=50)
i.payloads.offload(DAY)
""",
    "collection": "t.collect_garbage()",
}
QUICK = {"deletion"}
CALLS = {"transaction", "connect", "execute"}
"""The names of methods that begin a transaction or open a connection."""


def milliseconds(conn: psycopg.Connection) -> dict[str, int]:
    """Returns the limits of the session, or of its transaction, in milliseconds."""
    text = "select (1000 * extract(epoch from current_setting(%s)::interval))::integer"
    return {name: conn.execute(text, [name]).fetchone()[0] for name in NAMES}


def test_each_kind_of_work_has_its_limits(dsn: str) -> None:
    with closing(ConnectionSupplier(dsn)) as supplier:
        assert run_statement(supplier, milliseconds) == SHORT
        assert run_transaction(supplier, milliseconds) == SHORT
        assert run_transaction(supplier, milliseconds, lock_ms=70) == {**SHORT, LOCK: 70}
        assert run_transaction(supplier, milliseconds, read_only=True) == LONG
        assert run_transaction(supplier, milliseconds, scans=True) == LONG
        assert {**run_alone(supplier, milliseconds, operation="test"), LOCK: ALONE[LOCK]} == ALONE
        for kind in (SHORT, ALONE, LONG, PAGED, KEPT):
            assert run_transaction(supplier, milliseconds, limits=kind) == kind
            with supplier.connection() as conn, bounded(conn, kind):
                assert milliseconds(conn) == kind
        with closing(supplier.limited(**COMMIT)) as committing:
            assert run_statement(committing, milliseconds) == {**SHORT, **COMMIT}
            # the supplier's limits bound all kinds
            assert run_transaction(committing, milliseconds, limits=PAGED) == {**PAGED, **COMMIT}


@pytest.mark.parametrize("kind", [SHORT, COMMIT, ALONE, LONG, PAGED, KEPT])
def test_every_kind_of_work_bounds_a_frozen_process(kind: session.Limits) -> None:
    assert 0 < kind[IDLE] <= 600_000 and 0 < kind[LOCK] <= 600_000
    assert {kind[IDLE] for kind in (SHORT, COMMIT, ALONE)} == {15_000}


def test_lower_limits_of_the_user_bound_all_kinds(dsn: str) -> None:
    own = {IDLE: 5_000, STATEMENT: 60_000}
    options = " ".join(f"-c {name}={limit}" for name, limit in own.items())
    with closing(ConnectionSupplier(make_conninfo(dsn, options=options))) as supplier:
        assert run_statement(supplier, milliseconds) == {**SHORT, **own}
        assert run_transaction(supplier, milliseconds, limits=PAGED) == {**PAGED, **own}


@pytest.mark.parametrize("has_role_settings", [False, True])
@pytest.mark.skipif(PGBOUNCER is None, reason="needs PgBouncer (apt install pgbouncer)")
def test_transactions_through_a_pooler_are_bounded(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_role_settings: bool
) -> None:
    from tests.postgres.test_pooler import _role_settings

    with _role_settings(dsn):
        if has_role_settings:
            given = conninfo_to_dict(dsn)
            names = (sql.Identifier(str(given[name])) for name in ("user", "dbname"))
            alter = sql.SQL("alter role {} in database {} ").format(*names)
            with psycopg.connect(dsn, autocommit=True) as conn:
                for name, limit in SHORT.items():
                    conn.execute(alter + sql.SQL(f"set {name} = {limit}"))
        with pgbouncer(dsn, tmp_path) as pooled, closing(ConnectionSupplier(pooled)) as supplier:
            assert run_transaction(supplier, milliseconds) == SHORT
            assert run_transaction(supplier, milliseconds, limits=PAGED) == PAGED
            if has_role_settings:
                assert run_statement(supplier, milliseconds) == SHORT
            with closing(supplier.limited(**COMMIT)) as committing:
                assert run_transaction(committing, milliseconds) == {**SHORT, **COMMIT}


def test_transactions_begin_only_where_they_are_bounded() -> None:
    """The test searches the code. Only one module begins transactions, and only one opens connections."""
    found = set()
    for path in [*ROOT.rglob("*.py"), *(ROOT.parent / "lambdas").rglob("*.py")]:
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if any(f".{name}" in text for name in CALLS) else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in CALLS:
                continue
            call = ast.unparse(node.func)
            is_begin = node.func.attr == "transaction" and "conn" in call
            is_connect = call in ("psycopg.connect", "psycopg.Connection.connect", "Connection.connect")
            statement = node.args[0] if node.func.attr == "execute" and node.args else None
            if isinstance(statement, ast.Constant) and isinstance(statement.value, str):
                is_begin |= statement.value.lower().startswith(("begin", "start transaction"))
            if is_begin or is_connect:
                found.add((str(path.relative_to(ROOT.parent)), call))
    assert found == {
        ("dormouse/postgres/transaction.py", "conn.transaction"),
        ("dormouse/postgres/session.py", "Connection.connect"),
        ("dormouse/payloads/rows.py", "conn.transaction"),  # a savepoint
        ("dormouse/payloads/store.py", "conn.transaction"),  # a savepoint in the application's transaction
    }


def test_a_wait_for_a_lock_ends_with_an_error_that_names_the_operation(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHORT, LOCK, 50)
    with closing(ConnectionSupplier(dsn)) as supplier, psycopg.connect(dsn) as other:
        other.execute("lock table dormouse.tables")
        for run in (run_transaction, run_statement):
            with pytest.raises(TableBusy, match=r"^look: .*LockNotAvailable.*try again later$"):
                run(supplier, lambda conn: conn.execute("select from tables"), operation="look")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            run_transaction(supplier, lambda conn: conn.execute("select from tables"), lock_ms=50)


def test_a_statement_that_takes_too_long_ends_with_an_error_that_names_the_operation(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHORT, STATEMENT, 50)
    with closing(ConnectionSupplier(dsn)) as supplier:
        for run in (run_transaction, run_statement):
            with pytest.raises(TableBusy, match=r"^look: .*statement_timeout.*nothing was changed"):
                run(supplier, lambda conn: conn.execute("select pg_sleep(60)"), operation="look")


@pytest.mark.slow
def test_a_row_change_waits_no_longer_than_its_limit(instance: Instance, dsn: str) -> None:
    rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    rows.change([dm.Insert([{"n": 1}])])
    with psycopg.connect(dsn) as other:
        other.execute("select from dormouse.row_table for update")
        with pytest.raises(RowLockHeld, match="has not ended"):
            rows.change([dm.Insert([{"n": 2}])], wait_seconds=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CHANGES],
)
def test_other_processes_continue_while_one_is_frozen_before_any_commit(
    dsn: str, tmp_path: Path, change: str
) -> None:
    objects = (tmp_path / "objects").as_uri()
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("t", SCHEMA)
        table.ingest({"key": [1, 3], "v": [1, 1]})
        table.history.record_cut("before")
        table.ingest({"key": [4], "v": [1]})
        rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
        rows.change([dm.Insert([{"n": 0}])])
        for number in range(20):
            instance.payloads.put("t", f"a{number}", AT, "a", {"n": number})
        frozen, stopped, added = Frozen(PREPARE + CHANGES[change], dsn, objects), [], 0
        for operation in frozen.stops():
            stopped.append(operation)
            table.ingest({"key": [100 + added], "v": [1]})
            added += 1
            table.delete({"key": 1_000 + added})
            rows.change([dm.Insert([{"n": added}])], wait_seconds=60)
            table.history.record_cut(f"cut {added}")
            assert table.query().read_all().num_rows >= 1
        assert stopped
        found = table.query().read_all().column("key").to_pylist()
        mine = {"deletion": {1}, "ingest": {5}}.get(change, set())
        if change != "restore":
            expected = {1, 3, 4, *range(100, 100 + added)} ^ mine
            assert sorted(found) == sorted(expected)
        done = change == "change of rows" and "lost" not in frozen.said
        inserted = sum(one.inserted for one in rows.store.history(1_000_000, 1_000))
        assert inserted == 1 + added + done


@pytest.mark.slow
def test_another_process_maintains_when_the_first_is_frozen(dsn: str, instance: Instance) -> None:
    program = """
from dormouse.postgres import ConnectionSupplier
from dormouse.durability.maintaining import InstanceRounds
from contextlib import suppress
import time, psycopg
with suppress(psycopg.Error):
    with InstanceRounds(ConnectionSupplier(sys.argv[1])).alone():
        time.sleep(1)  # longer than the limit: the pulse keeps it
        freeze('maintain')
print('said: over', flush=True)
"""
    rounds, frozen = InstanceRounds(instance._supplier), Frozen(program, dsn)
    for _ in frozen.stops():
        until = time.monotonic() + 600
        while True:
            try:
                with rounds.alone():
                    break
            except dm.errors.InstanceLocked:
                assert time.monotonic() < until
                time.sleep(0.05)
    assert frozen.said == ["over"]


@pytest.mark.slow
def test_another_process_migrates_when_the_first_is_frozen(empty_dsn: str) -> None:
    program = """
@contextmanager
def frozen(conn, kind, **more):
    with transaction.bounded(conn, kind, **more):
        yield
        freeze('migrate')
module = sys.modules['dormouse.postgres.migrate']
module.bounded = frozen
try:
    module.migrate(sys.argv[1])
except dm.errors.InstanceError as error:
    print('said:', error, flush=True)
"""
    frozen = Frozen(program, empty_dsn)
    for _ in frozen.stops():
        migrate(empty_dsn)
    assert frozen.said and "migration 0001" in frozen.said[0]


def test_waiting_for_the_migration_lock_is_bounded(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHORT, LOCK, 50)
    with psycopg.connect(empty_dsn, autocommit=True) as other:
        other.execute("select pg_advisory_lock(7236154098213001)")
        with pytest.raises(dm.errors.InstanceError, match="another process has been bringing the database"):
            migrate(empty_dsn)
