"""The list of runs as a live HTML page: links to their pages, and a form that shows several of them over each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft import __version__
from weft.report.chart_part import page_template, text_file
from weft.report.page import LiveSource, page_css, policy


@dataclass(frozen=True)
class ListRow:
    """One run of the list.

    Attributes:
        key: by which the form names it.
        address: of its page.
        cells: its texts, a column each.
    """

    key: str
    address: str
    cells: tuple[str, ...]


def list_page(
    rows: Sequence[ListRow],
    live: LiveSource,
    *,
    title: str,
    columns: Sequence[str],
    sort: str,
    most: int,
) -> str:
    """The HTML page that lists the runs of a folder.

    Args:
        columns: names of the cells.
        sort: the column by which the rows are sorted.
        most: how many runs one page shows.
    """
    script = text_file("live.js")
    return page_template("run_list.html").render(
        title=title,
        csp=policy([script], live=True),
        css=page_css(),
        script=script,
        live=live,
        rows=rows,
        columns=columns,
        sort=sort,
        most=most,
        version=__version__,
    )
