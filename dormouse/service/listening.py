"""The socket that a service listens on."""

from __future__ import annotations

import os
import socket

from dormouse.errors import InstanceError

CONNECTIONS_WAITING_MAX = 1_024


def listening(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bound, and not listening yet; several processes may have the same when `shared`. `InstanceError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            found.bind(address[:2])
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise InstanceError(f"cannot listen on {host}:{port}: {_reason(error)}") from None
    return found


def _reason(error: OSError) -> str:
    """Without what `socket` adds; what a name does not resolve to is no error of the system."""
    return str(error.strerror) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
