"""``nest-megatron app``; its work is in ``nest_megatron.app``."""

from __future__ import annotations

import click

from nest_megatron.cli.command_kinds import command, flag, option


@command("nest-megatron app", "nest-megatron app --port 0 --no-browser")
@option(
    "--host",
    "Address to listen on. If other machines can reach it, everybody who has the printed "
    "address can plan; file paths and commands are then refused.",
    default="127.0.0.1",
    show_default=True,
)
@option(
    "--port",
    "Port to listen on; 0 takes a free one.",
    click.IntRange(0, 65535),
    default=8642,
    show_default=True,
)
@flag("--no-browser", "Only print the address.")
def app(host: str, port: int, no_browser: bool) -> None:
    """Plan in the browser: a form for a model or a command, and the report of its plan.

    Needs nicegui (the extra app), listens on this machine only, and ends with Ctrl-C.
    """
    from nest_megatron.app.server import serve

    serve(host, port, opens_browser=not no_browser)
