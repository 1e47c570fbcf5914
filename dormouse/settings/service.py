"""The settings of the query service, from the environment; options of `dormouse serve` override them."""

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
    """The settings of the query service, built by `load_service_settings`.

    Each field is a variable with the prefix `DORMOUSE_SERVICE_`. All but the token are also options of
    `dormouse serve`, with the text below the field as their help.
    """

    model_config = SettingsConfigDict(
        env_prefix=SERVICE_PREFIX,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    host: str = Field(default="127.0.0.1", min_length=1)
    """The address to listen on; any but a loopback address needs a token."""

    port: int = Field(default=8088, ge=0, le=65_535)
    """The port to listen on; 0 takes a free one."""

    token: Annotated[str | None, Optional] = Field(default=None, repr=False)
    """The bearer token that requests must have."""

    token_file: Annotated[Path | None, Optional] = None
    """A file with the token, in place of DORMOUSE_SERVICE_TOKEN."""

    job_threads: Annotated[int | None, Optional] = Field(default=None, ge=0, le=1_000)
    """The number of jobs of each kind that run here at once; with 0, other processes run them. If it is not
    given, the service takes no jobs and writes nothing."""

    job_tokens_file: Annotated[Path | None, Optional] = None
    """A file with tokens that may start jobs: NAME KIND,KIND TOKEN on each line, * for all kinds. Holders of
    these tokens see their own jobs; the holder of the other token sees all. The kind `payloads` allows to
    read and write payloads."""

    tls_certificate: Annotated[Path | None, Optional] = None
    """The certificate, with its chain, as PEM; with it, the service speaks HTTPS."""

    tls_key: Annotated[Path | None, Optional] = None
    """The certificate's private key, as PEM without a password."""

    connections_max: int = Field(default=1_000, ge=1, le=100_000)
    """The largest number of connections; less if the process may not open enough files. If there are more,
    one that has shown no token is closed."""

    workers: int = Field(default=1, ge=1, le=64)
    """The number of processes that serve; they share the limits below. One for each core serves the most
    look-ups."""

    queries_max: int = Field(default=16, ge=1, le=1_000)
    """The number of queries by key that run at once; more have to wait. With sql_workers = 0, SQL statements
    count, too."""

    sql_workers: Annotated[int | None, Optional] = Field(default=None, ge=0, le=100)
    """The number of SQL statements that run at once, each in its own process; by default one for each core,
    at least 2 and at most 8. With 0 they run in the service's process, which a statement can then crash."""

    sql_memory_bytes_max: Annotated[int | None, Optional] = Field(default=None, ge=SQL_MEMORY_BYTES_MIN)
    """The memory of a process that runs SQL; by default an equal share of half of the machine's memory."""

    sql_spill_bytes_max: Annotated[int | None, Optional] = Field(default=None, ge=0)
    """The disk space that a process that runs SQL may spill to; by default an equal share of half of the free
    space."""

    sql_threads: Annotated[int | None, Optional] = Field(default=None, ge=1, le=1_000)
    """The number of threads of a statement; by default one for each core."""

    queue_seconds_max: float = Field(default=5, ge=0, allow_inf_nan=False)
    """The time in seconds that a query waits for its turn before it is refused."""

    rows_max: Annotated[int | None, Optional] = Field(default=None, ge=1)
    """The largest number of rows of an answer; without limit if it is not given."""

    bytes_max: Annotated[int | None, Optional] = Field(default=None, ge=1)
    """The largest number of bytes of an answer, as it is sent; without limit if it is not given."""

    seconds_max: float = Field(default=300, gt=0, allow_inf_nan=False)
    """The time in seconds that a query may take until its last row is sent."""

    body_bytes_max: int = Field(default=1024 * 1024, ge=1)
    """The largest size of a request's body, in bytes."""

    upload_bytes_max: int = Field(default=10 * 1024**3, ge=1)
    """The largest size of a CSV file that is uploaded, in bytes."""

    files_max: int = Field(default=16, ge=1, le=1_000)
    """The number of files that are uploaded or downloaded at once; more have to wait."""

    file_seconds_max: float = Field(default=3_600, gt=0, allow_inf_nan=False)
    """The time in seconds that the upload or download of a file may take."""

    client_stall_seconds_max: float = Field(default=60, gt=0, allow_inf_nan=False)
    """The time in seconds that a client may neither read nor send before it is cut off."""

    shutdown_seconds_max: int = Field(default=20, ge=0)
    """The time in seconds that running queries may go on after SIGTERM."""

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
        """The number of statements that a worker runs at once, each in its own process; 0: in the worker
        itself.
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
        """The token, or the content of its file. Raises `InvalidInput` if the file has none."""
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
    """The rights of a token's holder: `owner` None sees all jobs; `kinds` None starts all kinds."""

    owner: str | None = None
    kinds: frozenset[str] | None = None


def read_holders(path: Path, kinds_known: Collection[str]) -> dict[str, Holder]:
    """Returns the holders in a file, by their tokens. Raises `InvalidInput` that names a wrong line."""
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
    """Raises `InvalidInput` if all users of the machine can read a file of tokens. Raises OSError."""
    if path.stat().st_mode & stat.S_IROTH:
        raise InvalidInput(f"other users can read {path}, which has a token: chmod o-rwx {path}")


def check_token(text: str, what: str) -> None:
    """Raises ValueError for a text that is not valid in an `Authorization` header."""
    if not _TOKEN.fullmatch(text):
        raise ValueError(f"{what} must be of A-Z a-z 0-9 - . _ ~ + / and = at its end")


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def load_service_settings(**overrides: Any) -> ServiceSettings:
    """Returns the settings of the environment, with overrides that are not None. Raises InvalidInput."""
    _check_names(environment())
    return load(ServiceSettings, {name: value for name, value in overrides.items() if value is not None})


def _check_names(variables: Iterable[str]) -> None:
    """Raises InvalidInput for an unknown variable: a misspelt one would have no effect."""
    known = [f"{SERVICE_PREFIX}{name.upper()}" for name in ServiceSettings.model_fields]
    for name in variables:
        if name.upper().startswith(SERVICE_PREFIX) and name.upper() not in known:
            nearest = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0)[0]
            raise InvalidInput(f"{name} is not a setting of the service: unset it, or name it {nearest}")
