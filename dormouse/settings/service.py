"""The settings of the query service.

They come from the environment, and options of `dormouse serve` override them.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dormouse.errors import InvalidInput
from dormouse.settings.process import PREFIX, Optional, environment, load

SERVICE_PREFIX = f"{PREFIX}SERVICE_"
SQL_MEMORY_BYTES_MIN = 512 * 1024 * 1024
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class ServiceSettings(BaseSettings):
    """The settings of the query service. `load_service_settings` creates it.

    Each field can be set by an environment variable: its name with the prefix `DORMOUSE_SERVICE_`. All fields
    but the token are also options of `dormouse serve`. The text below a field is the help of its option.
    """

    model_config = SettingsConfigDict(
        env_prefix=SERVICE_PREFIX,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    host: str = Field(default="127.0.0.1", min_length=1)
    """The address to listen on. Any address but a loopback address needs a token."""

    port: int = Field(default=8088, ge=0, le=65_535)
    """The port to listen on. With 0, the service takes a free port."""

    token: Annotated[str | None, Optional] = Field(default=None, repr=False)
    """The bearer token that requests must have."""

    token_file: Annotated[Path | None, Optional] = None
    """A file with the token, instead of DORMOUSE_SERVICE_TOKEN."""

    job_threads: Annotated[int | None, Optional] = Field(default=None, ge=0, le=1_000)
    """The number of jobs of each kind that run here at once. With 0, other processes run them. Left out, the
    service takes no jobs and writes nothing."""

    job_tokens_file: Annotated[Path | None, Optional] = None
    """A file with tokens that may start jobs. Each line is NAME KIND,KIND TOKEN, with * for all kinds.
    Holders of these tokens see their own jobs, and the holder of the other token sees all jobs. The kind
    `payloads` allows reading and writing payloads, and the kind `sql_writes` SQL that writes; * includes
    neither."""

    tls_certificate: Annotated[Path | None, Optional] = None
    """The certificate, with its chain, as PEM. With it, the service speaks HTTPS."""

    tls_key: Annotated[Path | None, Optional] = None
    """The certificate's private key, as PEM without a password."""

    connections_max: int = Field(default=1_000, ge=1, le=100_000)
    """The largest number of connections. It is lowered if the process may not open enough files. If there are
    more connections, the service closes one that has shown no token."""

    workers: int = Field(default=1, ge=1, le=64)
    """The number of processes that serve. They share the limits below. One process for each core serves the
    most look-ups."""

    queries_max: int = Field(default=16, ge=1, le=1_000)
    """The number of queries by key that run at once. More queries have to wait. With sql_workers = 0, SQL
    statements count as queries here."""

    sql_workers: Annotated[int | None, Optional] = Field(default=None, ge=0, le=100)
    """The number of SQL statements that run at once, each in its own process. The default is one for each
    core, at least 2 and at most 8. With 0, statements run in the service's process, and can crash it."""

    sql_memory_bytes_max: Annotated[int | None, Optional] = Field(default=None, ge=SQL_MEMORY_BYTES_MIN)
    """The memory in bytes of each process that runs SQL. By default, these processes share half of the
    machine's memory equally."""

    sql_spill_bytes_max: Annotated[int | None, Optional] = Field(default=None, ge=0)
    """The disk space in bytes to which each process that runs SQL may spill. By default, these processes
    share half of the free space equally."""

    sql_threads: Annotated[int | None, Optional] = Field(default=None, ge=1, le=1_000)
    """The number of threads of a statement. The default is one for each core."""

    queue_seconds_max: float = Field(default=5, ge=0, allow_inf_nan=False)
    """The time in seconds that a query waits for its turn before it is refused."""

    rows_max: Annotated[int | None, Optional] = Field(default=None, ge=1)
    """The largest number of rows of an answer. Left out, there is no limit."""

    bytes_max: Annotated[int | None, Optional] = Field(default=None, ge=1)
    """The largest number of bytes of an answer, as it is sent. Left out, there is no limit."""

    seconds_max: float = Field(default=300, gt=0, allow_inf_nan=False)
    """The time in seconds that a query may take until its last row is sent."""

    body_bytes_max: int = Field(default=1024 * 1024, ge=1)
    """The largest size of a request's body, in bytes."""

    upload_bytes_max: int = Field(default=10 * 1024**3, ge=1)
    """The largest size of an uploaded CSV file, in bytes."""

    files_max: int = Field(default=16, ge=1, le=1_000)
    """The number of files that are uploaded or downloaded at once. More files have to wait."""

    file_seconds_max: float = Field(default=3_600, gt=0, allow_inf_nan=False)
    """The time in seconds that the upload or download of a file may take."""

    client_stall_seconds_max: float = Field(default=60, gt=0, allow_inf_nan=False)
    """The time in seconds without any progress of a client, after which the service closes its connection."""

    shutdown_seconds_max: int = Field(default=20, ge=0)
    """The time in seconds for which running queries may continue after SIGTERM."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file contradict each other: give one")
        if self.token is not None:
            check_token(self.token, "token")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together: give both, or none")
        if self.job_tokens_file is not None and self.job_threads is None:
            raise ValueError("job_tokens_file is for starting jobs: give job_threads, too")
        if self.token is None and self.token_file is None and not is_loopback(self.host):
            raise ValueError(
                f"on {self.host} any machine could query: give a token (token_file), or listen on 127.0.0.1"
            )
        return self

    @property
    def statements_max(self) -> int:
        """The number of SQL statements that a worker runs at once, each in its own process.

        It is 0 if statements run in the worker's own process.
        """
        count = min(max(os.cpu_count() or 1, 2), 8) if self.sql_workers is None else self.sql_workers
        return -(-count // self.workers)

    @property
    def queries_here(self) -> int:
        """The number of queries by key that a worker runs at once."""
        return -(-self.queries_max // self.workers)

    @property
    def files_here(self) -> int:
        """The number of files that a worker sends or receives at once."""
        return -(-self.files_max // self.workers)

    @property
    def secret(self) -> str | None:
        """The token, read from its file if there is one; None without a token.

        Raises `InvalidInput` if the file cannot be read or contains no valid token.
        """
        if self.token_file is None:
            return self.token
        try:
            check_private(self.token_file)
            text = self.token_file.read_text("utf-8").strip()
            check_token(text, "it")
        except OSError as error:
            raise InvalidInput(f"cannot read the token file {self.token_file}: {error.strerror}") from None
        except InvalidInput:
            raise
        except ValueError:
            raise InvalidInput(
                f"the token file {self.token_file} has no token: one line of A-Z a-z 0-9 - . _ ~ + / ="
            ) from None
        return text


@dataclass(frozen=True, slots=True)
class Holder:
    """The rights of a token's holder.

    With `owner` None, the holder sees all jobs, otherwise only those of this owner. With `kinds` None, the
    holder may start jobs of all kinds.
    """

    owner: str | None = None
    kinds: frozenset[str] | None = None


def read_holders(path: Path, kinds_known: Collection[str]) -> dict[str, Holder]:
    """Returns the holders of the tokens in a file, by their tokens.

    Raises `InvalidInput` if the file cannot be read, for a wrong line, which it names, or for a file without
    tokens.
    """
    try:
        check_private(path)
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidInput(f"cannot read the file of tokens {path}: {reason}") from None
    found: dict[str, Holder] = {}
    for number, line in enumerate(lines, 1):
        if not (parts := line.partition("#")[0].split()):
            continue
        if len(parts) != 3 or not _TOKEN.fullmatch(parts[2]):
            raise InvalidInput(
                f"line {number} of {path}: write NAME KIND,KIND TOKEN, like: etl ingest,compact …"
            )
        name, kinds, token = parts
        if token in found:
            raise InvalidInput(f"line {number} of {path} has the token of another line")
        if kinds != "*" and (unknown := sorted(set(kinds.split(",")) - set(kinds_known))):
            raise InvalidInput(
                f"line {number} of {path}: kind {unknown[0]!r} is none of {', '.join(kinds_known)}"
            )
        found[token] = Holder(name, None if kinds == "*" else frozenset(kinds.split(",")))
    if not found:  # without any token, every client would have all rights
        raise InvalidInput(f"{path} has no token: write NAME KIND,KIND TOKEN, like: etl ingest,compact …")
    return found


def check_private(path: Path) -> None:
    """Raises `InvalidInput` if every user of the machine can read a file with tokens.

    Raises `OSError` if there is no such file.
    """
    if path.stat().st_mode & stat.S_IROTH:
        raise InvalidInput(f"other users can read {path}, which has a token: chmod o-rwx {path}")


def check_token(text: str, what: str) -> None:
    """Raises `ValueError` if an `Authorization` header cannot contain a token.

    The message calls the token `what`.
    """
    if not _TOKEN.fullmatch(text):
        raise ValueError(f"{what} must be of A-Z a-z 0-9 - . _ ~ + / and = at its end")


def is_loopback(host: str) -> bool:
    """Returns whether an address is one that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def load_service_settings(**overrides: Any) -> ServiceSettings:
    """Returns the settings in the environment variables, except those in `overrides` that are not None.

    Raises `InvalidInput`, which names each wrong setting and any unknown variable.
    """
    _check_names(environment())
    return load(ServiceSettings, {name: value for name, value in overrides.items() if value is not None})


def _check_names(variables: Iterable[str]) -> None:
    """Raises `InvalidInput` for an unknown variable with the service's prefix.

    A misspelt one would have no effect.
    """
    known = [f"{SERVICE_PREFIX}{name.upper()}" for name in ServiceSettings.model_fields]
    for name in variables:
        if name.upper().startswith(SERVICE_PREFIX) and name.upper() not in known:
            nearest = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0)[0]
            raise InvalidInput(f"{name} is not a setting of the service: unset it, or name it {nearest}")
