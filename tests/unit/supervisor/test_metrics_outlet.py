"""Metrics over HTTP and in a file: who may read them, and what a bad reader or disk can do."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_ft.core.errors import ConfigError
from megatron_ft.supervisor import metrics_outlet
from megatron_ft.supervisor.metrics_outlet import MetricsFile, MetricsServer, outlet

TOKEN = "0123456789abcdef"
PAGE = b"megatron_ft_iteration 7\n"
SECONDS = 20.0
"""Limit of each wait for an answer over the loopback interface."""


def page(accept: str) -> tuple[bytes, str]:
    return PAGE, f"text/plain; asked={accept}"


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(closing: ExitStack, token: str = "") -> MetricsServer:
    server = MetricsServer(page, 0, token)
    closing.callback(server.close)
    return server


def get(server: MetricsServer, path: str = "/metrics", **headers: str) -> tuple[int, bytes, str]:
    address = f"http://127.0.0.1:{server.port}{path}"
    request = urllib.request.Request(address, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=SECONDS) as answer:
            return answer.status, answer.read(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        return error.code, b"", ""


def test_server_gives_the_page_in_the_form_that_is_asked_for(closing: ExitStack) -> None:
    answer = get(serve(closing), Accept="application/openmetrics-text")
    assert answer == (200, PAGE, "text/plain; asked=application/openmetrics-text")


def test_server_has_one_path(closing: ExitStack) -> None:
    assert get(serve(closing), "/")[0] == 404


def test_server_without_token_is_for_this_machine(closing: ExitStack) -> None:
    assert serve(closing)._server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "status"),
    [("", 401), (f"Bearer {TOKEN}x", 401), (TOKEN, 401), (f"Bearer {TOKEN}", 200)],
)
def test_server_with_token_refuses_others(closing: ExitStack, given: str, status: int) -> None:
    headers = {"Authorization": given} if given else {}
    assert get(serve(closing, TOKEN), **headers)[0] == status


def test_server_refuses_scrapers_beyond_its_limit(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scrapers that say nothing hold their places; another one is turned away, then served."""
    monkeypatch.setattr(metrics_outlet, "MOST_SCRAPERS", 2)
    server = serve(closing)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    while server._server._free._value:  # both connections have been accepted
        threading.Event().wait(0.01)
    with pytest.raises(OSError, match=r"closed|reset|refused"):
        get(server)
    for one in silent:
        one.close()
    while server._server._free._value < 2:
        threading.Event().wait(0.01)
    assert get(server)[0] == 200


def test_server_names_a_port_in_use(closing: ExitStack) -> None:
    port = serve(closing).port
    with pytest.raises(ConfigError, match=rf"--metrics {port}: .*in use"):
        MetricsServer(page, port)


def test_file_is_readable_by_node_exporter(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    MetricsFile(page, path).close()
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (PAGE, 0o644)


def test_file_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.prom: not written"):
        MetricsFile(page, tmp_path / "absent" / "job.prom")


def test_file_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = MetricsFile(page, tmp_path / "job.prom")

    def fails(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics_outlet, "replace_file", fails)
    file._write()
    file._write()
    assert caplog.text.count("No space left") == 1
    file.close()


@pytest.mark.parametrize(
    ("where", "token", "message"),
    [
        ("0", None, "from 1 to 65535"),
        ("70000", None, "from 1 to 65535"),
        ("-5", None, "from 1 to 65535"),
        ("job.prom", TOKEN, "names a file"),
        ("9400", "short", "has 5 characters, and needs 16"),
        ("9400", "\u00e9" * 16, "ascii"),
    ],
)
def test_outlet_refuses(tmp_path: Path, where: str, token: str | None, message: str) -> None:
    file = None
    if token is not None:
        file = tmp_path / "token"
        file.touch(mode=0o600)
        file.write_text(token)
    with pytest.raises(ConfigError, match=message):
        outlet(page, where, file)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--metrics-token-file .*absent: .*No such file"):
        outlet(page, "9400", tmp_path / "absent")
