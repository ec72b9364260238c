"""The report of a proof as one self-contained HTML page. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from weft.errors import counted
from weft.prove.report import Difference, Pass, ProofReport
from weft.view.static_page import scrolling, static_page

MAX_ROWS = 50


def page(report: ProofReport) -> str:
    """The whole page; no scripts, nothing is fetched."""
    return static_page(_body(report), title=f"weft prove: {report.verdict}")


def _body(report: ProofReport) -> Iterator[str]:
    kind = "good" if report.holds else "bad"
    yield f'<h1>{escape(report.layout)}: <span class="{kind}">{report.verdict}</span></h1>'
    ranks = counted(report.ranks, "rank")
    steps = counted(report.steps, "step")
    compared = f"{report.compared:,} tensors and numbers in {report.seconds:.1f} s"
    facts = f"{report.model}; {ranks}, {steps}, with {report.against}; {compared}"
    yield _paragraph(f"{facts}{report.coverage}")
    if report.error:
        text = escape(f"The layout stops with an error: {report.error}")
        yield f'<p class="bad">{text}</p>'
    if report.first is not None:
        yield "<h2>First difference in the order of execution</h2>"
        yield _lines(report.first.lines())
    if report.smallest is not None:
        yield from _smallest_case(report.smallest)
    for each in report.passes:
        yield from _pass(each)
    if report.reduced:
        yield "<h2>Reduced sizes</h2>"
        rows = []
        for key, (configured, compared) in report.reduced.items():
            rows.append((key, configured, compared))
        yield _table(("key", "configured", "compared"), rows)
    for note in report.notes:
        yield _paragraph(note)
    if report.command:
        yield "<h2>Command</h2>"
        yield _lines([report.command])


def _smallest_case(case: ProofReport) -> Iterator[str]:
    yield "<h2>Smallest failing case</h2>"
    yield _paragraph(f"{case.layout}; {case.model}")
    if case.first is not None:
        yield _lines(case.first.lines())
    yield _lines([case.command])


def _pass(each: Pass) -> Iterator[str]:
    yield f"<h2>{escape(each.dtype)}</h2>"
    yield _paragraph(f"Bounds: {each.source}")
    rows = []
    for bound in each.bounds:
        row = (
            bound.phase,
            f"{bound.compared:,}",
            f"{bound.largest:.1e}",
            f"{bound.bound:.1e}",
            "equal" if bound.closest <= 1 else "differs",
        )
        rows.append(row)
    head = ("phase", "tensors", "difference closest to its bound", "bound", "")
    yield _table(head, rows)
    if each.differences:
        yield f"<p>{len(each.differences):,} differences, in the order of execution:</p>"
        shown = each.differences[:MAX_ROWS]
        columns = ("tensor", "is", "axis", "ranks", "difference", "bound")
        yield _table(columns, map(_row, shown))


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _row(difference: Difference) -> tuple[str, ...]:
    return (
        difference.title,
        difference.relation,
        difference.axis,
        " ".join(map(str, difference.ranks)),
        f"{difference.measured:.1e}",
        f"{difference.bound:.1e}",
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [_table_row("th", head)]
    lines.extend(_table_row("td", row) for row in rows)
    body = "\n".join(lines)
    return scrolling(f"<table>{body}</table>")


def _table_row(tag: str, values: Iterable[str]) -> str:
    cells = "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values)
    return f"<tr>{cells}</tr>"


def _lines(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return f'<pre class="wraps">{escape(text)}</pre>'
