"""Who is answered: whoever has the token that the app prints, on pages of the app alone."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Collection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: No page of another site shows this one in a frame, and none learns its address.
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_ELSEWHERE = "This page is not asked for by a name of this machine, or by another site.\n"
_REFUSED = "The address that `nest-megatron app` printed, with its token, opens this page.\n"


class WithToken:
    """An application for those who have a token: in the address once, from then on in a cookie.

    Other users of the machine, and pages of other sites in the user's browser, have neither. Asked
    for by a name that is none of this machine (DNS rebinding), or by a page of another origin, it
    answers nobody.

    Args:
        names: of this machine; its addresses are names too.
    """

    def __init__(self, app: ASGIApp, token: str, names: Collection[str]) -> None:
        self.app, self._token = app, token.encode()
        self._names = frozenset(name.lower() for name in ("localhost", *names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a connection (https://asgi.readthedocs.io/en/latest/specs/main.html)."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        connection, plain_send = HTTPConnection(scope), send

        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await plain_send(message)

        send = send_headers
        name = f"nest_megatron_{connection.url.port}"  # a cookie is sent to every port of its host
        is_page = scope["type"] == "http"
        if not self._is_own(connection):
            await _refuse(_ELSEWHERE, scope, receive, send)
        elif is_page and self._is_token(connection.query_params.get("token")):
            admitted = RedirectResponse("/", status_code=303)  # out of the address bar
            admitted.set_cookie(name, self._token.decode(), httponly=True, samesite="lax")
            await admitted(scope, receive, send)
        elif self._is_token(connection.cookies.get(name)):
            await self.app(scope, receive, send)
        else:
            await _refuse(_REFUSED, scope, receive, send)

    def _is_own(self, connection: HTTPConnection) -> bool:
        """Whether a page of this machine's own asks, by one of its names or addresses."""
        host, origin = connection.headers.get("host", ""), connection.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return False
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or ipaddress.ip_address(name) is not None
        except ValueError:
            return False

    def _is_token(self, text: str | None) -> bool:
        return secrets.compare_digest((text or "").encode(), self._token)


async def _refuse(text: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await PlainTextResponse(text, status_code=403)(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008})
