"""The report as one self-contained HTML page: nothing is fetched, and of scripts only its own may run.

A content security policy names the digests of the scripts, so that a script in a recorded text could not run even if
it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft import __version__
from weft.config.run_files import different_keys
from weft.errors import printable
from weft.report.chart_part import (
    SCRIPTS,
    chart_css,
    chart_data,
    drawn_charts,
    page_template,
    text_file,
)
from weft.report.charts import Chart, charts
from weft.report.figures import (
    answers,
    config_rows,
    final_figures,
    measured_memory_text,
    stage_memory,
)
from weft.report.heat_map import expert_heat_map
from weft.report.mesh_picture import mesh_picture
from weft.report.recorded_values import RunRecord
from weft.report.svg_charts import COLOURS

LIVE_SCRIPTS = (*SCRIPTS, "live.js")
MOST_MARKS = 300
"""Events of a run that the table lists, the newest."""
MOST_TEXTS = 20


@dataclass(frozen=True)
class LiveSource:
    """What a live page needs to stay up to date.

    Attributes:
        stream: address of its server-sent events.
        version: what they said when the page was made.
        reload_s: after so long a browser without scripts loads the page again.
    """

    stream: str
    version: str
    reload_s: int = 10


def report_page(
    runs: Sequence[RunRecord], others: Sequence[RunRecord] = (), *, live: LiveSource | None = None
) -> str:
    """The page of one run, or of several over each other.

    Args:
        others: runs that stand in the tables of figures and of keys alone.
        live: of a page that a server keeps up to date; None: the page is a file, which fetches
            nothing.
    """
    found = charts(runs)
    tabled = [*runs, *others]
    configs = [dict(run.config) for run in tabled]
    scripts = list(map(text_file, LIVE_SCRIPTS if live else SCRIPTS))
    return page_template("page.html").render(
        title=" · ".join(printable(run.name) for run in runs),
        csp=policy(scripts, live=live is not None),
        css=page_css(),
        live=live,
        scripts=scripts,
        data=chart_data(runs, found),
        runs=runs,
        tabled=tabled,
        charts=drawn_charts(runs, found),
        answers=[(run, answers(run)) for run in runs],
        figures=_by_name([final_figures(run) for run in tabled]),
        heat_maps=[(run, expert_heat_map(run)) for run in runs],
        stages=[(run, stage_memory(run), measured_memory_text(run)) for run in runs],
        differing=list(config_rows(tabled, different_keys(configs))),
        config=list(
            config_rows(tabled, list(dict.fromkeys(key for each in configs for key in each)))
        ),
        layouts=[(run, mesh_picture(str(run.start.get("layout", "")))) for run in runs],
        marks=[(run, list(reversed(run.marks))[:MOST_MARKS]) for run in runs],
        samples=[(run, list(run.samples)[-MOST_TEXTS:]) for run in runs],
        left_out=_left_out(found),
        num_colours=len(COLOURS),
        version=__version__,
    )


def policy(scripts: Sequence[str], *, live: bool) -> str:
    """The content security policy of a page: these scripts may run, and a live page may read its
    server.
    """
    sources = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policies = ["default-src 'none'", "style-src 'unsafe-inline'", f"script-src {sources}"]
    own = "'self'" if live else "'none'"
    if live:
        policies.append(f"connect-src {own}")
    return "; ".join([*policies, "base-uri 'none'", f"form-action {own}"])


def live_policy() -> str:
    """The policy of the server of live pages: their scripts, of which each page allows its own."""
    return policy(list(map(text_file, LIVE_SCRIPTS)), live=True)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def page_css() -> str:
    """The style of pages, in light and dark."""
    return f"{chart_css()}\n{text_file('page.css')}"


def _by_name(figures: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """A row for each figure that some run has."""
    rows = [(name, [each[name] for each in figures]) for name in figures[0]]
    return [(name, values) for name, values in rows if set(values) - {"-"}]


def _left_out(found: Sequence[Chart]) -> list[str]:
    """What downsampling has left out: `1,000 of 100,000 points of loss`."""
    texts = []
    for chart in found:
        for series in chart.series:
            if not series.curve.is_whole:
                shown = f"{len(series.curve.x):,} of {series.curve.total:,}"
                texts.append(f"{printable(series.label)} ({chart.title.lower()}): {shown} points")
    return texts
