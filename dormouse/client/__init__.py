"""The HTTP client of a query service, whose tables have the methods of local tables.

from dormouse.client import connect

with connect("http://127.0.0.1:8088") as client:
    flights = client.table("flights")
    print(flights.query(where={"carrier": "AA"}, limit=10).read_all())
"""

from dormouse.errors import not_installed

try:
    from dormouse.client.client import Client, RemoteTable, connect
except ModuleNotFoundError as error:
    if error.name not in {"httpx", "pyarrow"}:
        raise
    raise not_installed(str(error.name), "client") from None

__all__ = ["Client", "RemoteTable", "connect"]
