"""Drains to stores besides S3: a WebDAV server, and the library's clients of Google Cloud Storage and Azure."""

from __future__ import annotations

import json
import os
import shutil
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import azure_server
import pytest
import s3_server
import torch
from command_line import holdfast as command
from draining import MIB, names, save, swept, verdicts
from test_drain import check, drained_with_kills

import holdfast
from holdfast.drain import Drain, contents, copying
from holdfast.drain.following import Following
from holdfast.drain.places import open_place
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")
AT_ONCE = {"retry_config": {"max_retries": 0}}


@pytest.fixture
def webdav(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("wsgidav", reason="there is no WebDAV server: pip install wsgidav cheroot")
    pytest.importorskip("cheroot", reason="there is no WebDAV server: pip install wsgidav cheroot")
    import webdav_server

    (tmp_path / "served").mkdir()
    with webdav_server.serving(tmp_path / "served") as running:
        yield running


@pytest.mark.parametrize("prefix", ["", "/some where/run"])
def test_webdav_there_and_back(prefix: str, webdav: Any, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2)
    save(tmp_path / "run", 3, elements=MIB, format="dcp")
    source, far = open_place(str(tmp_path / "run")), open_place(webdav.url + prefix)  # the collections are not there
    assert [(e["event"], e["verified"]) for e in swept(source, far)] == [("arrived", "read")] * 3
    assert sorted(names(far)) == ["step-1", "step-2", "step-3"] and swept(source, far) == []
    swept(far, open_place(str(tmp_path / "back")))
    assert verdicts(tmp_path / "back") == ["sound"] * 3
    save(tmp_path / "run", 2, elements=10, replace=True)
    swept(source, far)
    swept(source, far, Drain(keep_last=1), keep_local=1)
    left = far.complete()[0]
    # The newest of each format; nothing is left of the others, no collection either.
    assert sorted(os.listdir(f"{tmp_path}/served{prefix}")) == sorted(c.slot for c in left)
    assert sorted(names(source)) == sorted(names(far)) == ["step-2", "step-3"]


def test_a_server_that_keeps_collections(webdav: Any, tmp_path: Path) -> None:
    webdav.keeps_collections = True
    save(tmp_path / "run", 1, 2, 3, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(f"{webdav.url}/run", AT_ONCE)
    assert [e["event"] for e in swept(source, far)] == ["arrived"] * 3
    assert [e["event"] for e in swept(source, far, Drain(keep_last=1))] == ["removed"] * 2
    assert names(far) == ["step-3"] and len(os.listdir(tmp_path / "served/run")) == 3


def test_a_load_from_webdav(webdav: Any, tmp_path: Path) -> None:
    url = f"{webdav.url}/run"
    webdav.authorization = "Basic dXNlcjpwYXNzd29yZA=="
    storage = {"client_options": {"default_headers": {"authorization": webdav.authorization}}}
    values = {"w": torch.arange(float(2 * MIB)), "b": torch.arange(7)}
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=url, drain=Drain(storage=storage)) as checkpointer:
        assert checkpointer.newest() is None
        checkpointer.save(values, 1)
        checkpointer.wait_drained(60)
    shutil.rmtree(tmp_path / "run")
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=url, drain=Drain(storage=storage)) as checkpointer:
        into = {"w": torch.zeros(2 * MIB), "b": torch.zeros(7, dtype=torch.int64)}
        assert checkpointer.newest()["step"] == 1
        checkpointer.load(into=into)
    assert all(torch.equal(into[key], values[key]) for key in values)
    assert torch.equal(holdfast.load(f"{url}/step-1", storage=storage)["b"], values["b"])
    with pytest.raises(Error, match="401") as refused:
        open_place(url).complete()
    assert refused.value.code == "UNAUTHENTICATED"


@pytest.mark.parametrize("name", ["a?b-{step}", "a:b@c-{step}", "ha#sh-{step}", "per%41cent-{step}", "per%zz-{step}", "a b-{step} "],
                         ids=["query", "user", "hash", "percent", "percents", "blanks"])  # fmt: skip
@pytest.mark.parametrize("kind", ["s3", "webdav"])
def test_every_name_that_is_sent_can_be_loaded(kind: str, name: str, server: s3_server.Server, url: str, tmp_path: Path,
                                               request: pytest.FixtureRequest) -> None:  # fmt: skip
    storage: dict[str, Any] = server.storage() if kind == "s3" else {}
    far = url if kind == "s3" else f"{request.getfixturevalue('webdav').url}/run"
    options = {"arena_bytes": 64 * MIB, "name": name, "drain_to": far, "drain": Drain(storage=storage)}
    with holdfast.Checkpointer(tmp_path / "run", **options) as checkpointer:
        for step in (1, 2):
            checkpointer.save({"w": torch.full((3,), float(step))}, step)
        process = checkpointer._draining._process
    process.wait(60)  # it looks at the place once more at its end
    with holdfast.Checkpointer(tmp_path / "new", **options) as checkpointer:
        newest = checkpointer.newest()
        assert (newest["name"], newest["step"]) == (name.format(step=2), 2)
        server.faults.seen.clear()
        assert checkpointer.load()["w"][0] == 2 and checkpointer.load(1)["w"][0] == 1
        listings = [path for _, path in server.faults.seen if "list-type" in path and "every_name" in path]  # a test before may have a drain
        assert len(listings) == (2 if kind == "s3" else 0)  # one for each load
        assert checkpointer.load(storage=storage)["w"][0] == 2
    assert holdfast.load(newest["path"], storage=storage)["w"][0] == 2
    assert holdfast.load(f"{far}/{urllib.parse.quote(name.format(step=1))}", storage=storage)["w"][0] == 1
    with pytest.raises(Error, match="there is no complete checkpoint"):
        holdfast.load(f"{far}/{urllib.parse.quote(name.format(step=3))}", storage=storage)
    with pytest.raises(Error, match="it is no checkpoint and holds some; load one of them, the newest is ") as refused:
        holdfast.load(far, storage=storage)
    assert refused.value.code == "FAILED_PRECONDITION"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('{"default_headers": {"authorization": "Basic secret"}}', ""),
        ('{"default_headers": {"authorization": "Basic secret"}', "option client_options: its value is no JSON"),
        ("secret", "client_options is no dict"),
    ],
)
def test_a_password_for_webdav_comes_from_a_file(value: str, said: str, webdav: Any, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    webdav.authorization = "Basic secret"
    (tmp_path / "options").write_text(f"client_options={value}\n")
    done = command("drain", tmp_path / "run", f"{webdav.url}/run", "--storage-file", tmp_path / "options", torch=False)
    assert (done.status, "secret" in done.error, "Traceback" in done.error) == (2 if said else 0, False, False)
    assert said in done.error and len(os.listdir(tmp_path / "served")) == (0 if said else 1)


def test_webdav_kills_with_a_server_that_fails(webdav: Any, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, 3, elements=2 * MIB)
    webdav.failing = 0.1
    drained_with_kills(tmp_path / "run", f"{webdav.url}/run", [], 3, seed=2, longest=0.9)
    webdav.failing = 0.0
    check(f"{webdav.url}/run", None)
    assert names(open_place(f"{webdav.url}/run")) == ["step-1", "step-2", "step-3"]


@pytest.mark.parametrize(
    ("method", "status", "said"),
    [
        ("PROPFIND", "403 Forbidden", "Depth: infinity"),
        ("PROPFIND", "405 Method Not Allowed", "Depth: infinity"),
        ("PUT", "405 Method Not Allowed", "let it take PUT and MKCOL"),
        ("DELETE", "405 Method Not Allowed", "let it take DELETE"),
    ],
)
def test_what_a_server_does_not_do_is_said(method: str, status: str, said: str, webdav: Any, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10)
    far = open_place(f"{webdav.url}/run", AT_ONCE)
    webdav.refuse = {method: status}
    with pytest.raises(Error, match=said) as refused:
        swept(open_place(str(tmp_path / "run")), far)
        swept(open_place(str(tmp_path / "run")), far, Drain(keep_last=1))
    assert status.partition(" ")[0] in refused.value.message and "choose another store" in refused.value.message
    assert refused.value.code == ("PERMISSION_DENIED" if "403" in status else "UNIMPLEMENTED")


def test_the_client_of_google_cloud_storage(server: s3_server.Server, tmp_path: Path) -> None:
    """Its requests resemble those of S3: moto answers them where they have a signature."""
    server.faults.anonymous = True
    account = tmp_path / "account.json"
    account.write_text(json.dumps({"gcs_base_url": server.endpoint, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}))
    storage = {"service_account": str(account), "client_options": {"allow_http": True}}
    save(tmp_path / "run", 1, 2, elements=5 * MIB)  # several parts
    source, far = open_place(str(tmp_path / "run")), open_place(f"gs://{s3_server.BUCKET}/google", storage)
    following = Following(source, far, Drain(), lambda event: following.stop.set())
    with pytest.raises(Error, match="asked to end"):
        following.sweep()
    assert names(far) == []
    assert [(e["event"], e["verified"]) for e in swept(source, far)] == [("arrived", "read")] * 2
    assert all(copying.verify(far, one)[0] == [] for one in far.complete()[0])
    assert torch.equal(holdfast.load(f"gs://{s3_server.BUCKET}/google/step-2", storage=storage)["step"], torch.tensor(2))
    swept(source, far, Drain(keep_last=1))
    (left,) = far.complete()[0]
    assert left.name == "step-2" and far.sizes(left.slot).keys() == contents.contents_of(far, left).names()


def test_the_client_of_azure(tmp_path: Path) -> None:
    url = f"az://{azure_server.CONTAINER}/some/run"
    with azure_server.serving() as server:
        storage = server.storage()
        save(tmp_path / "run", 1, 2, elements=5 * MIB)  # several blocks
        save(tmp_path / "run", 3, elements=10)
        server.failing = 0.1
        options = [word for item in storage.items() for word in ("--storage", "=".join(item))]
        drained_with_kills(tmp_path / "run", url, options, 2, seed=1, longest=1.0, storage=storage)
        server.failing = 0.0
        source, far = open_place(str(tmp_path / "run")), open_place(url, storage)
        assert names(far) == ["step-1", "step-2", "step-3"]
        check(url, storage)
        assert torch.equal(holdfast.load(f"{url}/step-2", storage=storage)["step"], torch.tensor(2))
        swept(far, open_place(str(tmp_path / "back")))
        assert verdicts(tmp_path / "back") == ["sound"] * 3
        swept(source, far, Drain(keep_last=1))
        (left,) = far.complete()[0]
        assert {name.split("/")[2] for name in server.blobs} == {left.slot} and left.name == "step-3"
        queries = [query for _, _, query in server.seen]
        assert all(any(query.get("comp") == part for query in queries) for part in ("block", "blocklist", "batch"))
        assert any(query.get("marker") for query in queries)  # of a listing with further pages
