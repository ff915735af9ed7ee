"""Who is answered: whoever has the token that the app prints."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_REFUSED = "The address that `nest-megatron app` printed, with its token, opens this page.\n"


class WithToken:
    """An application for those who have a token: in the address once, from then on in a cookie.

    Other users of the machine, and pages of other sites in the user's browser, have neither.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a connection (https://asgi.readthedocs.io/en/latest/specs/main.html)."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        asked = HTTPConnection(scope)
        name = f"nest_megatron_{asked.url.port}"  # a cookie is sent to every port of its host
        is_page = scope["type"] == "http"
        if is_page and self._is_token(asked.query_params.get("token")):
            admitted = RedirectResponse("/", status_code=303)  # out of the address bar
            admitted.set_cookie(name, self._token.decode(), httponly=True, samesite="lax")
            await admitted(scope, receive, send)
        elif self._is_token(asked.cookies.get(name)):
            await self.app(scope, receive, send)
        elif is_page:
            await PlainTextResponse(_REFUSED, status_code=403)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_token(self, text: str | None) -> bool:
        return secrets.compare_digest((text or "").encode(), self._token)
