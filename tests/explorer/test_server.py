"""The live server answers its own page, and nothing else."""

import http.client
import json
import socket
import threading

import pytest

from kalman_attention.explorer.page import MOST_CHARACTERS
from kalman_attention.explorer.server import HOST, MOST_BYTES, ExplorerServer


def look(text):
    if text == "bad":
        raise ValueError("no such text")
    return {"said": text}


@pytest.fixture
def server():
    with ExplorerServer("<!doctype html>page", look) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


JSON = {"Content-Type": "application/json"}


def ask(server, method="POST", path="/look", body=None, headers=JSON):
    if isinstance(body, str):
        body = json.dumps({"text": body}).encode()
    connection = http.client.HTTPConnection(HOST, server.port, timeout=10)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_page_and_text(server):
    status, body, headers = ask(server, "GET", "/", headers={})
    assert (status, body) == (200, b"<!doctype html>page")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert json.loads(ask(server, body="caf\u00e9")[1]) == {"said": "caf\u00e9"}
    own = {**JSON, "Origin": f"http://localhost:{server.port}", "Host": f"localhost:{server.port}"}
    assert ask(server, body="x", headers=own)[0] == 200


def test_loopback_only(server):
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"method": "GET", "path": "/etc/passwd"}, 404),
        ({"method": "GET", "path": "/", "headers": {"Host": "evil.example"}}, 403),
        ({"body": "x", "headers": {**JSON, "Host": "evil.example"}}, 403),
        ({"body": "x", "headers": {**JSON, "Host": "127.0.0.1:1"}}, 403),
        ({"body": "x", "headers": {**JSON, "Origin": "http://evil.example"}}, 403),
        ({"body": "x", "headers": {**JSON, "Origin": "null"}}, 403),
        ({"body": "x", "headers": {"Content-Type": "text/plain"}}, 415),
        ({"body": "x", "path": "/other"}, 404),
        ({"body": b"{"}, 400),
        ({"body": b"[1]"}, 400),
        ({"body": b'{"text": 3}'}, 400),
        ({"body": b"[" * 50_000}, 400),
        ({"body": "x" * (MOST_CHARACTERS + 1)}, 413),
        ({"body": b" " * (MOST_BYTES + 1)}, 413),
        ({"headers": {**JSON, "Content-Length": "9" * 5000}}, 413),
        ({"headers": {**JSON, "Content-Length": "-1"}}, 411),
        ({"body": "bad"}, 422),
        ({"method": "PUT", "body": "x"}, 501),
    ],
)
def test_refusals(server, changes, status):
    found, body, _ = ask(server, **changes)
    assert found == status
    if status not in (404, 501):
        assert json.loads(body)["error"]
    assert ask(server, body="still there")[0] == 200


def test_a_request_without_host_is_refused(server):
    with socket.create_connection((HOST, server.port), timeout=10) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b" 403 " in raw.recv(100)
