"""Lines of the log: each is one record, whatever a caller writes into it."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ray_cluster.config.sections.cell_wide import LogsConfig
from ray_cluster.observability.logs import (
    JsonFormatter,
    LogEvent,
    LogFields,
    TextFormatter,
    bound,
    durations_of,
    log_event,
    set_up_logs,
)
from ray_cluster.requests import Timing
from tests.fakes import image_request

FORGED = 'x\n{"levelname": "ERROR", "message": "forged"}\r\x1b[2J\u2028ERROR forged "q" a=b'
LOGGER = logging.getLogger("ray_cluster.tests")


class Written:
    """What a handler has written."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.handler = logging.StreamHandler(self._stream)

    @property
    def lines(self) -> list[str]:
        """Lines as the most generous reader splits them."""
        return self._stream.getvalue().splitlines()

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def written() -> Iterator[Written]:
    """The records of our logger; its settings are put back."""
    logger = logging.getLogger("ray_cluster")
    handlers, level, propagates = list(logger.handlers), logger.level, logger.propagate
    yield Written()
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagates


def set_up(written: Written, **config: Any) -> None:
    set_up_logs(LogsConfig(**config), [written.handler], process={"deployment": "Gateway"})


def test_a_json_line_has_the_fields_of_its_event_its_context_and_its_process(
    written: Written,
) -> None:
    set_up(written, format="json")
    one = image_request("img-1", call_id="call-1", job_id="job-1")
    with bound(replica="r-1"):
        log_event(LOGGER, "image_leased", one, queue_s=0.12345678, slo_s=math.inf)
    LOGGER.debug("below the level")
    [record] = written.records
    assert isinstance(record.pop("time_s"), float)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", record.pop("asctime"))
    assert record == {
        "levelname": "INFO",
        "logger": "ray_cluster.tests",
        "message": "image_leased",
        "event": "image_leased",
        "image_id": "img-1",
        "request_id": "call-1",
        "job_id": "job-1",
        "model": "m",
        "replica": "r-1",
        "queue_s": 0.123457,
        "slo_s": "inf",
        "deployment": "Gateway",
    }


@pytest.mark.parametrize("kind", ["json", "text"])
def test_no_text_of_a_caller_forges_a_line(written: Written, kind: str) -> None:
    set_up(written, format=kind)
    log_event(LOGGER, "call_answered", request_id=FORGED, route="/v1/x", status=404)
    LOGGER.warning("no such thing: %s", FORGED)
    assert len(written.lines) == 2
    assert all(line.isascii() and line.isprintable() for line in written.lines)
    if kind == "json":
        assert written.records[0]["request_id"] == FORGED
        assert FORGED in written.records[1]["message"]
    else:
        assert all(re.match(r"(INFO|WARNING) \d{4}-", line) for line in written.lines)
        # the value stays one word: nothing in it reads as a field
        assert 'request_id="' in written.lines[0]
        assert '\\"q\\" a=b" route=/v1/x' in written.lines[0]


@given(st.text())
def test_any_text_is_one_line_and_comes_back_whole(text: str) -> None:
    record = LOGGER.makeRecord("ray_cluster", 20, "", 0, "%s", (text,), None)
    line = JsonFormatter({}).format(record)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == text
    assert len(TextFormatter({}).format(record).splitlines()) == 1


def test_a_traceback_stays_with_its_line(written: Written) -> None:
    for kind in ("json", "text"):
        set_up(written, format=kind)
        try:
            raise ValueError(FORGED)
        except ValueError as error:
            LOGGER.error("it failed", exc_info=error)
    first, *rest = written.lines
    assert "ValueError" in json.loads(first)["exc_text"]
    assert rest[0].endswith("it failed deployment=Gateway")
    assert len(rest) > 3
    assert all(line.startswith("    ") for line in rest[1:])


def test_an_error_that_quotes_the_prompt_is_told_without_it(written: Written) -> None:
    set_up(written, format="json")
    prompt = 'a "secret" garden\nby night'
    one = image_request(prompt=prompt, negative_prompt="fog")
    log_event(LOGGER, "work_failed", one, error=f"no {prompt!r}, no {prompt}, no fog")
    assert "secret" not in written.lines[0]
    assert "fog" not in written.lines[0]
    assert written.records[0]["error"] == "no '[prompt]', no [prompt], no [prompt]"


def test_other_loggers_of_the_same_handler_keep_their_format(written: Written) -> None:
    written.handler.setFormatter(logging.Formatter("theirs: %(message)s"))
    set_up(written, format="json")
    theirs = logging.getLogger("somebody.else")
    written.handler.handle(theirs.makeRecord(theirs.name, 20, "", 0, "hello", (), None))
    LOGGER.info("hello")
    assert written.lines[0] == "theirs: hello"
    assert json.loads(written.lines[1])["message"] == "hello"


def test_the_level_is_that_of_the_configuration(written: Written) -> None:
    set_up(written, format="json", level="warning")
    log_event(LOGGER, "image_leased")
    log_event(LOGGER, "image_failed", level=logging.WARNING)
    assert [record["event"] for record in written.records] == ["image_failed"]


def test_with_a_delay_lines_come_later_in_their_order_with_what_was_bound(
    written: Written,
) -> None:
    handler = written.handler
    set_up_logs(LogsConfig(format="json"), [handler], process={}, delay_s=0.2)
    with bound(request_id="call-1"):
        log_event(LOGGER, "image_accepted")
    told_s = time.time()
    LOGGER.info("quiet")
    assert not written.lines
    deadline_s = time.monotonic() + 60
    while len(written.lines) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert [record["message"] for record in written.records] == ["image_accepted", "quiet"]
    assert written.records[0]["request_id"] == "call-1"
    assert "request_id" not in written.records[1]
    assert written.records[1]["time_s"] == pytest.approx(told_s, abs=0.1)


def test_a_warning_is_written_at_once_and_what_came_before_it_first(written: Written) -> None:
    set_up_logs(LogsConfig(format="json"), [written.handler], process={}, delay_s=60.0)
    log_event(LOGGER, "image_accepted")
    log_event(LOGGER, "image_failed", level=logging.WARNING)
    assert [record["event"] for record in written.records] == ["image_accepted", "image_failed"]


def test_the_end_of_logging_writes_what_is_kept(written: Written) -> None:
    set_up_logs(LogsConfig(format="json"), [written.handler], process={}, delay_s=60.0)
    log_event(LOGGER, "image_accepted")
    (writer,) = logging.getLogger("ray_cluster").handlers
    writer.close()
    assert [record["event"] for record in written.records] == ["image_accepted"]


def test_the_documentation_names_every_event_and_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "logs.md").read_text(encoding="utf-8")
    events, _, fields = page.partition("## Fields")
    documented = re.findall(r"^\| `(\w+)`", events, re.MULTILINE)
    assert sorted(documented) == sorted(get_args(LogEvent))
    names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", fields, re.MULTILINE)))
    always = {"asctime", "time_s", "levelname", "logger", "message", "event", "exc_text"}
    process = {"application", "deployment", "process_id"}
    assert sorted(names) == sorted(always | process | set(LogFields.__annotations__))


def test_the_seconds_of_every_stage_are_logged() -> None:
    timing = Timing(1.0, 2.0, 3.0, 4.0, 5.0)
    assert durations_of(timing) == timing.as_dict()
