"""HEAD where GET is served: the same answer without its body, which the server's protocol leaves out."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send


class Heads:
    """Has the app within answer HEAD as GET; `is_head` of the state says that no body is wanted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        scope["state"]["is_head"] = True
        within = {**scope, "method": "GET"}
        try:
            await self._app(within, receive, send)
        finally:
            scope["route"] = within.get("route")


def methods_of(routers: Iterable[APIRouter], scope: Scope) -> list[str]:
    """Returns the methods that a path takes; each of them is a route of its own."""
    routes = (route for router in routers for route in router.routes if isinstance(route, APIRoute))
    found = {
        method for route in routes if route.matches(scope)[0] != Match.NONE for method in route.methods or ()
    }
    return sorted(found | ({"HEAD"} if "GET" in found else set()))
