"""The service's logs: events with named fields, as text or as JSON lines.

docs/logs.md describes each event and field. No line of ours holds a prompt, and no text of a
caller can end a line or begin one.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from logging.handlers import MemoryHandler
from typing import Any, Literal, TypedDict, Unpack

from ray_cluster.config.sections.cell_wide import LogsConfig
from ray_cluster.requests import ImageRequest, Timing

ROOT = "ray_cluster"
# a request id that is taken from a caller
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")
# that wait to be written
_MOST_LINES = 1000

LogEvent = Literal[
    "call_answered",
    "images_refused",
    "image_accepted",
    "image_restored",
    "image_leased",
    "image_adopted",
    "image_requeued",
    "image_decided",
    "image_completed",
    "image_failed",
    "image_cancelled",
    "job_accepted",
    "job_restored",
    "job_ended",
    "work_started",
    "work_finished",
    "work_failed",
    "work_dropped",
    "work_returned",
    "settings_applied",
    "plan_applied",
    "plan_paused",
    "plan_resumed",
]


class LogFields(TypedDict, total=False):
    """The fields that a line may have beside its time, level, logger, message and process."""

    request_id: str
    job_id: str
    image_id: str
    model: str
    replica: str
    route: str
    method: str
    status: int
    state: str
    reason: str
    kind: str
    stage: str
    error: str
    num_images: int
    num_attempts: int
    num_steps: int
    steps_done: int
    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    upscale_s: float
    elapsed_s: float
    slo_s: float
    deadline_met: bool
    version: str
    confidence: float


# where a record carries its fields: Ray puts values of its own under names like `job_id`
_FIELDS = "ray_cluster_fields"
_bound: ContextVar[Mapping[str, Any] | None] = ContextVar("log fields", default=None)


def log_event(
    logger: logging.Logger,
    event: LogEvent,
    request: ImageRequest | None = None,
    *,
    level: int = logging.INFO,
    **fields: Unpack[LogFields],
) -> None:
    """Write that something has happened.

    Args:
        request: the image that it happened to; its ids and its model are added, and its prompts
            are taken out of the text of an error.
    """
    if not logger.isEnabledFor(level):
        return
    known: dict[str, Any] = {"event": event}
    if request is not None:
        known |= fields_of(request)
    known |= fields
    if request is not None and "error" in known:
        known["error"] = without_prompts(known["error"], request)
    logger.log(level, event, extra={_FIELDS: known}, stacklevel=2)


def fields_of(request: ImageRequest) -> LogFields:
    """Return the fields by which an image is followed from process to process."""
    fields = LogFields(image_id=request.request_id, model=request.model)
    if request.call_id:
        fields["request_id"] = request.call_id
    if request.job_id:
        fields["job_id"] = request.job_id
    return fields


def durations_of(timing: Timing) -> LogFields:
    """Return how long each stage of an image took."""
    return LogFields(
        queue_s=timing.queue_s,
        encode_s=timing.encode_s,
        denoise_s=timing.denoise_s,
        decode_s=timing.decode_s,
        upscale_s=timing.upscale_s,
    )


def without_prompts(text: str, request: ImageRequest) -> str:
    """Return an error's text without the prompts that it may quote, plain or as a literal."""
    for prompt in (request.prompt, request.negative_prompt or ""):
        for form in (prompt, repr(prompt)[1:-1], json.dumps(prompt)[1:-1]):
            if form.strip():
                text = text.replace(form, "[prompt]")
    return text


@contextmanager
def bound(**fields: Unpack[LogFields]) -> Iterator[None]:
    """Add fields to every line that is written in this context within the block."""
    token = _bound.set({**(_bound.get() or {}), **fields})
    try:
        yield
    finally:
        _bound.reset(token)


def _with_bound_fields(record: logging.LogRecord) -> bool:
    """Add what is bound where a line is logged: it may be formatted in another thread."""
    record.__dict__[_FIELDS] = {**(_bound.get() or {}), **record.__dict__.get(_FIELDS, {})}
    return True


class _Formatter(logging.Formatter):
    """Formats our records with their fields.

    Args:
        process: fields of every line of this process.
    """

    def __init__(self, process: Mapping[str, str]) -> None:
        super().__init__()
        self._process = dict(process)

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the named fields of a record."""
        found = {**getattr(record, _FIELDS, {}), **self._process}
        return {name: _rounded(value) for name, value in found.items()}

    def traceback(self, record: logging.LogRecord) -> str:
        """Return the traceback of a record, if it has one."""
        return self.formatException(record.exc_info) if record.exc_info else ""


class JsonFormatter(_Formatter):
    """One JSON object per line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; keys that Ray Serve writes as well are named as it names them."""
        line = {
            "asctime": self.formatTime(record),
            "time_s": round(record.created, 6),
            "levelname": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields(record),
        }
        if traceback := self.traceback(record):
            line["exc_text"] = traceback
        return json.dumps(line)


class TextFormatter(_Formatter):
    """One readable line per record; lines of a traceback follow, indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        head = f"{record.levelname} {self.formatTime(record)} {record.name} -- "
        # an event's message is its name
        fields = ((name, value) for name, value in self.fields(record).items() if name != "event")
        pairs = [f"{name}={_word(value)}" for name, value in fields]
        lines = [head + " ".join([_printable(record.getMessage()), *pairs])]
        lines += [f"    {_printable(line)}" for line in self.traceback(record).splitlines()]
        return "\n".join(lines)


class _PerLogger(logging.Formatter):
    """Formats our records in one way and all others in another."""

    def __init__(self, ours: logging.Formatter, others: logging.Formatter) -> None:
        super().__init__()
        self._ours = ours
        self._others = others

    def format(self, record: logging.LogRecord) -> str:
        is_ours = record.name == ROOT or record.name.startswith(f"{ROOT}.")
        return (self._ours if is_ours else self._others).format(record)


class _LogBuffer(MemoryHandler):
    """Buffers records for a moment, and has a thread write them, so that no request waits for it.

    A warning or worse is written at once, with what came before it, and so is everything when
    logging is shut down or the buffer is full. A process that is killed loses its last quieter
    lines.

    Args:
        target: formats and writes them, in their order.
    """

    def __init__(self, target: logging.Handler, delay_s: float) -> None:
        super().__init__(_MOST_LINES, flushLevel=logging.WARNING, target=target)
        self._delay_s = delay_s
        self._has_lines = threading.Event()
        # as long as the process: a daemon, which nobody waits for
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self.buffer and not self._has_lines.is_set():
            self._has_lines.set()

    def _write(self) -> None:
        while True:
            self._has_lines.wait()
            time.sleep(self._delay_s)
            self._has_lines.clear()
            self.flush()


def set_up_logs(
    config: LogsConfig,
    handlers: Iterable[logging.Handler],
    *,
    process: Mapping[str, str],
    delay_s: float = 0.0,
) -> None:
    """Have this process's records written by these handlers, and by no others.

    Args:
        handlers: they may write other loggers' records as well, in the format that they have.
        process: fields that tell this process from others.
        delay_s: what is less than a warning is written so much later, by a thread.
    """
    kind = JsonFormatter if config.format == "json" else TextFormatter
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    for handler in handlers:
        others = handler.formatter or logging.Formatter()
        handler.setFormatter(_PerLogger(kind(process), others))
        writer = _LogBuffer(handler, delay_s) if delay_s else handler
        writer.addFilter(_with_bound_fields)
        logger.addHandler(writer)
    logger.setLevel(config.level.upper())
    logger.propagate = False


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        # JSON knows no infinity
        return round(value, 6) if math.isfinite(value) else str(value)
    return value


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    is_plain = text.isascii() and text.isprintable() and not set(text) & set(' "=\\')
    return text if text and is_plain else json.dumps(text)


def _printable(text: str) -> str:
    """Return text that can't end its line, nor move a terminal's cursor."""
    return "".join(
        one if one.isascii() and one.isprintable() else one.encode("unicode_escape").decode()
        for one in text
    )
