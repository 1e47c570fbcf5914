"""Aurora with IAM authentication: `rds-iam://user@host:5432/database?region=eu-west-1` as a DSN.

The password is a token that AWS credentials sign, made anew for each connection, since it ends after 15
minutes. The server's certificate is checked against those of Amazon RDS in rds-ca-bundle.pem, unless the DSN
says otherwise by sslrootcert. An RDS Proxy takes no settings when a session starts: with `proxy=true` in the
DSN they are left to those of the database role.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dormouse.errors import InstanceError, InvalidInput
from dormouse.settings.certificates import CA_BUNDLE

SCHEME = "rds-iam"
TOKEN_SECONDS = 900
_PLACEHOLDER = "rds-iam in "
_BY_PROXY = " by proxy"
_DEFAULT_PORT = "5432"


def to_conninfo(dsn: str) -> str:
    """The DSN as libpq knows it, with the region in place of the password; any other DSN as it is."""
    if not dsn.startswith(f"{SCHEME}://"):
        return dsn
    from dormouse.settings.section import CONNECT_SECONDS_MAX  # loads the models of a deployment's settings

    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query))
    region, by_proxy = query.pop("region", ""), query.pop("proxy", "false") == "true"
    if not (region and parts.username and parts.hostname and not parts.password):
        raise InvalidInput(f"the DSN must be like {SCHEME}://user@host:5432/database?region=eu-west-1")
    defaults = {
        "sslmode": "verify-full",
        "sslrootcert": str(CA_BUNDLE),
        "connect_timeout": str(CONNECT_SECONDS_MAX),
    }
    plain = urlunsplit(("postgresql", parts.netloc, parts.path, urlencode({**defaults, **query}), ""))
    return make_conninfo(plain, password=_PLACEHOLDER + region + _BY_PROXY * by_proxy)


def by_token(conninfo: str, region: str) -> str:
    """The connection string with tokens in place of its password."""
    return make_conninfo(conninfo, password=_PLACEHOLDER + region)


def with_token(conninfo: str) -> str:
    """The connection string to connect with now; raises InstanceError without AWS credentials."""
    if _PLACEHOLDER not in conninfo:
        return conninfo
    given = conninfo_to_dict(conninfo)
    password = str(given.get("password") or "")
    if not password.startswith(_PLACEHOLDER):
        return conninfo
    host, port, user = given["host"], given.get("port") or _DEFAULT_PORT, given["user"]
    region = password.removeprefix(_PLACEHOLDER).removesuffix(_BY_PROXY)
    given["password"] = _token(str(host), str(port), str(user), region)
    if password.endswith(_BY_PROXY):
        given.pop("options", None)
    return make_conninfo("", **given)


def is_by_rds_proxy(conninfo: str) -> bool:
    """Whether an RDS Proxy is between, which keeps each client's prepared statements apart."""
    return _PLACEHOLDER in conninfo and _BY_PROXY in conninfo


def _token(host: str, port: str, user: str, region: str) -> str:
    from botocore.model import ServiceId
    from botocore.signers import RequestSigner

    session = _session()
    credentials = session.get_credentials()
    if credentials is None:
        raise InstanceError(
            f"there are no AWS credentials to connect to {host} with: set AWS_PROFILE, or log in"
        )
    emitter = session.get_component("event_emitter")
    signer = RequestSigner(ServiceId("RDS"), region, "rds-db", "v4", credentials, emitter)
    request = {
        "method": "GET",
        "url": f"https://{host}:{port}/?{urlencode({'Action': 'connect', 'DBUser': user})}",
        "body": {},
        "headers": {},
        "context": {},
    }
    url = signer.generate_presigned_url(request, operation_name="connect", expires_in=TOKEN_SECONDS)
    return str(url).removeprefix("https://")


@cache
def _session() -> Any:
    """It keeps credentials, and refreshes them."""
    import botocore.session

    return botocore.session.get_session()
