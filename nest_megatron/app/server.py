"""The server of the page, on an address of this machine."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import multiprocessing
import secrets
import socket
import threading
import webbrowser
from collections.abc import Collection
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.packages import require_package
from nest_megatron.printing import print_to_stderr
from nest_megatron.report.console import say


def serve(host: str, port: int, *, opens_browser: bool) -> None:
    """Serve the page until Ctrl-C.

    Args:
        host: address to listen on.
        port: 0 is a free one.

    Raises:
        UserInputError: if nicegui is not installed, or the address cannot be listened on.
    """
    limit = "the page is served by nicegui, which is not installed"
    require_package("nicegui", "app", "app", limit)
    with listen(host, port) as listening:
        bound, port = listening.getsockname()[:2]
        is_local = ipaddress.ip_address(bound).is_loopback
        token = secrets.token_urlsafe(24)
        names = () if is_local else (host, socket.gethostname(), socket.getfqdn())
        server = _server(token, names, is_local=is_local)
        if not is_local:
            warning = (
                f"warning: --host {host}: whoever has the address below can plan on this machine "
                "and read what comes of it, and nothing is encrypted; files are not read."
            )
            print_to_stderr(warning)
        shown = f"[{host}]" if ":" in host else host
        if ipaddress.ip_address(bound).is_unspecified:
            shown = socket.gethostname()
        address = f"http://{shown}:{port}/?token={token}"
        with contextlib.suppress(KeyboardInterrupt):
            say(f"{address}\nCtrl-C ends it.")
            if opens_browser:
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
            server.run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; connections wait until they are served.

    Raises:
        UserInputError: for an address that is taken, or none of this machine.
    """
    if not host.strip():  # sockets take it for every address of the machine
        raise _no_host(host, "it is empty")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            limit = f"another program listens there on {host}, perhaps another nest-megatron app"
            fix = "Open the address that it printed, or take a free port: --port 0 finds one."
            raise UserInputError("--port", port, limit, fix) from error
        if error.errno == errno.EACCES:
            limit = "ports below 1024 are the administrator's as a rule"
            raise UserInputError("--port", port, limit, "--port 0 finds a free one.") from error
        raise _no_host(host, f"it cannot be listened on: {error.strerror or error}") from error
    except TypeError as error:  # bytes that are no text
        raise _no_host(host, f"it cannot be listened on: {error}") from error


def _no_host(host: str, limit: str) -> UserInputError:
    fix = "Name an address of this machine, or leave it out for this machine alone."
    return UserInputError("--host", host, limit, fix)


def _server(token: str, names: Collection[str], *, is_local: bool) -> Any:
    """The server: a page for each tab, behind the token."""
    import uvicorn
    from fastapi import FastAPI
    from nicegui import app, ui

    from nest_megatron.app.access import WithToken
    from nest_megatron.app.page import Page

    def build() -> None:
        Page(is_local=is_local)

    pages = FastAPI(openapi_url=None)
    title = "nest-megatron"
    ui.run_with(pages, root=build, title=title, dark=None, show_welcome_message=False)
    app.on_shutdown(_end_runs)
    guarded = WithToken(pages, token, names)
    config = uvicorn.Config(guarded, log_level="warning", timeout_graceful_shutdown=1)
    return uvicorn.Server(config)


def _end_runs() -> None:
    for process in multiprocessing.active_children():
        process.terminate()
