"""The page to try and watch a cell: files that ship with the package, served as they are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ray_cluster.api.routes.files import has_etag
from ray_cluster.api.settings import CurrentSettings

_FOLDER = Path(__file__).resolve().parents[2] / "page"
_INDEX = "index.html"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# no inline code or style, nothing from elsewhere, no markup made from text, in nobody's frame
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # asked for anew at every visit, answered in a line while nothing has changed
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    headers: dict[str, str]


class PageEndpoint:
    """Serves the page where ``http.page`` is set; needs no API key, as it holds nothing.

    All files are read when it is made: a name in a URL never becomes a path.
    """

    def __init__(self, settings: CurrentSettings) -> None:
        self._settings = settings
        self._files = {
            one.relative_to(_FOLDER).as_posix(): _read(one)
            for one in sorted(_FOLDER.rglob("*"))
            if one.suffix in _MEDIA_TYPES
        }

    async def index(self, request: Request) -> Response:
        """Return the page."""
        return await self.part(_INDEX, request)

    async def part(self, name: str, request: Request) -> Response:
        """Return a file of the page."""
        await self._settings.first()
        found = self._files.get(name)
        if found is None or not self._settings.document().http.page:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        if has_etag(request, found.headers["ETag"]):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=found.headers)
        return Response(found.data, headers=found.headers)


def _read(path: Path) -> _File:
    data = path.read_bytes()
    etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    return _File(data, {**_HEADERS, "Content-Type": _MEDIA_TYPES[path.suffix], "ETag": etag})
