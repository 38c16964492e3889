"""Reads a ``multipart/form-data`` body as a stream of parts, each in bounded memory."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from ray_cluster.api.errors import ApiError
from ray_cluster.errors import InvalidRequest

MAX_PARTS = 100
MAX_NAME_CHARS = 200
_MAX_HEADERS = 8
_MAX_HEADER_BYTES = 4096
_MAX_BOUNDARY_CHARS = 70
_PLAIN_CODINGS = {b"binary", b"8bit", b"7bit"}
_QUOTED = re.compile(rb'"(?:\\.|[^"\\])*"')
# RFC 5987 and RFC 2231: what some clients send for names that are not plain ASCII
_CODED_FILE_NAME = re.compile(rb";\s*filename\*(?:[0-9]+\*?)?\s*=", re.IGNORECASE)
_FILE_TYPES = (b"image/", b"application/octet-stream")


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part of a form begins.

    Attributes:
        name: of the form's field.
        is_file: whether it has a file name, be it empty, or its type is that of a file.
        has_file_name: of some length.
    """

    name: str
    is_file: bool
    has_file_name: bool


Event = PartBegin | bytes | None
"""A part begins, some bytes of it, and None at its end."""


def is_form(request: Request) -> bool:
    """Whether a call says that its body is a form."""
    media_type, _ = parse_options_header(request.headers.get("content-type", ""))
    return media_type == b"multipart/form-data"


def boundary_of(request: Request) -> str:
    """Return what separates the parts of a form.

    Raises:
        ApiError: 415: the body is no form, or the content type names no boundary.
    """
    given = request.headers.get("content-type", "")
    coding = request.headers.get("content-encoding", "identity")
    media_type, options = parse_options_header(given)
    boundary = options.get(b"boundary", b"").decode("latin-1")
    if (
        media_type != b"multipart/form-data"
        or not 0 < len(boundary) <= _MAX_BOUNDARY_CHARS
        or coding.lower() != "identity"
    ):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"The body must be a form with files; given content type {given[:100]!r} with content "
            f"encoding {coding[:100]!r}. Send 'Content-Type: multipart/form-data; boundary=...' "
            f"with a boundary of at most {_MAX_BOUNDARY_CHARS} characters.",
            code="unsupported_media_type",
        )
    return boundary


async def form_events(body: AsyncIterator[bytes], boundary: str) -> AsyncGenerator[Event, None]:
    """Yield the parts of a form, in order, as the body arrives.

    Raises:
        InvalidRequest: names the part; not a form, too many parts or headers, or ends too early.
    """
    parser = _Parser(boundary)
    async for chunk in body:
        for event in parser.feed(chunk):
            yield event
    if not parser.has_ended:
        raise parser.invalid("it ends before its closing boundary")


class _Parser:
    """Collects as events what the parser's callbacks report."""

    def __init__(self, boundary: str) -> None:
        self._events: list[Event] = []
        self._num_parts = 0
        self._name = ""
        self._headers: dict[bytes, bytes] = {}
        self._field, self._value = bytearray(), bytearray()
        self.has_ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._add_field,
                "on_header_value": self._add_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )

    def feed(self, chunk: bytes) -> list[Event]:
        """Return what a piece of the body completes."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise self.invalid(str(error)) from error
        events, self._events = self._events, []
        return events

    def invalid(self, reason: str) -> InvalidRequest:
        """Return an error that names the present part."""
        where = f" at part {self._num_parts}" if self._num_parts else ""
        where += f" ({self._name!r})" if self._name else ""
        return InvalidRequest(
            f"The body cannot be read as a form{where}: {reason}.",
            self._name or None,
            code="invalid_form",
        )

    def _begin(self) -> None:
        self._num_parts += 1
        self._name = ""
        self._headers = {}
        if self._num_parts > MAX_PARTS:
            raise self.invalid(f"it has more than the {MAX_PARTS} parts allowed")

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        field = bytes(self._field).lower()
        if field in self._headers:
            raise self.invalid(f"it has the header {field.decode('latin-1')!r} twice")
        self._headers[field] = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"")
        kind, options = parse_options_header(disposition)
        self._name = self._name_in(options) if kind == b"form-data" else ""
        if not self._name:
            raise self.invalid("it has no 'Content-Disposition: form-data; name=...'")
        coding = self._headers.get(b"content-transfer-encoding", b"binary").strip().lower()
        if coding not in _PLAIN_CODINGS:
            raise self.invalid("it has a Content-Transfer-Encoding; send its bytes as they are")
        has_coded = bool(_CODED_FILE_NAME.search(_QUOTED.sub(b"", disposition)))
        media_type = self._headers.get(b"content-type", b"").strip().lower()
        is_file = has_coded or b"filename" in options or media_type.startswith(_FILE_TYPES)
        has_file_name = has_coded or bool(options.get(b"filename"))
        self._events.append(PartBegin(self._name, is_file, has_file_name))

    def _name_in(self, options: dict[bytes, bytes]) -> str:
        try:
            name = options.get(b"name", b"").decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.invalid("its name is not UTF-8") from error
        if len(name) > MAX_NAME_CHARS or not (name.isprintable() or not name):
            raise self.invalid(f"its name must have at most {MAX_NAME_CHARS} printable characters")
        return name

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(data[start:end])

    def _end_part(self) -> None:
        self._events.append(None)

    def _end(self) -> None:
        self.has_ended = True
