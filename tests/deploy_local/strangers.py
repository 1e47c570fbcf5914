"""Logins that the database must refuse. They show that TLS and tokens are checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import psycopg
from psycopg.conninfo import make_conninfo

from dormouse.aws.instance import environment
from dormouse.errors import DormouseError
from dormouse.postgres.session import Isolation, session_conninfo, with_token
from tests.deploy_local.cloud import Cloud
from tests.deploy_local.processes import RunFailed
from tests.support.aws import DeployedInstance


def check_refused(cloud: Cloud, deployed: DeployedInstance) -> str:
    """Tries each login that must be refused. Raises RunFailed with the names of the logins that succeed."""
    dsn = environment(deployed, "dormouse_run")["DORMOUSE_DSN"]
    trusting = f"{dsn}&sslrootcert={cloud.database.certificates}"
    owners = trusting.replace("dormouse_run@", "dormouse_owner@")
    tries: dict[str, Callable[[], object]] = {
        "a client without TLS": lambda: _connect(_with_token(trusting), sslmode="disable"),
        "a server of another authority": lambda: _connect(_with_token(dsn)),
        "a password that is no token": lambda: _connect(_with_token(trusting), password="letmein"),  # noqa: S106
        "a token of another role": lambda: _connect(_with_token(owners), user="dormouse_run"),
        "a token with another signature": lambda: _connect(_forged(_with_token(trusting))),
        "a token for a role without the right": lambda: _connect(
            _with_token(trusting.replace("dormouse_run@", "dormouse_schema@"))
        ),
    }
    _connect(_with_token(trusting)).close()  # a valid login succeeds
    got_in = [name for name, attempt in tries.items() if _gets_in(attempt)]
    if got_in:
        raise RunFailed(f"the database let in {', '.join(got_in)}")
    return f"{len(tries)} kinds"


def _with_token(dsn: str) -> str:
    conninfo = session_conninfo(
        dsn, application_name="stranger", read_only=False, isolation=Isolation.READ_COMMITTED
    )
    return with_token(conninfo)


def _forged(conninfo: str) -> str:
    password = str(psycopg.conninfo.conninfo_to_dict(conninfo)["password"])
    return make_conninfo(conninfo, password=password[:-4] + ("0000" if password[-4:] != "0000" else "1111"))


def _connect(conninfo: str, **other: str) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(make_conninfo(conninfo, **other))


def _gets_in(attempt: Callable[[], object]) -> bool:
    with suppress(psycopg.OperationalError, DormouseError):
        attempt()
        return True
    return False
