"""The live page: a server on the loopback interface that reads typed text.

It serves one person on one machine. Only this machine can connect; the host of a request must be
this machine, so that a page from elsewhere cannot reach it under another name; posted data must be
JSON, which browsers do not send across sites without a preflight request; bodies are short, and
slow clients are dropped.
"""

import json
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kalman_attention.explorer.page import MOST_CHARACTERS

HOST = "127.0.0.1"
MOST_BYTES = 4 * MOST_CHARACTERS + 1024
"""Maximum size of a request: UTF-8 needs up to four bytes per character."""

_SECONDS = 20  # slower clients are dropped


class ExplorerServer(ThreadingHTTPServer):
    """Serves the page, and the model's reading of posted texts.

    Args:
        page: the page as HTML.
        look: maps a text to the data of the page; calls are serialised.
        port: port to listen on; 0 selects a free one.
    """

    daemon_threads = True

    def __init__(self, page: str, look: Callable[[str], dict[str, Any]], port: int = 0) -> None:
        self.page, self.look = page.encode(), look
        self.lock = threading.Lock()
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect early; report everything else."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        return f"http://{HOST}:{self.port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names that a request may use."""
        return f"{HOST}:{self.port}", f"localhost:{self.port}"


class _Refusal(Exception):  # noqa: N818 (an answer, not a failure)
    """A request that is rejected, and why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: ExplorerServer
    timeout = _SECONDS
    server_version, sys_version = "kla", ""

    def do_GET(self) -> None:
        """The page."""
        self._answer(self._page)

    def do_POST(self) -> None:
        """The model's reading of a text."""
        self._answer(self._look)

    def _answer(self, serve: Callable[[], None]) -> None:
        try:
            self._check_origin()
            serve()
        except _Refusal as refusal:
            self.close_connection = True  # the rest of the body is not a request
            self._json(refusal.status, {"error": str(refusal)})

    def _page(self) -> None:
        if self.path != "/":
            raise _Refusal(HTTPStatus.NOT_FOUND, "there is only one page: /")
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def _look(self) -> None:
        text = self._text()
        try:
            with self.server.lock:
                found = self.server.look(text)
        except (ValueError, FloatingPointError) as error:
            raise _Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        self._json(HTTPStatus.OK, found)

    def _check_origin(self) -> None:
        """Reject requests for other hosts, and requests from pages other than its own."""
        origins = (None, *(f"http://{host}" for host in self.server.hosts))
        if self.headers.get("Host") not in self.server.hosts or (
            self.headers.get("Origin") not in origins
        ):
            raise _Refusal(HTTPStatus.FORBIDDEN, "this server answers only to its own page.")

    def _text(self) -> str:
        """The text that was posted."""
        length = self.headers.get("Content-Length", "")
        if self.path != "/look":
            raise _Refusal(HTTPStatus.NOT_FOUND, "post texts to /look.")
        if self.headers.get_content_type() != "application/json":
            raise _Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "post application/json.")
        if not (length.isascii() and length.isdigit()):
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "the request needs a Content-Length.")
        most = f"a text has at most {MOST_CHARACTERS:,} characters."
        if len(length) > 9 or int(length) > MOST_BYTES:
            raise _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, most)
        try:
            text = json.loads(self.rfile.read(int(length)))["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise _Refusal(HTTPStatus.BAD_REQUEST, 'post {"text": ...}.')
        if len(text) > MOST_CHARACTERS:
            raise _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, most)
        return text

    def _json(self, status: HTTPStatus, data: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(data, allow_nan=False).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Do not log requests: they are of no interest, and could contain anything."""
