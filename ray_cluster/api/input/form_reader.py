"""Stores images that calls send, as files of a form or as base64 in JSON, in the input store."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from ray_cluster.api.access.auth import owner_of
from ray_cluster.api.advice import REFUSED, refused, wrong
from ray_cluster.api.errors import ApiError, too_large
from ray_cluster.api.input.bounded_body import BodyLimit, bounded
from ray_cluster.api.input.image_store import FILE_PREFIX, file_of_id
from ray_cluster.api.input.multipart import Event, PartBegin, boundary_of, form_events
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.errors import InvalidRequest
from ray_cluster.imaging.decoding import HAS_HEIC, KINDS
from ray_cluster.requests import BlobRef
from ray_cluster.storage.blob_store import BlobStoreError
from ray_cluster.storage.inputs import InputTooLarge

LIST_MARK = "[]"
# enough bytes to tell the kinds apart
_HEAD_BYTES = 12
# by how they begin, other files that people send
_OTHER_KINDS = {
    b"GIF8": "a GIF",
    b"BM": "a BMP",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
    b"%PDF": "a PDF",
    b"<svg": "an SVG",
    b"<?xml": "XML, perhaps an SVG",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
    b"8BPS": "a Photoshop file",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
}
# the last two may be either
_AVIF = (b"avif", b"avis", b"mif1", b"msf1")
_HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx")
# of a file that is meant to be sent
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".heic", ".heif")
_MAX_NAME_CHARS = 256
# a multiple of four, so that each piece can be decoded by itself
_BASE64_PIECE_CHARS = 1 << 20
_BREAKS = "\r\n\t"
_NO_BREAKS = dict.fromkeys(map(ord, _BREAKS))


@dataclass(frozen=True, slots=True)
class Form:
    """What a form held.

    Attributes:
        texts: by name.
        images: by name, without ``[]``; in the order in which they were sent.
        files: further images by the names of their parts.
    """

    texts: dict[str, str] = field(default_factory=dict)
    images: dict[str, tuple[BlobRef, ...]] = field(default_factory=dict)
    files: dict[str, BlobRef] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MoreFiles:
    """What a form may hold beside the images that its call knows by name.

    Attributes:
        most: how many files.
        texts: names that are of texts, and no file's.
    """

    most: int = 0
    texts: frozenset[str] = frozenset()

    def allow(self, name: str, num_before: int) -> bool:
        """Whether a part of this name may be a file, after so many others."""
        return num_before < self.most and name not in self.texts and "[" not in name


class Inputs(Protocol):
    """The part of an :class:`~ray_cluster.storage.inputs.InputStore` that is used here."""

    async def put(self, owner: str, chunks: AsyncIterator[bytes], *, max_bytes: int) -> BlobRef: ...

    def renew(self, owner: str, ref: BlobRef) -> bool: ...


class Uploads:
    """Stores the images of calls under their client, each checked for size and kind.

    The first bytes tell the kind (one of ``KINDS``); the caller checks whether the rest can be
    decoded.
    """

    def __init__(self, inputs: Inputs, limits: LimitsConfig) -> None:
        self._inputs = inputs
        self._limit = BodyLimit.of_uploads(limits)
        self._max_input_bytes = limits.max_input_bytes
        self._max_text_bytes = limits.max_body_bytes

    async def read_form(
        self, request: Request, max_images: Mapping[str, int], more: MoreFiles | None = None
    ) -> Form:
        """Read a form; its images are stored while they arrive.

        Images come in parts of their name, or of their name with ``[]``.

        Args:
            max_images: names of the parts that are images, and how many there may be of each.
            more: further images that it may hold, of any name; none unless given.

        Raises:
            ApiError: 415 for another content type, 413 for a body, an image or texts that are too
                large, 408 for a body that is too slow.
            BlobStoreError: the input store fails.
            InvalidRequest: the form or one of its parts is wrong; it names the part.
        """
        boundary = boundary_of(request)
        reading = _FormReading(
            self, owner_of(request), max_images, more or MoreFiles(), self._max_text_bytes
        )
        async with self._limit.in_time(), aclosing(bounded(request, self._limit)) as body:
            try:
                async with aclosing(form_events(body, boundary)) as events:
                    return await reading.read(events)
            except (ApiError, InvalidRequest, BlobStoreError):
                # a client reads the reply once it has sent everything
                with suppress(ApiError):
                    async for _ in body:
                        pass
                raise

    async def store_text(self, owner: str, text: str, param: str) -> BlobRef:
        """Store an image that a JSON body holds as base64 or as a ``data:`` URL.

        Spaces around it and line breaks within its base64 say nothing.

        Or the text is the id of an uploaded file, which is kept as long from now on as one that is
        uploaded now.

        Args:
            param: the field, for errors.

        Raises:
            ApiError: 413 for an image that is too large.
            BlobStoreError: the input store fails.
            InvalidRequest: it is not base64, or no image; or there is no such file.
        """
        text = text.strip()
        if text.startswith(FILE_PREFIX):
            return await self._store_again(owner, text, param)
        return await self.store(owner, _decoded(_payload(text, param), param), param)

    async def _store_again(self, owner: str, file_id: str, param: str) -> BlobRef:
        ref = file_of_id(file_id)
        is_there = ref is not None and await asyncio.to_thread(self._inputs.renew, owner, ref)
        if ref is None or not is_there:
            what = f"names the file {file_id[:100]!r}, which does not exist: files are kept for a "
            what += "while, and only for whoever has uploaded them"
            raise wrong(param, what, "file", code="file_not_found")
        return ref

    async def store(self, owner: str, chunks: AsyncIterator[bytes], param: str) -> BlobRef:
        """Store an image while it arrives; errors are those of :meth:`store_text`."""
        try:
            async with aclosing(_of_known_kind(chunks, param)) as checked:
                return await self._inputs.put(owner, checked, max_bytes=self._max_input_bytes)
        except InputTooLarge as error:
            what = f"is larger than the {self._max_input_bytes} bytes allowed"
            raise too_large(wrong(param, what, "too large", code="image_too_large")) from error


async def once(data: bytes) -> AsyncIterator[bytes]:
    """Yield all of it."""
    yield data


class _FormReading:
    """One form while it arrives.

    Args:
        max_text_bytes: of all texts together.
    """

    def __init__(
        self,
        uploads: Uploads,
        owner: str,
        max_images: Mapping[str, int],
        more: MoreFiles,
        max_text_bytes: int,
    ) -> None:
        self._uploads = uploads
        self._owner = owner
        self._max_images = max_images
        self._more = more
        self._files: dict[str, BlobRef] = {}
        self._max_text_bytes = self._num_text_bytes_left = max_text_bytes
        self._names: set[str] = set()
        self._texts: dict[str, str] = {}
        self._images: dict[str, list[BlobRef]] = {}

    async def read(self, events: AsyncIterator[Event]) -> Form:
        """Return the form of these events."""
        async for event in events:
            assert isinstance(event, PartBegin)
            base = event.name.removesuffix(LIST_MARK)
            async with aclosing(_data_of_part(events)) as received:
                data = await _unless_empty(event, received)
                if data is None:
                    # what a form sends for a field or a file that was left empty
                    continue
                if base in self._max_images:
                    await self._read_image(event, base, data)
                elif event.is_file and self._more.allow(event.name, len(self._files)):
                    await self._read_file(event.name, data)
                else:
                    await self._read_text(event, data)
        images = {name: tuple(refs) for name, refs in self._images.items()}
        return Form(self._texts, images, self._files)

    async def _read_file(self, name: str, data: AsyncIterator[bytes]) -> None:
        self._check_name(name)
        self._files[name] = await self._uploads.store(self._owner, data, name)

    async def _read_image(self, part: PartBegin, base: str, data: AsyncIterator[bytes]) -> None:
        name, most = part.name, self._max_images[base]
        if not part.is_file:
            how = f"Give the part a file name (with curl: -F {name}=@photo.png)."
            raise wrong(name, "must be a file; given a text", more=how)
        refs = self._images.setdefault(base, [])
        # all in one spelling
        if refs and (name not in self._names or (most == 1 and name == base)):
            several = f"Send several images under one name, {base + LIST_MARK!r}."
            raise _duplicate(name, several if most > 1 else "Give it once.")
        if len(refs) == most:
            raise wrong(name, f"is given {most + 1} times or more; at most {most} are allowed")
        self._names.add(name)
        refs.append(await self._uploads.store(self._owner, data, name))

    async def _read_text(self, part: PartBegin, data: AsyncIterator[bytes]) -> None:
        name = part.name
        field_name = name.partition("[")[0]
        if part.is_file and field_name not in REFUSED:
            allowed = f"Files are allowed for: {', '.join(self._max_images)}."
            raise wrong(name, "must be a text; given a file", more=allowed)
        self._check_name(name)
        if "[" in name:
            what = "cannot be read: a form does not tell which values belong together"
            raise wrong(name, what, more=f"Send all of {field_name!r} as one text of JSON.")
        self._texts[name] = await self._text(name, data)

    def _check_name(self, name: str) -> None:
        """Refuse a part that this service has no counterpart for, or that there is already."""
        if (instead := REFUSED.get(name.partition("[")[0])) is not None:
            raise refused(name, instead)
        if name in self._texts or name in self._files:
            raise _duplicate(name, "Give it once.")

    async def _text(self, name: str, data: AsyncIterator[bytes]) -> str:
        raw = bytearray()
        async for chunk in data:
            raw += chunk
            if len(raw) > self._num_text_bytes_left:
                what = f"makes the texts larger than the {self._max_text_bytes} bytes allowed"
                raise too_large(wrong(name, what, "shorten", code="body_too_large"))
        self._num_text_bytes_left -= len(raw)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            what = f"is not UTF-8 at byte {error.start}; send it as UTF-8"
            raise wrong(name, what) from error


async def _data_of_part(events: AsyncIterator[Event]) -> AsyncGenerator[bytes, None]:
    """Yield the bytes up to the end of the part that has begun."""
    async for event in events:
        if not isinstance(event, bytes):
            return
        yield event


async def _unless_empty(
    part: PartBegin, data: AsyncGenerator[bytes, None]
) -> AsyncIterator[bytes] | None:
    """Return the same bytes; None for a part without any, unless it names a file."""
    first = await anext(data, b"")
    return _after(first, data) if first or part.has_file_name else None


async def _after(first: bytes, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for chunk in data:
        yield chunk


def _duplicate(name: str, instead: str) -> InvalidRequest:
    return wrong(name, "is given more than once", more=instead, code="duplicate_parameter")


async def _of_known_kind(chunks: AsyncIterator[bytes], param: str) -> AsyncGenerator[bytes, None]:
    """Yield the same bytes, once the first of them are those of an image."""
    head = bytearray()
    async for chunk in chunks:
        if len(head) >= _HEAD_BYTES:
            yield chunk
            continue
        head += chunk
        if len(head) >= _HEAD_BYTES:
            _check_kind(head, param)
            yield bytes(head)
    if len(head) < _HEAD_BYTES:
        _check_kind(head, param)


def _check_kind(head: bytearray, param: str) -> None:
    is_known = len(head) >= _HEAD_BYTES and (
        head.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"))
        or (head.startswith(b"RIFF") and head[8:12] == b"WEBP")
        or (head[4:8] == b"ftyp" and bytes(head[8:12]) in (*_AVIF, *_HEIC * HAS_HEIC))
    )
    if not is_known:
        what = f"must be a {KINDS} image; what was sent {_kind_words(bytes(head))}"
        raise wrong(param, what, code="invalid_image")


def _kind_words(head: bytes) -> str:
    """Return what a file seems to be that is none of the known kinds."""
    if not head:
        return "is empty"
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        if brand in _HEIC:
            return "is HEIC, which the service reads if pillow-heif is installed (extra heic)"
        return "is a film"
    for start, name in _OTHER_KINDS.items():
        if head.startswith(start):
            return f"is {name}"
    return f"begins with {head[:_HEAD_BYTES]!r}"


def _payload(text: str, param: str) -> str:
    """Return the base64 of a text that is nothing else, or of a ``data:`` URL."""
    if text[:8].lower().startswith(("http://", "https://")):
        what = "must hold the image itself; given a URL, which this service does not fetch"
        raise wrong(param, what, "the image")
    if text[:5].lower() != "data:":
        return text
    head, comma, payload = text.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise wrong(param, f"must be 'data:image/png;base64,...'; given {text[:40]!r}")
    return payload


async def _decoded(text: str, param: str) -> AsyncIterator[bytes]:
    """Yield what base64 says, piece by piece."""
    if any(one in text for one in _BREAKS):
        # as base64 FILE, openssl and MIME write it
        text = await asyncio.to_thread(text.translate, _NO_BREAKS)
    try:
        if len(text) % 4 or "=" in text[:-2]:
            raise binascii.Error("its length or padding is wrong")
        for start in range(0, len(text), _BASE64_PIECE_CHARS):
            piece = text[start : start + _BASE64_PIECE_CHARS]
            yield await asyncio.to_thread(base64.b64decode, piece, validate=True)
    except ValueError as error:
        what = "must be base64 in the standard alphabet, with padding"
        raise wrong(param, f"{what}: {error}", more=_if_name(text)) from error


def _if_name(text: str) -> str:
    """Return advice for a text that seems to be the name of a file."""
    is_name = len(text) < _MAX_NAME_CHARS and text.lower().endswith(_SUFFIXES)
    return f"{text!r} seems to be a file's name: send what is in it." if is_name else ""
