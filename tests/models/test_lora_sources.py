"""Sources of LoRAs: what may be read, and how files are copied within bounds."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ray_cluster.errors import InvalidRequest
from ray_cluster.models.builtin import weights_folder
from ray_cluster.models.sources.lora_sources import (
    PEFT_CONFIG,
    PEFT_FILE,
    Bounds,
    check_source,
    config_beside,
    fetch,
    origin_of,
)

MEBIBYTE = 1 << 20


class _Quiet(SimpleHTTPRequestHandler):
    """Knows no ranges, as many servers; some paths answer with errors."""

    def log_message(self, *_args: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path.startswith("/loras/forbidden"):
            self.send_error(403)
        else:
            super().do_GET()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    handler = partial(_Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def copied(
    source: str, allowed: str, target: Path, *, max_bytes: int = 8 * MEBIBYTE, sha256: str = ""
) -> str:
    return fetch(source, (allowed,), target, Bounds(max_bytes), sha256=sha256)


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("builtin:pastel", "builtin:"),
        ("https://host/loras/a.safetensors", "https://host/loras"),
        ("https://host/loras/a/b.safetensors?token=1", "https://host/loras/"),
        ("s3://bucket/loras/a.safetensors", "s3://bucket/loras"),
        ("hf:owner/name", "hf:"),
        ("hf:owner/name/folder/a.safetensors", "hf:owner"),
        ("hf:owner/name", "hf:owner/name"),
    ],
)
def test_what_begins_with_an_allowed_source_is_allowed(source: str, allowed: str) -> None:
    check_source(source, (allowed,))


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("builtin:pastel", "hf:"),
        ("https://host/loras-private/a.safetensors", "https://host/loras"),
        ("https://host.evil/loras/a.safetensors", "https://host"),
        ("https://host@evil/loras/a.safetensors", "https://host@evil/loras"),
        ("https://host/loras/../secret.safetensors", "https://host/loras"),
        ("https://host/loras/%2e%2E/secret.safetensors", "https://host/loras"),
        ("https://host/loras/..\\secret.safetensors", "https://host/loras"),
        ("https://host/loras/.\t./secret.safetensors", "https://host/loras"),
        ("https://[host/loras/a.safetensors", "https://[host/loras"),
        ("https://host/loras/%2e%2e%2fsecret.safetensors", "https://host/loras"),
        # of which fsspec makes one path for most protocols
        ("sftp://host/loras/a.safetensors?/../../etc/a.safetensors", "sftp://host/loras"),
        ("sftp://host/loras/a#/../../etc/a.safetensors", "sftp://host/loras"),
        # what no path can contain
        ("/models/a\0.safetensors", "/models"),
        ("file:///models/a%00.safetensors", "/models"),
        ("/models/\ud800.safetensors", "/models"),
        # fsspec would read the second one
        ("https://host/loras/a.safetensors::file:///etc/a.safetensors", "https://host/loras"),
        ("simplecache::https://host/loras/a.safetensors", "https://host/loras"),
        ("http://host/loras/a.safetensors", "https://host/loras"),
        ("file:///etc/a.safetensors", "/models"),
        ("hf:owner-of-others/name", "hf:owner"),
        ("hf:owner/../other/name", "hf:owner"),
        ("hf:owner/name/../../a.safetensors", "hf:owner"),
        ("hf:owner", "hf:"),
        ("hf:owner/name/", "hf:"),
        ("relative/a.safetensors", "relative"),
        ("", "builtin:"),
    ],
)
def test_what_only_looks_like_an_allowed_source_is_refused(source: str, allowed: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is not allowed.*loras\.sources") as refused:
        check_source(source, (allowed,))
    assert refused.value.param == "source"


def test_a_refusal_shows_no_secret_of_a_url() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_source("https://me:word@host/a?token=secret", ("s3://key:secret@bucket",))
    assert not {"word", "secret"} & set(str(refused.value).replace("/", " ").split())
    assert "secret" not in str(refused.value)


def test_a_path_stays_inside_its_root_whatever_links_say(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "a.safetensors").write_bytes(b"secret")
    (root / "link.safetensors").symlink_to(outside / "a.safetensors")
    (root / "folder").symlink_to(outside)
    (root / "inner.safetensors").symlink_to(root / "b.safetensors")
    (root / "b.safetensors").write_bytes(b"fine")
    sources = [
        root / "link.safetensors",
        root / "folder" / "a.safetensors",
        root / "folder",
        root / ".." / "outside" / "a.safetensors",
        tmp_path / "root2" / "a.safetensors",
    ]
    for source in [*map(str, sources), f"file://{root}/link.safetensors"]:
        with pytest.raises(InvalidRequest, match="is not allowed"):
            copied(source, str(root), tmp_path / "copy")
    for source in (str(root / "inner.safetensors"), f"file://{root}/b.safetensors"):
        for allowed in (str(root), f"file://{root}"):
            copied(source, allowed, tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == b"fine"


def test_links_in_a_circle_are_refused_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "a.safetensors")
    with pytest.raises(InvalidRequest, match="is not allowed"):
        check_source(str(tmp_path / "a.safetensors"), (str(tmp_path),))


def test_a_link_names_what_it_leads_to_as_in_a_cache_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "0123abcd").write_bytes(b"fine")
    (tmp_path / "snapshot" / "a.safetensors").symlink_to(Path("..") / "blobs" / "0123abcd")
    for source in (tmp_path / "snapshot", tmp_path / "snapshot" / "a.safetensors"):
        copied(str(source), str(tmp_path), tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"fine"


def test_a_folder_whose_only_file_is_a_link_to_the_outside_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    (root / "a.safetensors").symlink_to(tmp_path / "secret.safetensors")
    check_source(str(root), (str(root),))
    with pytest.raises(InvalidRequest, match="is not allowed"):
        copied(str(root), str(root), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_pefts_configuration_comes_along_from_its_folder_alone(tmp_path: Path) -> None:
    root, cache = tmp_path / "root", tmp_path / "cache"
    for one in (root, cache):
        one.mkdir()
    target = tmp_path / "copy.safetensors"
    # as a hub's cache has it: links, whose files have other names
    for name, content in ((PEFT_FILE, b"factors"), (PEFT_CONFIG, b"{}")):
        (cache / f"blob-{len(name)}").write_bytes(content)
        (root / name).symlink_to(cache / f"blob-{len(name)}")
    digest = fetch(str(root), (str(root), str(cache)), target, Bounds(MEBIBYTE))
    assert digest == hashlib.sha256(b"factors").hexdigest()
    assert config_beside(target).read_bytes() == b"{}"
    config_beside(target).unlink()
    (root / PEFT_FILE).unlink()
    (root / PEFT_FILE).write_bytes(b"factors")
    # a link that leads out, none at all, and one that is too large
    fetch(f"{root}/{PEFT_FILE}", (str(root),), target, Bounds(MEBIBYTE))
    assert not config_beside(target).exists()
    (root / PEFT_CONFIG).unlink()
    fetch(str(root), (str(root),), target, Bounds(MEBIBYTE))
    (root / PEFT_CONFIG).write_bytes(b" " * (5 * MEBIBYTE))
    fetch(str(root), (str(root),), target, Bounds(MEBIBYTE))
    assert not config_beside(target).exists()


def test_new_words_beside_a_lora_are_not_passed_over(tmp_path: Path) -> None:
    for name in ("pytorch_lora_weights.safetensors", "me_emb.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(InvalidRequest, match=r"me_emb\.safetensors has embeddings of new words"):
        copied(str(tmp_path), str(tmp_path), tmp_path / "copy")
    named = tmp_path / "pytorch_lora_weights.safetensors"
    copied(str(named), str(tmp_path), tmp_path / "copy")


def test_a_folder_means_its_one_file(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(InvalidRequest, match="has 0 files"):
        copied(str(root), str(root), tmp_path / "copy")
    (root / "README.md").write_text("about")
    (root / "b.safetensors").write_bytes(b"b")
    copied(str(root), str(root), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"b"
    (root / "a.safetensors").write_bytes(b"a")
    with pytest.raises(InvalidRequest, match=r"2 files.*'a.safetensors', 'b.safetensors'"):
        copied(str(root), str(root), tmp_path / "copy")
    (root / "pytorch_lora_weights.safetensors").write_bytes(b"named")
    copied(str(root), str(root), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"named"


def test_builtins_are_the_loras_of_the_package_and_nothing_else(tmp_path: Path) -> None:
    digest = copied("builtin:pastel", "builtin:", tmp_path / "copy")
    original = weights_folder() / "pastel" / "pytorch_lora_weights.safetensors"
    assert digest == hashlib.sha256(original.read_bytes()).hexdigest()
    assert (tmp_path / "copy").read_bytes() == original.read_bytes()
    for name in ("pastell", "shapes-sd", "../pastel", "", "pastel/../pastel"):
        with pytest.raises(InvalidRequest, match="outline, pastel, texture"):
            copied(f"builtin:{name}", "builtin:", tmp_path / "copy")
        with pytest.raises(InvalidRequest, match="outline, pastel, texture"):
            check_source(f"builtin:{name}", ("builtin:",))


@pytest.mark.parametrize("name", ["a.bin", "a.pt", "a.safetensors.pkl", "safetensors"])
def test_other_formats_are_refused_before_they_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(InvalidRequest, match="hold programs"):
        copied(str(tmp_path / name), str(tmp_path), tmp_path / "copy")
    with pytest.raises(InvalidRequest, match="hold programs"):
        copied(f"http://127.0.0.1:9/{name}", "http://127.0.0.1:9", tmp_path / "copy")


def test_a_file_is_bounded_while_it_is_read_and_compared_with_its_digest(tmp_path: Path) -> None:
    path, content = tmp_path / "a.safetensors", b"x" * (2 * MEBIBYTE)
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    assert copied(str(path), str(tmp_path), tmp_path / "copy", sha256=digest) == digest
    with pytest.raises(InvalidRequest, match=f"its digest is {digest}, and 0000"):
        copied(str(path), str(tmp_path), tmp_path / "copy", sha256="0" * 64)
    with path.open("ab") as file:
        # without holding so much, as a device without an end would be
        file.truncate(64 << 30)
    with pytest.raises(InvalidRequest, match="larger than the 3145728 bytes allowed"):
        copied(str(path), str(tmp_path), tmp_path / "copy", max_bytes=3 * MEBIBYTE)
    assert (tmp_path / "copy").stat().st_size <= 3 * MEBIBYTE


def test_a_missing_file_may_come_later(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        copied(str(tmp_path / "a.safetensors"), str(tmp_path), tmp_path / "copy")


def test_files_come_by_http_from_servers_that_send_no_parts(tmp_path: Path, server: str) -> None:
    (tmp_path / "loras").mkdir()
    content = bytes(range(256)) * (3 * MEBIBYTE // 256)
    (tmp_path / "loras" / "a.safetensors").write_bytes(content)
    allowed = f"{server}/loras"
    digest = copied(f"{server}/loras/a.safetensors?x=1", allowed, tmp_path / "copy")
    assert digest == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "copy").read_bytes() == content
    with pytest.raises(InvalidRequest, match="larger"):
        copied(f"{server}/loras/a.safetensors", allowed, tmp_path / "copy", max_bytes=MEBIBYTE)
    for name in ("missing", "forbidden"):
        with pytest.raises(OSError, match=name):
            copied(f"{server}/loras/{name}.safetensors", allowed, tmp_path / "copy")


def test_any_protocol_of_fsspec_can_be_a_source(tmp_path: Path) -> None:
    content = b"x" * (MEBIBYTE + 1)
    fsspec.filesystem("memory").pipe("/of-sources/a.safetensors", content)
    allowed = "memory://of-sources"
    digest = hashlib.sha256(content).hexdigest()
    source = f"{allowed}/a.safetensors"
    assert copied(source, allowed, tmp_path / "copy", sha256=digest) == digest
    with pytest.raises(InvalidRequest, match="larger than the 1048576 bytes"):
        copied(source, allowed, tmp_path / "copy", max_bytes=MEBIBYTE)
    with pytest.raises(InvalidRequest, match="is not allowed"):
        copied("memory://of-others/a.safetensors", allowed, tmp_path / "copy")
    with pytest.raises(OSError, match=r"b\.safetensors"):
        copied(f"{allowed}/b.safetensors", allowed, tmp_path / "copy")


def test_a_disk_that_is_full_is_not_the_sources_fault(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * MEBIBYTE)
    with pytest.raises(OSError, match="No space left"):
        copied(str(tmp_path / "a.safetensors"), str(tmp_path), Path("/dev/full"))


def test_a_host_that_does_not_listen_may_answer_later(tmp_path: Path) -> None:
    gone = "http://127.0.0.1:9/loras"
    # of what is not public nothing is said: not which ports are open, either
    with pytest.raises(OSError, match=r"a\.safetensors does not give the file$"):
        copied(f"{gone}/a.safetensors", gone, tmp_path / "copy")


def test_sources_of_one_host_hang_together() -> None:
    sources = ["/a/b.safetensors", "file:///a", "builtin:pastel", "hf:a/b", "hf:c/d"]
    sources += ["https://host/a", "https://host/b?c", "http://host/a", "s3://bucket/a"]
    assert [origin_of(one) for one in sources] == [
        *("", "", "builtin", "hf", "hf"),
        *("https://host", "https://host", "http://host", "s3://bucket"),
    ]
