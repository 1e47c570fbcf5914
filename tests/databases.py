"""Databases for tests: copies of a template, reused if they are still like the template."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dormouse.jobs import claims
from dormouse.postgres import ConnectionSupplier, migrate
from dormouse.state.context import TableContext
from dormouse.state.files import removal_log
from dormouse.state.files.layout import layout as known_layout
from dormouse.state.partitions import PartitionStore

# A digest of everything that a test may change, except rows. Objects newer than the template have higher
# oids and are dropped first. In large catalogs, the newest xmin shows writes, and the count shows deletes.
_DEFINITIONS = """
select md5(string_agg(what, '|' order by what)) from (
    select concat_ws(' ', oid, relname, relkind, relpersistence, relnamespace, relowner, relrowsecurity,
                     relreplident, relacl, reloptions) as what
    from pg_class where relkind <> 't' and oid > 16383
    union all select concat_ws(' ', 'attributes', count(*), max(xmin::text::bigint)) from pg_attribute
    union all select concat_ws(' ', 'indexes', count(*), max(xmin::text::bigint)) from pg_index
    union all select concat_ws(' ', 'functions', count(*), max(xmin::text::bigint)) from pg_proc
    union all select concat_ws(' ', 'types', count(*), max(xmin::text::bigint)) from pg_type
    union all select concat_ws(' ', 'defaults', count(*), max(xmin::text::bigint)) from pg_attrdef
    union all select concat_ws(' ', 'constraints', count(*), max(xmin::text::bigint)) from pg_constraint
    union all select concat_ws(' ', 'triggers', count(*), max(xmin::text::bigint)) from pg_trigger
    union all select t::text from pg_inherits t
    union all select t::text from pg_rewrite t where oid > 16383
    union all select t::text from pg_namespace t where nspname !~ '^pg_(toast_)?temp_'
    union all select t::text from pg_default_acl t
    union all select t::text from pg_extension t
    union all select t::text from pg_largeobject_metadata t
    union all select concat_ws(' ', setrole, setconfig) from pg_db_role_setting
        where setdatabase = (select oid from pg_database where datname = current_database())
    union all select concat_ws(' ', 'database', datacl, datallowconn, datconnlimit)
        from pg_database where datname = current_database()
    union all select t::text from dormouse.migration t
    union all select t::text from dormouse.instance t
) everything
"""
OWN_NAME = "databases of tests"
"""The application's name of the sessions that are open beside those of a test."""
_KEPT = ("migration", "instance", "job_kind")
_SMALL_BYTES = 64 * 1024
_BY_TABLE = """
select relname from pg_class c join pg_attribute a on a.attrelid = c.oid
where relnamespace = 'dormouse'::regnamespace and attname = 'table_id' and relkind in ('r', 'p')
    and not relispartition and relname not in ('file_reference', 'file', 'file_count')
"""
_UNCHANGED = """
select table_id, name, schema::text, properties::text, layout, created_at, table_uuid from tables
where table_id = %(table_id)s and name = %(name)s
    and (select count(*) from pg_class where relname = any(%(own)s) and reltuples < 0) = cardinality(%(own)s)
"""
_ADDED = """
insert into tables (table_id, name, schema, properties, layout, created_at, table_uuid)
overriding system value values (%s, %s, %s::jsonb, %s::jsonb, %s, %s, %s)
"""


class Databases:
    """The databases of a test server."""

    def __init__(self, server_dsn: str) -> None:
        self._server_dsn = server_dsn
        self._server = psycopg.connect(server_dsn, autocommit=True)
        self._numbers = itertools.count(1)
        self._free: list[str] = []
        # one for each database, kept open: a new session would read all definitions again
        self._sessions: dict[str, psycopg.Connection] = {}
        self.template = self.create("template0")
        migrate(self.template)
        with closing(ConnectionSupplier(self.template)) as supplier:
            # as each instance does when it opens a database
            removal_log.roll(supplier)
            claims.roll(supplier)
        with psycopg.connect(self.template) as conn:
            ((self._newest_oid,),) = conn.execute("select max(oid) from pg_class").fetchall()
            ((self._definitions,),) = conn.execute(_DEFINITIONS).fetchall()

    def create(self, template: str) -> str:
        """Makes a database, as a copy of the given template, and returns its DSN."""
        name = f"test_{next(self._numbers)}"
        for dsn in [dsn for dsn in self._sessions if name_of(dsn) == template]:
            self._sessions.pop(dsn).close()
        text = sql.SQL("create database {} template {} strategy file_copy")
        self._server.execute(text.format(sql.Identifier(name), sql.Identifier(template)))
        return make_conninfo(self._server_dsn, dbname=name)

    @contextmanager
    def lent(self) -> Iterator[str]:
        """Yields the DSN of a migrated database without rows."""
        dsn = self._free.pop() if self._free else self.create(name_of(self.template))
        yield dsn
        if self._is_as_new(dsn) and self._is_left(dsn):
            self._free.append(dsn)
        else:
            self.drop(dsn)

    def drop(self, dsn: str) -> None:
        if session := self._sessions.pop(dsn, None):
            session.close()
        self._server.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name_of(dsn))))

    def _is_as_new(self, dsn: str) -> bool:
        """Ends all other sessions, drops new tables and removes all rows; returns whether all else is as in
        the template.
        """
        try:
            if dsn not in self._sessions:
                self._sessions[dsn] = psycopg.connect(dsn, application_name=OWN_NAME)
            conn = self._sessions[dsn]
            with conn.transaction():
                conn.execute("set lock_timeout = '5s'")
                ended = conn.execute(
                    """select pg_terminate_backend(pid, 5000) from pg_stat_activity
                       where datname = current_database() and pid <> pg_backend_pid()"""
                ).fetchall()
                self._empty(conn)
                found = conn.execute(_DEFINITIONS).fetchall()
                return (False,) not in ended and found == [(self._definitions,)]
        except psycopg.Error:
            return False

    def _is_left(self, dsn: str) -> bool:
        """Waits briefly for all other sessions to end; returns whether they have.

        A session can outlive its connection.
        """
        deadline = time.monotonic() + 5
        text = "select count(*) from pg_stat_activity where datname = %s and pid <> %s"
        own = self._sessions[dsn].info.backend_pid
        while self._server.execute(text, (name_of(dsn), own)).fetchall() != [(0,)]:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _empty(self, conn: psycopg.Connection) -> None:
        tables = conn.execute(
            """select format('%%I.%%I', n.nspname, c.relname), c.oid > %s, pg_relation_size(c.oid) > %s
               from pg_class c join pg_namespace n on n.oid = c.relnamespace
               where c.relkind in ('r', 'p') and c.oid > 16383 and n.nspname !~ '^pg_'
                   and not (n.nspname = 'dormouse' and c.relname = any(%s))
                   and (c.oid > %s or pg_relation_size(c.oid) > 0)""",
            (self._newest_oid, _SMALL_BYTES, list(_KEPT), self._newest_oid),
        ).fetchall()
        if new := [name for name, is_new, _ in tables if is_new]:
            conn.execute(f"drop table if exists {', '.join(new)} cascade")
        if large := [name for name, is_new, is_large in tables if is_large and not is_new]:
            conn.execute(f"truncate {', '.join(large)} restart identity cascade")
        if small := [name for name, is_new, is_large in tables if not is_large and not is_new]:
            # not a truncation: it would also make new files for all tables that refer to these
            conn.execute("set session_replication_role = replica")
            deletions = (f"of_{n} as (delete from {name})" for n, name in enumerate(small))
            conn.execute(f"with {', '.join(deletions)} select")
            conn.execute("reset session_replication_role")
        conn.execute("delete from dormouse.job_kind where kind_id > 0")
        conn.execute("select setval(oid, 1, false) from pg_class where relkind = 'S'")


def empty_table(context: TableContext) -> bool:
    """Removes all rows of a table; returns whether the table is then as it was when it was new."""
    table = context.table
    own = list(known_layout(table.layout).tables(table.table_id).values())
    with context.supplier.connection() as conn, conn.transaction():
        found = conn.execute(
            _UNCHANGED, {"name": table.name, "table_id": table.table_id, "own": own}
        ).fetchone()
        if found is None:
            return False
        # the table's own partitions: a statement on a parent would plan the partitions of all tables
        names = [*own, *(name for (name,) in conn.execute(_BY_TABLE).fetchall())]
        deletions = (f"of_{name} as (delete from {name} where table_id = {table.table_id})" for name in names)
        conn.execute(f"with {', '.join(deletions)} select")
        conn.execute(_ADDED, found)
        PartitionStore(context.supplier, table).create(conn)
    return True


def name_of(dsn: str) -> str:
    return str(conninfo_to_dict(dsn)["dbname"])
