"""Tables of results, for the terminal and as Markdown.

A table is a list of rows, a row maps column names to figures, and the file of results holds the
very same rows. A section of results is a mapping with ``what`` was measured, ``tables`` by title,
and, where there are any, ``aims``, ``notes`` and ``problems``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.verdicts import aim_row

Row = Mapping[str, Any]
Section = dict[str, Any]


def print_sections(console: Console, sections: Mapping[str, Section], *, quick: bool) -> None:
    """Print the tables, notes and problems of every section, then all aims."""
    for name, section in sections.items():
        console.print(f"\n[bold]{name}[/bold]: {section.get('what', '')}")
        for title, rows in section.get("tables", {}).items():
            console.print(_table(title, rows))
        for note in section.get("notes", ()):
            console.print(note, markup=False)
        for problem in section.get("problems", ()):
            console.print(f"FAILED {problem}", style="red", markup=False)
    aims = [aim for section in sections.values() for aim in section.get("aims", ())]
    if aims:
        console.print(_table("Aims", [aim_row(aim) for aim in aims]))
    if quick:
        console.print("[yellow]a quick run: it shows that everything works, not how fast[/yellow]")


def has_problems(sections: Mapping[str, Section]) -> bool:
    """Whether something is wrong in a section."""
    return any(section.get("problems") for section in sections.values())


def markdown_report(title: str, head: Sequence[str], sections: Mapping[str, Section]) -> str:
    """Return all aims and sections as a Markdown page."""
    aims = [aim_row(aim) for section in sections.values() for aim in section.get("aims", ())]
    lines = [f"# {title}", "", *(f"- {line}" for line in head), ""]
    if aims:
        lines += ["## Aims", "", *markdown_table(aims)]
    for name, section in sections.items():
        lines += [f"## {name}", "", section.get("what", ""), ""]
        for table, rows in section.get("tables", {}).items():
            if rows:
                lines += [f"### {table}", "", *markdown_table(rows)]
        problems = (f"FAILED {one}" for one in section.get("problems", ()))
        lines += [f"- {note}" for note in (*section.get("notes", ()), *problems)]
        lines.append("")
    return "\n".join(lines)


def markdown_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table, and an empty one."""
    columns = _columns(rows)
    yield f"| {' | '.join(_heading(column) for column in columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(figure_text(row.get(column)) for column in columns)} |"
    yield ""


def figure_text(figure: Any) -> str:
    """Return a figure as tables have it: a summary as ``2.41 (2.3 to 2.55)``, its range."""
    match figure:
        case None:
            return "-"
        case bool():
            return "yes" if figure else "no"
        case float():
            return f"{figure:.4g}"
        case {"median": median, "min": low, "max": high}:
            return f"{median:.4g} ({low:.3g} to {high:.3g})"
        case {"value": value, "low": low, "high": high}:
            return f"{value:.4g} ({low:.3g} to {high:.3g})"
        case Mapping():
            return ", ".join(f"{name} {figure_text(one)}" for name, one in figure.items())
        case list() | tuple():
            return ", ".join(figure_text(one) for one in figure)
    return str(figure)


def as_json(found: Any) -> str:
    """Return results as JSON; infinities and NaN, which JSON lacks, as words."""
    return json.dumps(_finite(found), allow_nan=False) + "\n"


def _finite(found: Any) -> Any:
    match found:
        case Mapping():
            return {name: _finite(one) for name, one in found.items()}
        case list() | tuple():
            return [_finite(one) for one in found]
        case float() if not math.isfinite(found):
            return str(found)
    return found


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    columns = _columns(rows)
    for column in columns:
        is_text = any(isinstance(row.get(column), str) for row in rows)
        table.add_column(_heading(column), justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(figure_text(row.get(column)) for column in columns))
    return table


def _columns(rows: Sequence[Row]) -> list[str]:
    """All columns, in the order in which rows name them."""
    return list(dict.fromkeys(column for row in rows for column in row))


def _heading(column: str) -> str:
    return column.replace("_", " ")
