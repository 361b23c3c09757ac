"""A WebDAV server (`wsgidav` on `cheroot`) that refuses and fails on request. The tests that need it skip without it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Server:
    """A running server.

    Attributes:
        url: of its root.
        refuse: statuses by method; a method that is not there is served.
        keeps_collections: whether DELETE of a collection is refused.
        authorization: the header that every request must have; empty: none.
        failing: share of requests that are answered with 503, half of them after they were served.
        seen: method and path of every request.
    """

    url: str = ""
    refuse: dict[str, str] = dataclasses.field(default_factory=dict)
    keeps_collections: bool = False
    authorization: str = ""
    failing: float = 0.0
    seen: list[tuple[str, str]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serves a folder."""
    from cheroot import wsgi
    from wsgidav.wsgidav_app import WsgiDAVApp

    logging.getLogger("wsgidav").setLevel(logging.CRITICAL)
    served = WsgiDAVApp({
        "provider_mapping": {"/": str(folder)}, "simple_dc": {"user_mapping": {"*": True}}, "logging": {"enable": False}, "verbose": 0,
        "hotfixes": {},
    })  # fmt: skip
    running = Server()
    choice = random.Random(0)

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        running.seen.append((method, environ["PATH_INFO"]))
        status = running.refuse.get(method, "")
        if running.authorization and environ.get("HTTP_AUTHORIZATION") != running.authorization:
            status = "401 Unauthorized"
        if running.keeps_collections and method == "DELETE" and (folder / environ["PATH_INFO"].strip("/")).is_dir():
            status = "409 Conflict"
        fails, before = choice.random() < running.failing, choice.random() < 0.5
        if fails and not before:
            answer = served(environ, lambda *_: lambda data: None)
            for _ in answer:
                pass
            getattr(answer, "close", lambda: None)()
        if status or fails:
            start(status or "503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        return served(environ, start)

    server = wsgi.Server(("127.0.0.1", 0), app, numthreads=8)
    server.prepare()
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    running.url = f"http://127.0.0.1:{server.bind_addr[1]}"
    try:
        yield running
    finally:
        server.stop()
        thread.join(10)
