"""DuckDB connections that can read an object store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import duckdb

from dormouse.errors import not_installed
from dormouse.objects import ObjectStore
from dormouse.objects.aws_credentials import s3_options
from dormouse.reading.sql.conditions import text
from dormouse.settings import environment

_OF_SECRET = {
    "access_key_id": "key_id",
    "secret_access_key": "secret",
    "session_token": "session_token",
    "region": "region",
}
_VARIABLES = {
    # later ones count more, as for the store itself
    "AWS_ENDPOINT": "endpoint",
    "AWS_ENDPOINT_URL": "endpoint",
    "AWS_ENDPOINT_URL_S3": "endpoint",
    "AWS_DEFAULT_REGION": "region",
    "AWS_REGION": "region",
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
}


def connection(objects: ObjectStore) -> duckdb.DuckDBPyConnection:
    """A connection to a database in memory, in UTC, that reads the store's objects by `path_of`."""
    # what is needed is installed beside DuckDB, and nothing is fetched unasked
    made = duckdb.connect(config={"autoinstall_known_extensions": False})
    try:
        # of all its cursors, too
        made.execute("SET GLOBAL TimeZone = 'UTC'")
        if secret := secret_of(objects):
            _load_httpfs(made)
            made.execute(secret)
    except BaseException:
        made.close()
        raise
    return made


def path_of(objects: ObjectStore, name: str) -> str:
    """Where DuckDB finds an object; none of its characters stands for others."""
    path = objects.local_path(name)
    found = objects.uri(name) if path is None else str(path)
    return "".join(f"[{one}]" if one in "*?[" else one for one in found)


def _load_httpfs(made: duckdb.DuckDBPyConnection) -> None:
    """From the wheel that is installed, of DuckDB's own version."""
    try:
        import duckdb_extension_httpfs
    except ImportError:
        raise not_installed("duckdb-extension-httpfs", "sql") from None
    folder = Path(duckdb_extension_httpfs.__file__).parent / "extensions" / f"v{duckdb.__version__}"
    made.load_extension(str(folder / "httpfs.duckdb_extension"))


def secret_of(objects: ObjectStore) -> str | None:
    """The statement that says what S3 is reached with, as it is now: temporary credentials end."""
    if urlsplit(objects.url).scheme != "s3":
        return None
    found = _of_environment() | s3_options(objects.options)
    scope = text(f"s3://{urlsplit(objects.url).netloc}/")
    given = [f"{ours} {text(found[name])}" for name, ours in _OF_SECRET.items() if name in found]
    if "endpoint" in found:
        parts = urlsplit(found["endpoint"])
        tls = str(parts.scheme != "http").lower()
        given += [f"endpoint {text(parts.netloc + parts.path)}", "url_style 'path'", f"use_ssl {tls}"]
    return f"CREATE OR REPLACE SECRET dormouse (TYPE s3, SCOPE {scope}, {', '.join(given)})"


def _of_environment() -> dict[str, str]:
    """AWS's own variables, which DuckDB would not look at."""
    variables = environment()
    return {ours: variables[name] for name, ours in _VARIABLES.items() if variables.get(name)}
