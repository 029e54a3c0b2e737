"""A self-contained HTML document: one style, pictures inside, no script, nothing loaded from anywhere."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from rmd_plugin.report.style import house_style
from rmd_plugin.report.table import Table, to_html

STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --quiet: #5b636e; --line: #dfe3e8; --soft: #f5f7f9; --accent: #0072b2; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: #fff; color: var(--ink); overflow-wrap: break-word;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 4rem; }
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; margin: .5rem 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .5rem; padding-top: 1.25rem; border-top: 1px solid var(--line); }
p { max-width: 46rem; margin: .5rem 0 1rem; }
.lead, .quiet { color: var(--quiet); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0 0;
  padding: 0; }
.tiles div { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.tiles dt { color: var(--quiet); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.5rem; font-weight: 650; line-height: 1.3; }
.tiles dd small { display: block; font-size: .8rem; font-weight: 400; color: var(--quiet); }
.notice { border-left: 4px solid #d55e00; background: #fdf3ec; padding: .6rem .9rem; margin: 1rem 0;
  border-radius: 0 .4rem .4rem 0; }
.notice.mild { border-color: #e69f00; background: #fdf8ec; }
.scroll { overflow-x: auto; }
figure { margin: 0; min-width: 0; }
figure.table { margin: 1rem 0 1.5rem; }
figcaption { color: var(--quiet); font-size: .92rem; margin: 0 0 .5rem; }
table { border-collapse: separate; border-spacing: 0; font-size: .93rem; font-variant-numeric: tabular-nums;
  min-width: 100%; }
th, td { text-align: right; padding: .38rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; }
th { vertical-align: bottom; border-bottom: 2px solid var(--ink); font-weight: 600; }
th.left, td.left { text-align: left; }
th.left:first-child, td.left:first-child { position: sticky; left: 0; background: #fff; padding-left: 0; }
td.best strong { color: var(--accent); }
.detail { display: block; color: var(--quiet); font-size: .8rem; font-weight: 400; }
td.left:not(:first-child) { white-space: normal; }
td.left:last-child { min-width: 15rem; }
td.wrap, td.wrap.left:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
.notes { color: var(--quiet); font-size: .88rem; padding-left: 1.1rem; margin: .6rem 0 0; max-width: 60rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1.25rem;
  margin: 1rem 0; }
.panels.wide { grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr)); }
.panels figure { max-width: 36rem; }
img { display: block; width: 100%; height: auto; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: .4rem; padding: .75rem .9rem;
  margin: .5rem 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin: 1rem 0; }
summary { cursor: pointer; color: var(--accent); }
.versions { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1.25rem; font-size: .92rem;
  margin: 1rem 0; }
.versions dt { color: var(--quiet); }
.versions dd { margin: 0; overflow-wrap: anywhere; }
@media (min-width: 60rem) { .versions { grid-template-columns: repeat(2, max-content minmax(0, 1fr)); } }
@media (max-width: 30rem) { .versions { grid-template-columns: minmax(0, 1fr); } .versions dd { margin-bottom: .4rem; }
  .tiles { grid-template-columns: 1fr 1fr; } .tiles dd { font-size: 1.25rem; } }
@media print { main { max-width: none; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""


def document(title: str, body: Iterable[str]) -> str:
    """The whole page.

    Args:
        title: what the browser's tab says; plain text.
        body: HTML fragments, one after the other.
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # nothing is fetched and nothing runs, whatever a name in the results may hold
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
            f"<title>{html.escape(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def heading(text: str, *, level: int = 2) -> str:
    """A heading; plain text."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def paragraph(text: str, *, kind: str = "") -> str:
    """A paragraph of plain text.

    Args:
        text: what it says.
        kind: class for the style: ``lead``, ``quiet``, ``notice`` or ``notice mild``.
    """
    return f"<p{_class(kind)}>{html.escape(text)}</p>"


def tiles(items: Sequence[tuple[str, str, str]]) -> str:
    """Key figures side by side.

    Args:
        items: name, number and small print of each.
    """
    cells = [
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}"
        + (f"<small>{html.escape(detail)}</small>" if detail else "")
        + "</dd></div>"
        for name, value, detail in items
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>' if cells else ""


def table_block(table: Table) -> str:
    """A table that scrolls by itself where the screen is narrow."""
    fragment = to_html(table).replace("<table>", '<div class="scroll" tabindex="0"><table>', 1)
    return fragment.replace("</table>", "</table></div>", 1)


def picture(figure: Figure, alt: str, *, caption: str = "") -> str:
    """A figure as a picture inside the page: an SVG whose letters are outlines, so that no font is needed.

    Args:
        figure: the figure.
        alt: what it shows, for those who do not see it.
        caption: text above it.
    """
    buffer = io.BytesIO()
    with house_style(), rc_context({"svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    # as an image: several SVGs in one document would share their ids
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    text = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(alt)}" width="{width}" height="{height}">'
    return f"<figure>{text}{image}</figure>"


def panels(pictures: Sequence[str], *, wide: bool = False) -> str:
    """Pictures beside each other, below each other where the screen is narrow."""
    return f'<div class="panels{" wide" if wide else ""}">{"".join(pictures)}</div>' if pictures else ""


def preformatted(text: str) -> str:
    """Text as it stands, broken where the screen ends."""
    return f"<pre><code>{html.escape(text)}</code></pre>"


def folded(summary: str, *fragments: str) -> str:
    """HTML fragments that open with a click."""
    return f"<details><summary>{html.escape(summary)}</summary>{''.join(fragments)}</details>"


def definitions(items: Mapping[str, str]) -> str:
    """Names and values in two columns."""
    cells = [f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in items.items()]
    return f'<dl class="versions">{"".join(cells)}</dl>'


def _class(kind: str) -> str:
    return f' class="{html.escape(kind)}"' if kind else ""
