"""Serves a page of metrics over HTTP, or writes it to a file for node_exporter.

Both work in threads of their own: a scraper that hangs, or a full disk, never holds the job up.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron_ft.core.errors import ConfigError, UntrustedFileError
from megatron_ft.core.private_files import read_file, replace_file

log = logging.getLogger(__name__)

FILE_SECONDS = 10.0
"""Interval at which the file is written anew."""
SCRAPE_SECONDS = 10.0
"""Longest wait for a scraper's request and for its reading of the answer."""
MOST_SCRAPERS = 16
"""Connections served at once; further ones are closed."""
LEAST_TOKEN = 16

Page = Callable[[str], tuple[bytes, str]]
"""Returns the metrics and their content type; its argument is the scraper's ``Accept``."""


class MetricsServer:
    """Serves ``page`` at ``/metrics``.

    Without a token only this machine can reach it.  With one, all can, and each request needs it
    as ``Authorization: Bearer``.  Raises ConfigError if the port cannot be opened.
    """

    def __init__(self, page: Page, port: int, token: str = "") -> None:
        handler = type("_Handler", (_Handler,), {"page": staticmethod(page), "token": token})
        try:
            self._server = _Server(("" if token else "127.0.0.1", port), handler)
        except OSError as error:
            raise ConfigError(
                f"--metrics {port}: the port cannot be opened ({error.strerror}); give another one"
            ) from error
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="megatron-ft-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the port; scrapes under way end by themselves."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self._free = threading.BoundedSemaphore(MOST_SCRAPERS)
        super().__init__(address, handler)

    def verify_request(self, request: object, client_address: object) -> bool:
        """Refuse a connection beyond MOST_SCRAPERS."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: object, client_address: object) -> None:
        """Serve one connection, then free its place."""
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log it; the default prints a traceback on the job's console."""
        log.debug("a scrape from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = SCRAPE_SECONDS
    page: Page
    token: str

    def do_GET(self) -> None:
        """Answer a scrape."""
        given = self.headers.get("Authorization", "")
        if self.token and not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            self.send_error(HTTPStatus.UNAUTHORIZED)
        elif self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "the metrics are at /metrics")
        else:
            page, content_type = self.page(self.headers.get("Accept", ""))
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not news."""


class MetricsFile:
    """Writes ``page`` to a file every ten seconds.  A failed write is logged once and repeated."""

    def __init__(self, page: Page, path: Path) -> None:
        self._page, self._path = page, path
        self._closed = threading.Event()
        self._failed = False
        self._write(first=True)
        self._thread = threading.Thread(target=self._run, name="megatron-ft-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(FILE_SECONDS):
            self._write()

    def _write(self, *, first: bool = False) -> None:
        try:
            # node_exporter runs as another user.
            replace_file(self._path, self._page("")[0], mode=0o644)
            self._failed = False
        except OSError as error:
            if first:
                raise ConfigError(
                    f"--metrics {self._path}: not written ({_reason(error)}); give another file"
                ) from error
            if not self._failed:
                log.warning("metrics: %s cannot be written (%s); tried again", self._path, error)
            self._failed = True

    def close(self) -> None:
        """Write the last numbers, unless a write hangs."""
        self._closed.set()
        self._thread.join(SCRAPE_SECONDS)
        if not self._thread.is_alive():
            self._write()


def outlet(page: Page, where: str, token_file: Path | None) -> MetricsServer | MetricsFile:
    """Open ``--metrics``: a port, or a file."""
    try:
        port = int(where)
    except ValueError:
        if token_file is not None:
            raise ConfigError(
                "--metrics-token-file protects a port, and --metrics names a file; give a port, or "
                "leave the token file out"
            ) from None
        return MetricsFile(page, Path(where))
    if not 0 < port < 1 << 16:
        raise ConfigError(f"--metrics {where}: a port is a number from 1 to 65535")
    return MetricsServer(page, port, "" if token_file is None else _token(token_file))


def _token(file: Path) -> str:
    try:
        token = read_file(file).decode("ascii").strip()
    except (OSError, UnicodeDecodeError, UntrustedFileError) as error:
        raise ConfigError(f"--metrics-token-file {file}: {_reason(error)}") from error
    if len(token) < LEAST_TOKEN:
        raise ConfigError(
            f"--metrics-token-file {file}: the token has {len(token)} characters, and needs "
            f"{LEAST_TOKEN}; make one with `openssl rand -hex 24`"
        )
    return token


def _reason(error: Exception) -> str:
    """The reason of a failed read or write, without a number."""
    return str(getattr(error, "strerror", None) or error)
