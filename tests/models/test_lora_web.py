"""Sources of LoRAs on other hosts: who is asked, what is followed, and what a failure tells."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from huggingface_hub import constants
from yarl import URL

from ray_cluster.errors import InvalidRequest
from ray_cluster.models.sources import lora_http
from ray_cluster.models.sources.addresses import PrivateHosts, is_public
from ray_cluster.models.sources.lora_sources import Bounds, check_source, fetch

CONTENT = bytes(range(256)) * 4096
DIGEST = hashlib.sha256(CONTENT).hexdigest()
Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Host:
    """A server on this machine.

    Attributes:
        answers: by path.
        asked: paths, with their headers.
    """

    port: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@contextmanager
def serving() -> Iterator[Host]:
    host = Host()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_args: Any) -> None: ...

        def do_GET(self) -> None:
            host.asked.append((self.path, dict(self.headers)))
            host.answers.get(self.path, status(404))(self)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        host.port = server.server_port
        yield host
        server.shutdown()


def status(code: int, body: bytes = b"what is behind it", **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def file(content: bytes = CONTENT) -> Answer:
    return status(200, content)


def redirect(target: str, code: int = 302) -> Answer:
    return status(code, b"", Location=target)


@pytest.fixture
def host() -> Iterator[Host]:
    with serving() as found:
        yield found


@pytest.fixture
def other() -> Iterator[Host]:
    with serving() as found:
        yield found


def fetched(source: str, *allowed: str, to: Path, **bounds: Any) -> str:
    return fetch(source, allowed, to / "copy", Bounds(**{"max_bytes": 8 << 20} | bounds))


# redirects


def test_redirects_within_what_is_allowed_are_followed(
    host: Host, other: Host, tmp_path: Path
) -> None:
    host.answers = {
        "/loras/a.safetensors": redirect("b.safetensors?token=1", 301),
        "/loras/b.safetensors?token=1": redirect(f"{other.url}/files/c", 307),
    }
    other.answers = {"/files/c": file()}
    sources = (f"{host.url}/loras", f"{other.url}/files")
    assert fetched(f"{host.url}/loras/a.safetensors", *sources, to=tmp_path) == DIGEST
    assert (tmp_path / "copy").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "target",
    [
        "{other}/files/secret",
        "{host}/secret",
        "/loras/../secret",
        "/loras/%2e%2e/secret",
        "/loras/..%2fsecret",
        "//127.0.0.1:{port}/loras/a",
        "http://me:word@{netloc}/loras/a",
        "http://169.254.169.254/latest/meta-data",
        "http://localhost:{own}/loras/a",
        "http://[::ffff:127.0.0.1]:{own}/loras/a",
        "http://2130706433:{own}/loras/a",
        "https://{netloc}/loras/a",
        "file:///etc/passwd",
        "ftp://{netloc}/loras/a",
        "{host}/loras/a::file:///etc/passwd",
        "http://[",
    ],
)
def test_no_redirect_leads_out_of_what_is_allowed(
    host: Host, other: Host, tmp_path: Path, target: str
) -> None:
    names = {"host": host.url, "other": other.url, "port": other.port, "own": host.port}
    target = target.format(**names, netloc=f"127.0.0.1:{host.port}")
    host.answers = {"/loras/a.safetensors": redirect(target)}
    for path in ("/loras/a", "/secret", "/loras/secret", "/loras/..%2fsecret"):
        host.answers[path] = other.answers[path] = file()
    with pytest.raises((InvalidRequest, OSError)) as refused:
        fetched(f"{host.url}/loras/a.safetensors", f"{host.url}/loras", to=tmp_path)
    assert host.paths == ["/loras/a.safetensors"]
    assert other.paths == []
    # what it leads to is not for callers
    assert str(other.port) not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_redirect_never_gives_encryption_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    webs: list[lora_http.Web] = []
    monkeypatch.setattr(lora_http, "download", lambda _url, web, _write: webs.append(web))
    for allowed in (("https://host/loras",), ("https://host/loras", "http://host/loras")):
        fetched("https://host/loras/a.safetensors", *allowed, to=tmp_path)
    strict, lax = [web.may_ask for web in webs]
    for url, is_plain in (("https://HOST:443/loras/b", False), ("http://host:80/loras/b", True)):
        assert strict(URL(url)) is not is_plain
        assert lax(URL(url))
        assert not lax(URL(url.replace("loras", "other")))


def test_redirects_in_a_circle_end(host: Host, tmp_path: Path) -> None:
    host.answers = {"/a.safetensors": redirect("/a.safetensors")}
    with pytest.raises(OSError, match="redirects more than 5 times"):
        fetched(f"{host.url}/a.safetensors", host.url, to=tmp_path)
    assert len(host.asked) == 6


# addresses


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("64:ff9b::808:808", True),
        ("::ffff:8.8.8.8", True),
        ("2002:808:808::1", True),
        *((one, False) for one in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1")),
        *((one, False) for one in ("169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1")),
        *((one, False) for one in ("255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1")),
        *((one, False) for one in ("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1")),
        *((one, False) for one in ("ff02::1", "::ffff:10.0.0.1", "::127.0.0.1", "2001:db8::1")),
        *((one, False) for one in ("64:ff9b::a00:1", "2002:7f00:1::1", "2002:a9fe:a9fe::1")),
        # Teredo, a translator's own prefix, and what nobody has been given
        *((one, False) for one in ("2001:0:1::1", "64:ff9b:1::808:808", "4000::1")),
    ],
)
def test_public_addresses_are_told_from_all_others(address: str, expected: bool) -> None:
    assert is_public(address) is expected


def test_private_hosts_are_named_or_in_a_network() -> None:
    hosts = PrivateHosts(("models.internal", "10.0.0.0/8", "fd00::/8"))
    assert hosts.allow("Models.Internal.", "192.168.0.1")
    assert hosts.allow("any", "10.1.2.3")
    assert hosts.allow("any", "::ffff:10.1.2.3")
    assert hosts.allow("any", "fd00::1")
    assert not hosts.allow("any", "192.168.0.1")
    assert not hosts.allow("models.internal.evil", "192.168.0.1")


def test_a_name_with_a_private_address_is_not_asked_unless_it_may_be(
    host: Host, tmp_path: Path
) -> None:
    host.answers = {"/a.safetensors": file()}
    url = f"http://localhost:{host.port}"
    for private_hosts in ((), ("10.0.0.0/8", "other")):
        with pytest.raises(InvalidRequest, match=r"no public address.*loras\.private_hosts"):
            fetched(f"{url}/a.safetensors", url, to=tmp_path, private_hosts=private_hosts)
    # an address that is allowed as such says nothing of names
    with pytest.raises(InvalidRequest, match="no public address"):
        fetched(f"{url}/a.safetensors", url, host.url, to=tmp_path)
    assert host.paths == []
    for private_hosts in (("localhost",), ("127.0.0.0/8", "::1")):
        found = fetched(f"{url}/a.safetensors", url, to=tmp_path, private_hosts=private_hosts)
        assert found == DIGEST


def test_a_name_whose_address_changes_is_asked_where_it_was_checked(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.answers = {"/a.safetensors": redirect("/b"), "/b": file()}
    answers = iter(["8.8.8.8", "127.0.0.1", "127.0.0.1"])
    connected: list[str] = []

    async def resolve(_self: Any, name: str, port: int = 0, _family: Any = 0) -> list[Any]:
        address = next(answers)
        at = {"hostname": name, "host": address, "port": port, "proto": 0}
        return [{**at, "family": socket.AF_INET, "flags": socket.AI_NUMERICHOST}]

    async def connect(addr_infos: Any, **_options: Any) -> Any:
        connected.extend(info[4][0] for info in addr_infos)
        found = socket.create_connection(("127.0.0.1", host.port))
        found.setblocking(False)
        return found

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", connect)
    url = f"http://models.example:{host.port}"
    with pytest.raises(InvalidRequest, match="no public address"):
        fetched(f"{url}/a.safetensors", url, to=tmp_path)
    assert connected == ["8.8.8.8"]
    assert host.paths == ["/a.safetensors"]


def test_of_a_host_that_is_not_public_one_word_is_said_whatever_happens(
    host: Host, tmp_path: Path
) -> None:
    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"half")

    def nonsense(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"SSH-2.0-OpenSSH\r\n")

    host.answers = {
        **{f"/{code}.safetensors": status(code) for code in (401, 403, 500)},
        "/cut.safetensors": cut,
        "/nonsense.safetensors": nonsense,
    }
    said = set()
    for name in ("401", "403", "404", "500", "cut", "nonsense", "closed"):
        url = "http://127.0.0.1:9" if name == "closed" else host.url
        with pytest.raises(OSError, match=r"does not give the file$") as failed:
            fetched(f"{url}/{name}.safetensors?token=secret", url, to=tmp_path)
        said.add(str(failed.value).replace(url, "").replace(name, ""))
    assert said == {"/.safetensors?... does not give the file"}


def test_what_a_public_host_does_not_have_is_not_asked_for_again(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_http, "is_public", lambda _address: True)
    host.answers = {f"/{code}.safetensors": status(code) for code in (401, 403, 410, 429, 503)}
    for code in (401, 403, 404, 410):
        with pytest.raises(InvalidRequest, match=f"answers with status {code}: it is not there"):
            fetched(f"{host.url}/{code}.safetensors", host.url, to=tmp_path)
    for code in (429, 503):
        with pytest.raises(OSError, match=f"answers with status {code}"):
            fetched(f"{host.url}/{code}.safetensors", host.url, to=tmp_path)


@pytest.mark.parametrize("path", ["api/download/models/12345", "a.ckpt", "", "a.safetensors/"])
def test_a_link_that_names_no_file_is_refused_before_it_is_asked(path: str) -> None:
    with pytest.raises(InvalidRequest, match=r"no file of \.safetensors"):
        check_source(f"https://host.org/{path}?type=Model", ["https://host.org"])
    check_source("https://host.org/x/A.SAFETENSORS?download=true", ["https://host.org"])


# what is slow, or large


def test_a_source_that_trickles_is_given_up(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_http, "_RATE_S", 0.1)
    done = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not done.wait(0.02):
            handler.wfile.write(b"x")

    host.answers = {"/a.safetensors": trickle}
    try:
        with pytest.raises(OSError, match="does not give the file"):
            fetched(f"{host.url}/a.safetensors", host.url, to=tmp_path, min_bytes_per_s=1000)
    finally:
        done.set()
    # what is fast enough is not, however long it takes
    host.answers["/b.safetensors"] = lambda handler: (time.sleep(0.05), file()(handler))[0]
    assert fetched(f"{host.url}/b.safetensors", host.url, to=tmp_path, min_bytes_per_s=1000)


def test_nothing_is_decompressed_and_no_more_is_read_than_allowed(
    host: Host, tmp_path: Path
) -> None:
    host.answers = {
        "/a.safetensors": status(200, CONTENT, **{"Content-Encoding": "gzip"}),
        "/b.safetensors": file(CONTENT * 4),
    }
    assert fetched(f"{host.url}/a.safetensors", host.url, to=tmp_path) == DIGEST
    with pytest.raises(InvalidRequest, match="larger than the 1048576 bytes"):
        fetched(f"{host.url}/b.safetensors", host.url, to=tmp_path, max_bytes=1 << 20)
    assert (tmp_path / "copy").stat().st_size <= 1 << 20


# the hub


@pytest.fixture
def hub(host: Host, other: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A hub with two owners' repositories, which keeps its files elsewhere."""
    monkeypatch.setattr(constants, "ENDPOINT", host.url)
    monkeypatch.setenv("HF_TOKEN", "hf_operator")
    for name in ("me/one", "you/one"):
        siblings = [{"rfilename": one} for one in ("README.md", "a.safetensors")]
        content = json.dumps({"id": name, "siblings": siblings}).encode()
        host.answers[f"/api/models/{name}/revision/main"] = status(200, content)
        host.answers[f"/{name}/resolve/main/a.safetensors"] = redirect(f"{other.url}/blob?sig=1")
    host.answers["/me/moved/resolve/main/a.safetensors"] = redirect(
        "/you/one/resolve/main/a.safetensors", 307
    )
    other.answers["/blob?sig=1"] = file()
    return host


def tokens(host: Host) -> set[str | None]:
    return {headers.get("Authorization") for _, headers in host.asked}


@pytest.mark.parametrize(
    ("allowed", "source", "is_lent"),
    [
        (("hf:",), "hf:me/one", False),
        (("hf:",), "hf:me/one/a.safetensors", False),
        (("hf:me",), "hf:me/one", True),
        (("hf:me/",), "hf:me/one", True),
        (("hf:me/one",), "hf:me/one/a.safetensors", True),
        (("hf:", "hf:me"), "hf:me/one", True),
        (("hf:", "hf:me"), "hf:you/one", False),
        (("hf:", "hf:m"), "hf:me/one", False),
        (("hf:", "hf:me/other"), "hf:me/one", False),
    ],
)
def test_the_token_is_for_the_hub_and_for_owners_that_are_named(
    hub: Host, other: Host, tmp_path: Path, allowed: tuple[str, ...], source: str, is_lent: bool
) -> None:
    assert fetched(source, *allowed, to=tmp_path) == DIGEST
    assert tokens(hub) == {"Bearer hf_operator" if is_lent else None}
    # what the hub redirects to gives the file to whoever has its address
    assert tokens(other) == {None}


def test_a_repository_that_has_moved_to_another_owner_is_not_lent_the_token(
    hub: Host, tmp_path: Path
) -> None:
    source = "hf:me/moved/a.safetensors"
    with pytest.raises(InvalidRequest, match="redirects to where it may not"):
        fetched(source, "hf:me", to=tmp_path)
    assert hub.paths == ["/me/moved/resolve/main/a.safetensors"]
    assert fetched(source, "hf:", "hf:me", to=tmp_path) == DIGEST
    sent = {path: headers.get("Authorization") for path, headers in hub.asked}
    assert sent["/you/one/resolve/main/a.safetensors"] is None


def test_a_revision_and_odd_names_reach_the_hub_as_they_are(hub: Host, tmp_path: Path) -> None:
    path = "/me/one/resolve/v1/a%20folder/b%3F%23.safetensors"
    hub.answers[path] = file()
    source = "hf:me/one@v1/a folder/b?#.safetensors"
    assert fetched(source, "hf:me", to=tmp_path) == DIGEST
    assert hub.paths == [path]


def test_pefts_configuration_is_fetched_too_and_need_not_be_there(
    hub: Host, tmp_path: Path
) -> None:
    names = ("adapter_config.json", "adapter_model.safetensors", "b.safetensors")
    listed = {"siblings": [{"rfilename": one} for one in names]}
    hub.answers["/api/models/me/two/revision/main"] = status(200, json.dumps(listed).encode())
    hub.answers["/me/two/resolve/main/adapter_model.safetensors"] = file()
    assert fetched("hf:me/two", "hf:me", to=tmp_path) == DIGEST
    beside = tmp_path / "copy.adapter_config.json"
    assert not beside.exists()
    hub.answers["/me/two/resolve/main/adapter_config.json"] = file(b"{}")
    fetched("hf:me/two", "hf:me", to=tmp_path)
    assert beside.read_bytes() == b"{}"
    beside.unlink()
    link = f"{hub.url}/me/two/resolve/main/adapter_model.safetensors"
    fetched(link, f"{hub.url}/me", to=tmp_path, private_hosts=("127.0.0.1",))
    assert beside.read_bytes() == b"{}"


def test_a_list_of_files_that_is_none_is_not_shown(hub: Host, tmp_path: Path) -> None:
    hub.answers["/api/models/me/one/revision/main"] = status(200, b"<secret>")
    with pytest.raises(OSError, match="list of its files cannot be read") as failed:
        fetched("hf:me/one", "hf:me", to=tmp_path)
    assert "secret" not in str(failed.value)
