"""A server that speaks S3 (`moto`), and a proxy in front of it that fails, throttles and corrupts on request."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import http.client
import os
import random
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

BUCKET = "checkpoints"
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "server", "date"}


@dataclasses.dataclass
class Faults:
    """What the proxy does to requests.

    Attributes:
        failing: share of requests that are answered with 500, half of them after they were served.
        bytes_per_second: of all bodies together; 0: no limit.
        corrupt: text of a path; a byte of the next body that is sent there is changed.
        breaks: method, text of a path, and what happens to the next such request, once for each entry: "truncated", half of the body
            with the length of all; "dropped", no answer; "busy", 503 with Retry-After; "refused", 400; "lost", 200 for what is not served; "stale",
            an answer to a listing of the time before the first object.
        refuse: status with which requests are answered; 0: none.
        refused_methods: of those that are refused; empty: all.
        seen: method and path of every request.
        anonymous: whether requests without a signature are served, as those of a client of Google Cloud Storage.
        compares: whether a body is compared with its checksums, as S3 does.
        refused, unproven: bodies that differed from their checksums, and bodies without one.
    """

    failing: float = 0.0
    bytes_per_second: float = 0.0
    corrupt: str = ""
    breaks: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    refuse: int = 0
    refused_methods: tuple[str, ...] = ()
    seed: int = 0
    anonymous: bool = False
    compares: bool = True
    refused: int = 0
    unproven: int = 0
    seen: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.lock = threading.Lock()
        self.free_at = 0.0

    def pay(self, nbytes: int) -> None:
        """Waits as long as the transfer of so many bytes takes."""
        if self.bytes_per_second:
            with self.lock:
                self.free_at = max(self.free_at, time.monotonic()) + nbytes / self.bytes_per_second
                until = self.free_at
            time.sleep(max(0.0, until - time.monotonic()))


@dataclasses.dataclass
class Server:
    """A running server.

    Attributes:
        endpoint: of the proxy.
        direct: of the server itself.
    """

    endpoint: str
    direct: str
    faults: Faults

    def storage(self, endpoint: str = "") -> dict[str, str]:
        """Options of a store."""
        return {"endpoint": endpoint or self.endpoint, "access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}


@contextlib.contextmanager
def serving(faults: Faults | None = None) -> Iterator[Server]:
    """Runs the server with an empty bucket, and the proxy."""
    faults = faults or Faults()
    with _moto() as direct:
        urllib.request.urlopen(urllib.request.Request(f"{direct}/{BUCKET}", method="PUT")).close()
        proxy = _Proxy(("127.0.0.1", 0), _handler(direct.removeprefix("http://"), faults))
        threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield Server(f"http://127.0.0.1:{proxy.server_address[1]}", direct, faults)
        finally:
            proxy.shutdown()
            proxy.server_close()


@contextlib.contextmanager
def _moto() -> Iterator[str]:
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], env=environment,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if match := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise AssertionError("moto's server did not start")
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield match[1]
    finally:
        server.kill()
        server.wait()


class _Proxy(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no error."""


def _handler(server: str, faults: Faults) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, status: int, body: bytes = b"", headers: list[tuple[str, str]] | None = None) -> None:
            self.send_response_only(status)
            for name, value in headers or []:
                if name.lower() not in _HOP_BY_HOP and (name.lower() != "content-length" or self.command == "HEAD"):
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with faults.lock:
                faults.seen.append((self.command, self.path))
                fails = faults.random.random() < faults.failing
                before = faults.random.random() < 0.5
                if faults.corrupt and faults.corrupt in self.path and body:
                    body = bytes([body[0] ^ 1]) + body[1:]
                    faults.corrupt = ""
                broken = next((b for b in faults.breaks if b[0] == self.command and b[1] in self.path), None)
                if broken:
                    faults.breaks.remove(broken)
            how = broken[2] if broken else ""
            if how == "dropped":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if how == "busy":
                self._answer(503, b"<Error><Code>SlowDown</Code></Error>", [("Retry-After", "1")])
                return
            if how == "refused":
                self._answer(400, b"<Error><Code>BadRequest</Code></Error>")
                return
            faults.pay(len(body))
            # As S3 does, and moto does not.
            claims = [self.headers.get("x-amz-content-sha256", ""), self.headers.get("x-amz-checksum-sha256", "")]
            digest = hashlib.sha256(body)
            right = ("", "UNSIGNED-PAYLOAD", digest.hexdigest(), base64.b64encode(digest.digest()).decode())
            if faults.compares and not all(claim in right for claim in claims):
                faults.refused += 1
                self._answer(400, b"<Error><Code>XAmzContentChecksumMismatch</Code></Error>")
                return
            if self.command == "PUT" and not claims[1]:
                faults.unproven += 1
            if faults.refuse and (not faults.refused_methods or self.command in faults.refused_methods):
                self._answer(faults.refuse, b"<Error><Code>Refused</Code><Message>by the test</Message></Error>")
                return
            if how == "lost":
                self._answer(200, headers=[("ETag", f'"{hashlib.md5(body).hexdigest()}"')])
                return
            if fails and before:
                self._answer(500, b"<Error><Code>InternalError</Code></Error>")
                return
            connection = http.client.HTTPConnection(server, timeout=120)
            try:
                headers = {name.title(): value for name, value in self.headers.items()}
                if faults.anonymous:  # by a signature moto knows the service
                    headers["Authorization"] = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                data = answer.read()
            finally:
                connection.close()
            faults.pay(len(data))
            if fails:
                self._answer(500, b"<Error><Code>InternalError</Code></Error>")
                return
            if how == "truncated":
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                return
            if how == "stale":
                data = re.sub(rb"(?s)<Contents>.*</Contents>", b"", data)
            self._answer(answer.status, data, answer.getheaders())

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    return Handler
