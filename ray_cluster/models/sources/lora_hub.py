"""Files of the Hugging Face Hub, and to whose repositories the operator's token is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, get_token
from yarl import URL

from ray_cluster.errors import InvalidRequest
from ray_cluster.models.sources.addresses import PrivateHosts
from ray_cluster.models.sources.lora_http import Web, download

_MAX_LIST_BYTES = 8 << 20


class HubFile:
    """A file of a repository, or a repository with one file that matters.

    The token of this machine is sent to the hub alone, not to what it redirects to, and only for
    what an entry of ``loras.sources`` covers that names an owner: ``hf:`` allows all that is
    public.

    Args:
        source: ``hf:OWNER/NAME``, with ``@REVISION`` and ``/FILE`` behind it or not.
        allowed: see ``loras.sources`` of the configuration.

    Attributes:
        path: of the file in its repository; empty if the source names none.
    """

    def __init__(
        self, source: str, allowed: Sequence[str], private_hosts: Sequence[str], least: int
    ) -> None:
        owner, name, *rest = source.removeprefix("hf:").split("/")
        name, _, revision = name.partition("@")
        self._source = source
        self._allowed = [one for one in allowed if one.startswith("hf:")]
        self._where = f"{owner}/{name}"
        self._revision = revision or "main"
        self.path = "/".join(rest)
        self._endpoint = URL(constants.ENDPOINT)
        host = self._endpoint.host or ""
        proxies = [URL(getproxies().get(one, "")).host or "" for one in ("http", "https")]
        self._web = Web(
            self._may_ask,
            PrivateHosts((*private_hosts, host, *proxies)),
            headers=self._headers,
            proxy=_proxy,
            min_bytes_per_s=least,
        )

    def list_files(self) -> list[str]:
        """Return the names of the repository's files; raises as :func:`download`."""
        content = bytearray()

        def write(piece: bytes) -> None:
            content.extend(piece)
            if len(content) > _MAX_LIST_BYTES:
                raise InvalidRequest(f"{self._source}: it has too many files; name one.", "source")

        path = f"api/models/{quote(self._where)}/revision/{quote(self._revision, safe='')}"
        download(self._url(path), self._web, write)
        try:
            return [str(one["rfilename"]) for one in json.loads(content)["siblings"]]
        except (ValueError, LookupError, TypeError) as error:
            raise OSError(f"{self._source}: the hub's list of its files cannot be read") from error

    def download(self, path: str, write: Callable[[bytes], object]) -> None:
        """Hand a file's content to ``write``, piece by piece; see :func:`download`."""
        revision = quote(self._revision, safe="")
        url = self._url(f"{quote(self._where)}/resolve/{revision}/{quote(path)}")
        download(url, self._web, write)

    def _url(self, path: str) -> URL:
        return URL(f"{str(self._endpoint).rstrip('/')}/{path}", encoded=True)

    def _may_ask(self, url: URL) -> bool:
        """Whether a URL is of the hub and allowed, or of what the hub keeps its files on."""
        if url.origin() != self._endpoint.origin():
            return url.scheme == "https" or self._endpoint.scheme == "http"
        found = self._id_of(url)
        return found.startswith(f"hf:{self._where}/") or any(
            _covers(one, found) for one in self._allowed
        )

    def _headers(self, url: URL) -> Mapping[str, str]:
        # a repository that was renamed may be somebody else's by now
        is_lent = url.origin() == self._endpoint.origin() and any(
            one != "hf:" and _covers(one, self._id_of(url)) for one in self._allowed
        )
        token = get_token() if is_lent and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else None
        return {} if token is None else {"Authorization": f"Bearer {token}"}

    def _id_of(self, url: URL) -> str:
        """Return what a URL of the hub is as a source, with a slash at the end of a repository."""
        parts = url.path.removeprefix(self._endpoint.path.rstrip("/")).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            parts = [*parts[2:4], ""]
        elif parts[2:3] == ["resolve"]:
            parts = [*parts[:2], *parts[4:]]
        return "hf:" + "/".join(parts)


def _covers(entry: str, found: str) -> bool:
    """Whether an entry of the sources covers something of the hub."""
    return entry in ("hf:", found) or found.startswith(f"{entry.rstrip('/')}/")


def _proxy(url: URL) -> str | None:
    if proxy_bypass(url.host or ""):
        return None
    return getproxies().get(url.scheme)
