"""Pages without scripts: fetch nothing, fit a phone, have every colour of their charts in the dark."""

from __future__ import annotations

import re

from weft.view.memory_chart import bars, memory_chart
from weft.view.quantity import count
from weft.view.static_page import STYLE, scrolling, static_page

ROLE = {
    "levels": [("F0.0", 8, 9), ("B0.0", 6, 12)],
    "peak_bytes": 12,
    "peak_at": "B0.0",
    **{f"{kind}_bytes": 2 for kind in ("params", "gradients", "optimizer", "buffers")},
}
MEANINGS = {"#d93025"}
"""Of the peak, readable on both grounds; areas have colours of their own."""


def test_a_page_has_its_body_and_its_title_and_fetches_nothing() -> None:
    page = static_page([scrolling("<table></table>")], title="<b>")
    assert "<title>&lt;b&gt;</title>" in page
    assert '<div class="wide"><table></table></div>' in page
    assert "default-src 'none'" in page
    assert 'name="viewport" content="width=device-width' in page
    assert not re.search(r"https?://|<script|@import", page)


def test_every_colour_of_a_page_has_another_value_in_the_dark() -> None:
    light, _, dark = STYLE.partition("@media")
    names = set(re.findall(r"(--\w+):", light))
    assert names
    assert set(re.findall(r"(--\w+):", dark)) == names


def test_texts_and_rules_of_charts_are_recoloured_in_the_dark() -> None:
    _, _, dark = STYLE.partition("@media")
    drawn = bars({"dp": 3.0, "tp": 1.0}, text=count) + memory_chart(ROLE, limit_bytes=None)
    texts = re.findall(r"<text [^>]*>", drawn)
    assert texts
    for text in texts:
        fill = re.search(r'fill="([^"]*)"', text)
        if fill is None or fill[1] not in MEANINGS:
            assert (f'svg [fill="{fill[1]}"]' if fill else "svg text:not([fill])") in dark, text
    for stroke in set(re.findall(r'stroke="([^"]*)"', drawn)) - MEANINGS:
        assert f'svg [stroke="{stroke}"]' in dark
