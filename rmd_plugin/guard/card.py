"""The model card of a guard: what it is, how it is used, how it was judged, what it does not promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rmd_plugin.report.table import markdown_text
from rmd_plugin.untrusted import one_line

#: classes that are listed by name
_LISTED = 50


def model_card(about: Mapping[str, Any], *, onnx: bool) -> str:
    """The card as Markdown, from what ``guard.json`` says."""
    environment = Environment(
        loader=PackageLoader("rmd_plugin.guard"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["plain"] = lambda text: markdown_text(one_line(text))
    environment.filters["percent"] = lambda value: f"{100 * value:.1f} %"
    template = environment.get_template("card.md")
    return template.render(about=about, onnx=onnx, listed=_LISTED, metrics=about.get("metrics") or {})
