"""The charts of a report as PNG, for chats and slides: the SVG picture, rasterized by resvg, which the extra `png` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from weft.errors import Fault, UserError
from weft.view.svg_elements import document_start, text_element

PACKAGE = "resvg_py"
SCALE = 2.0
"""Pixels a unit of the picture: sharp on screens with many of them."""
FONTS_FIX = "install a font, such as DejaVu Sans (package fonts-dejavu-core), or use --svg"


def png_faults() -> Iterator[Fault]:
    """The package that rasterizes is installed, and finds a font."""
    if importlib.util.find_spec(PACKAGE) is None:
        fix = "pip install 'weft-train[png]', or use --svg"
        yield Fault("png", f"{PACKAGE} is not installed", fix=fix)
    elif not _has_font():
        yield Fault(
            "png", "there is no font on this machine for the text in a picture", fix=FONTS_FIX
        )


def png_of(svg: str) -> bytes:
    """The picture of an SVG document.

    Raises:
        UserError: the package or a font is missing.
    """
    faults = list(png_faults())
    if faults:
        raise UserError(*faults)
    return _rasterized(svg)


def _rasterized(svg: str) -> bytes:
    import resvg_py  # late: an extra

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=SCALE))


def _has_font() -> bool:
    """Whether text leaves a mark: without a font it is left out in silence."""
    start = document_start(20, 20, font_family="DejaVu Sans, sans-serif", font_size=12)
    text = text_element("W", x=2, y=15)
    return _rasterized(f"{start}{text}</svg>") != _rasterized(f"{start}</svg>")
