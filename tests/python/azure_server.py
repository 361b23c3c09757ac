"""A stand-in for Azure's blob store: as much of its REST interface as the library's client asks for. No signature is checked.

It was written from https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api: it shows that a drain gets along with
the library's client of Azure, not that Azure itself answers as it does.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import random
import re
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from xml.sax.saxutils import escape

ACCOUNT, CONTAINER = "account", "checkpoints"
_PAGE = 5  # blobs of one answer: listings go on


class Server:
    """A running server.

    Attributes:
        blobs: content by name.
        failing: share of requests that are answered with 500, half of them after they were served.
        seen: method, name and query of every request.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.blocks: dict[str, dict[str, bytes]] = {}
        self.failing = 0.0
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.endpoint = ""
        self.random = random.Random(0)
        self.lock = threading.Lock()

    def storage(self) -> dict[str, str]:
        """Options of a store."""
        return {"account_name": ACCOUNT, "access_key": "a2V5", "endpoint": f"{self.endpoint}/{ACCOUNT}"}


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Runs the server with an empty container."""
    server = Server()
    listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _handler(server))
    listener.daemon_threads = True
    server.endpoint = f"http://127.0.0.1:{listener.server_address[1]}"
    threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()


Answer = tuple[int, bytes, dict[str, str]]


def _properties(content: bytes) -> dict[str, str]:
    return {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Last-Modified": email.utils.formatdate(time.time(), usegmt=True)}


def _listing(server: Server, query: dict[str, str]) -> bytes:
    prefix, delimiter, after = (query.get(key, "") for key in ("prefix", "delimiter", "marker"))
    rows: dict[str, str] = {}
    for name, content in sorted(server.blobs.items()):
        if not name.startswith(prefix):
            continue
        head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        if cut:
            rows[prefix + head + cut] = f"<BlobPrefix><Name>{escape(prefix + head + cut)}</Name></BlobPrefix>"
        else:
            fields = _properties(content)
            rows[name] = f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{fields['Last-Modified']}</Last-Modified>" \
                f"<Etag>{escape(fields['ETag'])}</Etag><Content-Length>{len(content)}</Content-Length>" \
                "<Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"  # fmt: skip
    names = [name for name in rows if name > after]
    page, more = names[:_PAGE], len(names) > _PAGE
    return f"<EnumerationResults><Blobs>{''.join(rows[n] for n in page)}</Blobs><NextMarker>{escape(page[-1]) if more else ''}</NextMarker>" \
        "</EnumerationResults>".encode()  # fmt: skip


def _put(server: Server, name: str, query: dict[str, str], body: bytes) -> Answer:
    if query.get("comp") == "block":
        server.blocks.setdefault(name, {})[query["blockid"]] = body
    elif query.get("comp") == "blocklist":
        ids = re.findall(r"<(?:Uncommitted|Latest)>([^<]*)</", body.decode())
        server.blobs[name] = b"".join(server.blocks.get(name, {})[one] for one in ids)
        server.blocks.pop(name, None)
    else:
        server.blobs[name] = body
    return 201, b"", _properties(server.blobs.get(name, b""))


def _get(server: Server, name: str, asked: str) -> Answer:
    if name not in server.blobs:
        return 404, b"<Error><Code>BlobNotFound</Code></Error>", {}
    content = server.blobs[name]
    fields = _properties(content)
    if match := re.fullmatch(r"bytes=(\d+)-(\d*)", asked):
        begin, end = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
        return 206, content[begin : end + 1], {**fields, "Content-Range": f"bytes {begin}-{end}/{len(content)}"}
    return 200, content, fields


def _batch(server: Server, body: bytes, kind: str) -> Answer:
    """Deletes of one request, each a part of its body."""
    boundary = kind.partition("boundary=")[2]
    parts = re.findall(r"Content-ID: (\d+).*?DELETE (\S+) HTTP/1.1", body.decode(), re.DOTALL)
    answer = ""
    for number, path in parts:
        name = urllib.parse.unquote(path.split("?")[0]).split(f"/{CONTAINER}/", 1)[1]
        status = "202 Accepted" if server.blobs.pop(name, None) is not None else "404 The specified blob does not exist."
        answer += f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n\r\n\r\n"
    return 202, f"{answer}--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/mixed; boundary={boundary}"}


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _serve(self, body: bytes) -> Answer:
            parts = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
            name = urllib.parse.unquote(parts.path).removeprefix(f"/{ACCOUNT}/{CONTAINER}").lstrip("/")
            server.seen.append((self.command, name, query))
            if query.get("comp") == "list":
                return 200, _listing(server, query), {"Content-Type": "application/xml"}
            if query.get("comp") == "batch":
                return _batch(server, body, self.headers["Content-Type"])
            if self.command == "PUT":
                return _put(server, name, query, body)
            if self.command == "DELETE":
                found = server.blobs.pop(name, None) is not None
                return (202, b"", {}) if found else (404, b"<Error><Code>BlobNotFound</Code></Error>", {})
            return _get(server, name, self.headers.get("x-ms-range") or self.headers.get("Range") or "")

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with server.lock:
                fails, before = server.random.random() < server.failing, server.random.random() < 0.5
                status, content, fields = (500, b"", {}) if fails and before else self._serve(body)
            if fails:
                status, content, fields = 500, b"<Error><Code>InternalError</Code></Error>", {}
            self.send_response_only(status)
            for key, value in {**fields, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    return Handler
