"""The page live: a server on the loopback interface that reads what is typed.

It serves one person on one machine. Only this machine can connect; a request must name it as host,
so that a page from elsewhere cannot reach it under another name; what is posted must be JSON, which
browsers do not send across sites without asking; bodies are short, and slow clients are dropped.
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
"""Of a request: UTF-8 takes up to four bytes for a character."""

_SECONDS = 20


class ExplorerServer(ThreadingHTTPServer):
    """Serves the page, and what the model makes of texts that are posted to it.

    Args:
        page: the page as HTML.
        look: from a text to what the page shows; one call at a time.
        port: where to listen; 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, page: str, look: Callable[[str], dict[str, Any]], port: int = 0) -> None:
        self.page, self.look = page.encode(), look
        self.lock = threading.Lock()
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that leave in the middle; anything else is a fault of ours."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which a request may ask for it."""
        return f"{HOST}:{self.port}", f"localhost:{self.port}"


class _Refusal(Exception):  # noqa: N818 (an answer, not a failure)
    """A request that is not served, and why."""

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
        """What the model makes of a text."""
        self._answer(self._look)

    def _answer(self, serve: Callable[[], None]) -> None:
        try:
            self._check_origin()
            serve()
        except _Refusal as refusal:
            self.close_connection = True  # what is left of the body is not a request
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
        """Refuse what is not for this server, or not from its own page or no page at all."""
        origins = (None, *(f"http://{host}" for host in self.server.hosts))
        if self.headers.get("Host") not in self.server.hosts or (
            self.headers.get("Origin") not in origins
        ):
            raise _Refusal(HTTPStatus.FORBIDDEN, "this server answers only to its own page.")

    def _text(self) -> str:
        """The text that was posted."""
        length = self.headers.get("Content-Length", "")
        if self.path != "/look":
            raise _Refusal(HTTPStatus.NOT_FOUND, "texts are posted to /look.")
        if self.headers.get_content_type() != "application/json":
            raise _Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "post application/json.")
        if not (length.isascii() and length.isdigit()):
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "say how long the body is.")
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
        """Nothing: requests are not news, and their lines could hold anything."""
