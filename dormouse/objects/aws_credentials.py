"""AWS credentials from wherever AWS's own tools take them: profiles, SSO, roles of containers and machines.

obstore and DataFusion know keys in options and in the environment, and some of the rest; botocore knows all,
where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from dormouse.settings import environment

_OF_READERS = {"region", "access_key_id", "secret_access_key", "session_token", "endpoint"}


def provider(options: Mapping[str, str]) -> dict[str, Any]:
    """Options of an obstore client: what renews credentials, and the region; {} leaves it to obstore."""
    credentials = _found(options)
    if credentials is None:
        return {}
    return {"credential_provider": _renewing(credentials), **_region(options)}


def current(options: Mapping[str, str]) -> dict[str, str]:
    """Credentials as they are now, as options; {} where the reader finds them itself."""
    credentials = _found(options)
    if credentials is None:
        return {}
    keys = credentials.get_frozen_credentials()
    found = {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key, **_region(options)}
    return found | ({"session_token": keys.token} if keys.token else {})


def s3_options(options: Mapping[str, str]) -> dict[str, str]:
    """What a reader of S3 is given; the rest it takes from AWS's variables, as the store itself does."""
    return current(options) | {key: value for key, value in options.items() if key in _OF_READERS}


def _found(options: Mapping[str, str]) -> Any:
    if "access_key_id" in options or "AWS_ACCESS_KEY_ID" in environment():
        return None  # both know these themselves, and botocore takes a while to load
    session = _session()
    return None if session is None else session.get_credentials()


def _renewing(credentials: Any) -> Callable[[], dict[str, Any]]:
    def give() -> dict[str, Any]:
        keys = credentials.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": getattr(credentials, "_expiry_time", None),
        }

    return give


def _region(options: Mapping[str, str]) -> dict[str, str]:
    found = None if "region" in options else _session().get_config_variable("region")
    return {"region": found} if found else {}


@cache
def _session() -> Any:
    try:
        import botocore.session
    except ImportError:
        return None
    return botocore.session.get_session()
