"""Who reaches the app, and how it begins and ends."""

from __future__ import annotations

import http.client
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from nest_megatron.app.server import listen
from nest_megatron.errors import UserInputError
from tests.app.served import Served, served
from tests.cli.runs import run


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("app")) as started:
        yield started


def status(address: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_nobody_is_answered_without_the_token(app: Served) -> None:
    for path in ("", "?token=", "?token=x", "?token=%C3%A9", "_nicegui_ws/socket.io/", "x"):
        assert status(app.origin + path) == 403
    name = f"nest_megatron_{urlsplit(app.origin).port}"
    assert status(app.origin, Cookie=f"{name}=x") == 403


def test_no_socket_opens_without_the_token(app: Served) -> None:
    where = urlsplit(app.origin)
    connection = http.client.HTTPConnection(where.hostname or "", where.port)
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    key = {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    path = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    connection.request("GET", path, headers={**upgrade, **key})
    assert connection.getresponse().status == 403
    connection.close()


def test_no_page_of_another_site_asks_or_shows_this_one(app: Served) -> None:
    where = urlsplit(app.origin)
    cookie = f"nest_megatron_{where.port}={app.address.partition('token=')[2]}"
    own = f"http://{where.netloc}"
    assert status(app.origin, Cookie=cookie, Origin=own) == 200
    assert status(app.origin, Cookie=cookie, Host=f"localhost:{where.port}") == 200
    for headers in (
        {"Origin": "http://other.example"},
        {"Origin": f"http://localhost:{where.port}"},  # another program of this name and port
        {"Origin": "null"},
        {"Host": f"rebound.example:{where.port}"},
        {"Host": f"rebound.example:{where.port}", "Origin": f"http://rebound.example:{where.port}"},
    ):
        assert status(app.origin, Cookie=cookie, **headers) == 403, headers
    request = urllib.request.Request(app.origin, headers={"Cookie": cookie})
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Cookie": cookie}
    for origin, answered in ((own, 101), ("http://other.example", 403), ("null", 403)):
        connection = http.client.HTTPConnection(where.hostname or "", where.port)
        path = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
        connection.request("GET", path, headers={**upgrade, "Origin": origin})
        assert connection.getresponse().status == answered, origin
        connection.close()


def test_the_token_becomes_a_cookie_of_this_site_alone(app: Served) -> None:
    jar = CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    with opener.open(app.address) as answer:
        assert answer.url == app.origin  # the token is no longer in the address
        assert "nest-megatron" in answer.read().decode()
    (cookie,) = jar
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert cookie.get_nonstandard_attr("SameSite") == "lax"
    assert app.address.partition("token=")[2] == cookie.value


def test_only_this_machine_is_served_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with served(tmp_path) as started:
        assert urlsplit(started.origin).hostname == "127.0.0.1"
        assert status(started.origin) == 403  # it is served
        started.process.send_signal(signal.SIGINT)
        _, err = started.process.communicate()
        assert started.process.returncode == 0
    assert err == ""
    assert not list(tmp_path.iterdir())


def test_other_machines_are_served_with_a_warning(tmp_path: Path) -> None:
    with served(tmp_path, "--host", "0.0.0.0") as started:
        port = urlsplit(started.origin).port
        assert status(f"http://127.0.0.1:{port}") == 403  # it is served
        started.process.send_signal(signal.SIGINT)
        _, err = started.process.communicate()
        assert started.process.returncode == 0
    assert err.startswith("warning: --host 0.0.0.0: whoever has the address below")


def test_an_address_that_is_taken_or_not_ours_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserInputError, match=f"--port = {port}: another program") as raised:
            listen("127.0.0.1", port)
    assert "--port 0" in raised.value.fix
    with pytest.raises(UserInputError, match="--host = '': it is empty"):
        listen("", 0)
    for host in ("192.0.2.1", "no such host", "\udcff"):
        with pytest.raises(UserInputError, match=r"--host = .*: it cannot be listened") as raised:
            listen(host, 0)


def test_a_second_app_on_the_same_port_says_so(app: Served) -> None:
    done = run("app", "--port", str(urlsplit(app.origin).port), "--no-browser")
    assert (done.code, done.out) == (2, "")
    assert "perhaps another nest-megatron app" in done.err


def test_without_the_library_the_command_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nicegui", None)  # type: ignore[arg-type]
    done = run("app")
    assert (done.code, done.out) == (2, "")
    assert "nicegui, which is not installed" in done.err
    assert "pip install 'nest-megatron[app]'" in done.err
