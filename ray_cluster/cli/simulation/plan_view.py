"""What ``plan show``, ``plan history`` and ``plan explain`` print."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime

import typer
from rich.table import Table
from rich.text import Text

from ray_cluster.api.routes.plan import CascadeCard, PlannedPoolCard, PlanResponse, RoundCard
from ray_cluster.cli.output import print_table, stderr, stdout
from ray_cluster.errors import ConfigError

_STATES = {
    "applied": "plans are applied",
    "paused": "paused: plans are made and not applied; 'plan resume' ends it",
    "dry_run": "control.dry_run: plans are made and not applied",
    "starting": "the controller is starting: it has made no plan yet",
    "silent": "the controller has not been heard of for a while; the last plan stays in force",
}


def show_plan(plan: PlanResponse, *, as_json: bool) -> None:
    """Print the last round."""
    if as_json:
        typer.echo(plan.model_dump_json(indent=2))
        return
    stdout().print(_STATES[plan.state], markup=False)
    for card in plan.cascades:
        stdout().print(_in_force(card), markup=False)
    if (latest := plan.latest) is None:
        return
    columns = ("pool", "planned", "ready", "batch", "load/s", "each/s", "because of")
    rows = [
        (
            one.pool,
            str(one.num_planned),
            str(one.num_ready),
            str(one.max_batch),
            f"{one.load_per_s:.3g}",
            f"{one.replica_per_s:.3g}",
            one.reason,
        )
        for one in latest.pools
    ]
    print_table(stdout(), _table(columns, rows))
    for line in (*_cascades(latest), *_problems(latest)):
        stdout().print(line, markup=False)


def list_rounds(plan: PlanResponse, limit: int, *, as_json: bool) -> None:
    """Print the rounds that changed something, the newest first."""
    rounds = plan.history[:limit]
    if as_json:
        typer.echo(json.dumps([one.model_dump() for one in rounds], indent=2))
    elif rounds:
        rows = [(_when(one), str(one.version), _mode(one), _words(one)) for one in rounds]
        print_table(stdout(), _table(("when", "version", "mode", "changes"), rows))
    else:
        stderr().print("no plan has changed anything yet")


def explain_plan(plan: PlanResponse, version: int | None) -> None:
    """Print why a plan is as it is: each round of it that changed something, the newest first.

    Raises:
        ConfigError: no round of that version is known.
    """
    found = [] if plan.latest is None else [plan.latest]
    if version is not None:
        # one that a change by somebody else is put back to has a round more
        found = [one for one in plan.history if one.version == version]
        if not found:
            known = ", ".join(str(one.version) for one in plan.history) or "none"
            raise ConfigError(f"there is no plan of version {version}; those that changed: {known}")
    if not found:
        stdout().print(_STATES[plan.state], markup=False)
    for place, one in enumerate(found):
        if place:
            stdout().print()
        for line in _explained(one):
            stdout().print(line, markup=False, soft_wrap=True)


def _explained(one: RoundCard) -> Iterator[str]:
    yield f"plan {one.version}, round of {_when(one)}, made in {one.took_s:.2f} s ({_mode(one)})"
    for demand in one.demand:
        rate = "demand is not known yet"
        if demand.per_s is not None:
            rate = f"{demand.per_s:.3g} images/s are called for"
        yield f"{demand.service}: {rate}, {demand.num_waiting} wait"
    for pool in one.pools:
        yield _pool_words(pool)
    yield from _cascades(one)
    if one.actions:
        yield f"changes: {'; '.join(one.actions)}"
    yield from _problems(one)


def _pool_words(pool: PlannedPoolCard) -> str:
    before = f" instead of {pool.num_before}" if pool.num_before != pool.num_planned else ""
    cost = ""
    if pool.num_planned > pool.num_before and pool.load_s:
        cost = f"; a started one serves after some {pool.load_s:.0f} s"
    return (
        f"{pool.pool}: {_replicas(pool.num_planned)}{before}, {pool.num_ready} ready, "
        f"because of {pool.reason}: the load is {pool.load_per_s:.3g}/s, and a replica makes "
        f"{pool.replica_per_s:.3g}/s in batches of {pool.max_batch}{cost}"
    )


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _cascades(one: RoundCard) -> Iterator[str]:
    for cascade in one.cascades:
        share = f"{100 * cascade.deferral_rate:.0f} %"
        words = (
            f"{cascade.service}: defers {_below(cascade.threshold)}, planned as {share} of images"
        )
        if cascade.idle_threshold != cascade.threshold:
            words += f"; while the heavy model stands idle, {_below(cascade.idle_threshold)}"
        yield words


def _in_force(cascade: CascadeCard) -> str:
    below = "all images" if cascade.threshold is None else _below(cascade.threshold)
    share = "no confidence is known" if cascade.below is None else f"{cascade.below:.0%} of late"
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(cascade.images.items()))
    return f"{cascade.service}: now {below} are made anew, {share}; so far {counts or 'no image'}"


def _below(threshold: float | None) -> str:
    return "what the settings allow" if threshold is None else f"confidences below {threshold:.3g}"


def _problems(one: RoundCard) -> Iterator[str]:
    if one.infeasible is not None:
        yield f"the demand cannot be met: {one.infeasible}"
    for words in one.failures:
        yield f"failed, tried again: {words}"
    for words in one.overdue:
        yield f"not applied in time: {words}"
    for words in one.rollbacks:
        yield f"rolled back: {words}"
    for held in one.held:
        yield (
            f"{held.pool} is held at {_replicas(held.num_replicas)} until "
            f"{_clock(held.until)} "
            f"(rollbacks in a row: {held.num_failures})"
        )


def _mode(one: RoundCard) -> str:
    """Return whether a round's plan was applied: not all of it, where something has failed."""
    return "applied in part" if one.mode == "applied" and one.failures else one.mode


def _words(one: RoundCard) -> str:
    return "; ".join([*one.actions, *_problems(one)])


def _when(one: RoundCard) -> str:
    return _clock(one.at)


def _clock(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
