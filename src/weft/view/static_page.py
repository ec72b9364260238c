"""A self-contained HTML page without scripts: its head and its style, for phones, light and dark. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from weft.view.memory_chart import GRID, INK, LABEL

STYLE = f"""
:root {{ color-scheme: light dark; --ink: {INK}; --dim: {LABEL}; --rule: {GRID}; --bg: #fff; --card: #f6f8fa;
  --most: #fff8e1; --good: #0a6b2d; --goodbg: #dff3e4; --bad: #a01515; --badbg: #fbe1e1; --link: #0b57d0; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6edf3; --dim: #9198a1; --rule: #2a313a; --bg: #0d1117; --card: #161b22;
    --most: #2d2611; --good: #7ee2a0; --goodbg: #10331d; --bad: #ffa198; --badbg: #4a1518; --link: #79b8ff; }}
  svg [fill="{INK}"] {{ fill: var(--ink); }} svg [fill="{LABEL}"] {{ fill: var(--dim); }}
  svg [stroke="{INK}"] {{ stroke: var(--ink); }} svg [stroke="{GRID}"] {{ stroke: var(--rule); }}
  svg text:not([fill]) {{ fill: var(--ink); }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 64em; margin: 2em auto; padding: 0 1em;
  color: var(--ink); background: var(--bg); }}
h1 {{ font-size: 1.5em; margin-bottom: .2em; }} h2 {{ font-size: 1.15em; margin: 1.8em 0 .4em; }}
.wide {{ overflow-x: auto; }} .wide svg {{ min-width: 620px; max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; }}
th, td {{ text-align: left; padding: .25em .7em; border-bottom: 1px solid var(--rule); vertical-align: top; }}
th {{ font-weight: 600; color: var(--dim); }} tr.most td {{ background: var(--most); }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; }} td {{ white-space: nowrap; }}
pre {{ font: 12.5px/1.45 ui-monospace, monospace; background: var(--card); padding: .8em; overflow-x: auto;
  border-radius: 6px; }}
pre.wraps {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.badge {{ display: inline-block; padding: .15em .7em; margin: .2em .5em .2em 0; border-radius: 1em; font-size: 14px;
  background: var(--card); color: var(--dim); }}
.badge.good {{ background: var(--goodbg); }} .badge.bad {{ background: var(--badbg); }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }}
.note {{ color: var(--dim); font-size: 14px; }}
summary {{ cursor: pointer; color: var(--link); }} details {{ margin: .6em 0; }}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def static_page(body: Iterable[str], *, title: str) -> str:
    """The whole page; nothing is fetched, and no script in a text could run.

    Args:
        body: its elements; tables and charts are wide where a `scrolling` holds them.
        title: text of the tab.
    """
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>",
        "<body>",
        *body,
        "</body></html>",
    ]
    return "\n".join([*lines, ""])


def scrolling(element: str) -> str:
    """A table or chart that scrolls sideways on screens that are less wide."""
    return f'<div class="wide">{element}</div>'
