"""The report of a proof as one self-contained HTML page. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from weft.errors import counted
from weft.prove.report import Difference, Pass, ProofReport

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #1a1a1a; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 1.6em; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25em .7em; border-bottom: 1px solid #ddd; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: 13px/1.4 ui-monospace, monospace; background: #f4f4f4; } pre { padding: .7em; overflow-x: auto; }
.equal { color: #0a6b2d; } .differs { color: #a01515; }
"""
MAX_ROWS = 50


def page(report: ProofReport) -> str:
    """The whole page; no scripts, nothing is fetched."""
    body = "\n".join(_body(report))
    title = escape(f"weft prove: {report.verdict}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _body(report: ProofReport) -> Iterator[str]:
    kind = "equal" if report.holds else "differs"
    yield f'<h1>{escape(report.layout)}: <span class="{kind}">{report.verdict}</span></h1>'
    ranks = counted(report.ranks, "rank")
    steps = counted(report.steps, "step")
    facts = f"{report.model}; {ranks}, {steps}; {report.compared:,} tensors and numbers in {report.seconds:.1f} s"
    yield f"<p>{escape(facts)}</p>"
    if report.error:
        yield f'<p class="differs">The layout stops with an error: {escape(report.error)}</p>'
    if report.first is not None:
        yield "<h2>First difference in the order of execution</h2>"
        yield _lines(report.first.lines())
    if report.smallest is not None:
        yield "<h2>Smallest failing case</h2>"
        yield f"<p>{escape(report.smallest.layout)}; {escape(report.smallest.model)}</p>"
        if report.smallest.first is not None:
            yield _lines(report.smallest.first.lines())
        yield _lines([report.smallest.command])
    for each in report.passes:
        yield from _pass(each)
    if report.reduced:
        yield "<h2>Reduced sizes</h2>"
        rows = [(key, old, new) for key, (old, new) in report.reduced.items()]
        yield _table(("key", "configured", "compared"), rows)
    for note in report.notes:
        yield f"<p>{escape(note)}</p>"
    if report.command:
        yield "<h2>Command</h2>"
        yield _lines([report.command])


def _pass(each: Pass) -> Iterator[str]:
    yield f"<h2>{escape(each.dtype)}</h2><p>Bounds: {escape(each.source)}</p>"
    rows = []
    for bound in each.bounds:
        verdict = "equal" if bound.closest <= 1 else "differs"
        numbers = (f"{bound.compared:,}", f"{bound.largest:.1e}", f"{bound.bound:.1e}")
        rows.append((bound.phase, *numbers, verdict))
    yield _table(("phase", "tensors", "difference closest to its bound", "bound", ""), rows)
    if each.differences:
        shown = each.differences[:MAX_ROWS]
        yield f"<p>{len(each.differences):,} differences, in the order of execution:</p>"
        yield _table(("tensor", "is", "axis", "ranks", "difference", "bound"), map(_row, shown))


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
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = [f"<tr>{cells}</tr>"]
    for row in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for value in row)
        lines.append(f"<tr>{cells}</tr>")
    return "<table>" + "\n".join(lines) + "</table>"


def _lines(lines: Iterable[str]) -> str:
    return "<pre>" + escape("\n".join(lines)) + "</pre>"
