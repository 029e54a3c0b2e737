"""Self-contained HTML from the templates beside this file: pictures inside, no script, nothing loaded from anywhere."""

from __future__ import annotations

import base64
import functools
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A picture inside a page: itself as a data address, what it shows in words, and its size in CSS pixels."""

    source: str
    alt: str
    width: int
    height: int


def render(template: str, **content: Any) -> str:
    """A template of the folder ``templates`` filled in; every text is escaped."""
    return _environment().get_template(template).render(content)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("rmd_plugin.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def picture(figure: Figure, alt: str) -> Picture:
    """A figure as an SVG whose letters are outlines, so that no font is needed; ``alt`` says what it shows."""
    from matplotlib import rc_context

    from rmd_plugin.report.style import house_style

    buffer = io.BytesIO()
    with house_style(), rc_context({"svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    # an address, not the SVG itself: several in one document would share their ids
    source = f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return Picture(source, alt, width, height)
