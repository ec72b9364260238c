"""Elements of an SVG document as text: the document's start, rectangles, texts, tooltips, coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

Attribute = str | int | float
"""Value of an attribute, written as `str` writes it; `px` formats coordinates."""


def element(tag: str, content: str | None = None, /, **attributes: Attribute) -> str:
    """`<tag name="value"/>`, or with a content that is markup itself; `_` in names becomes `-`."""
    opening = tag + _attributes(attributes)
    if content is None:
        return f"<{opening}/>"
    return f"<{opening}>{content}</{tag}>"


def text_element(text: str, /, **attributes: Attribute) -> str:
    """A line of text at a place."""
    return element("text", escape(text), **attributes)


def with_tooltip(markup: str, tooltip: str) -> str:
    """The elements with a text that appears over them."""
    title = element("title", escape(tooltip))
    return element("g", title + markup)


def document_start(width: int, height: int, **attributes: Attribute) -> str:
    """The opening tag of a document of this size in px; `</svg>` closes it."""
    box = f'viewBox="0 0 {width} {height}"'
    size = f'width="{width}" height="{height}"'
    others = _attributes(attributes)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} {size}{others}>'


def px(coordinate: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{coordinate:.1f}"


def _attributes(attributes: Mapping[str, Attribute]) -> str:
    text = ""
    for name, value in attributes.items():
        hyphenated = name.replace("_", "-")
        text += f' {hyphenated}="{value}"'
    return text
