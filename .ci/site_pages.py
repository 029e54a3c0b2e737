"""Hooks of mkdocs: pages made from the code, the configs and the gallery, which are never out of date."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
#: pages outside docs/, and where they stand in the site
MOVED = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
MOVED |= {f"examples/{path.name}": f"examples/{path.name}" for path in (ROOT / "examples").glob("*.*")}
MOVED |= {"README.md": "index.md"}
#: public names beside those of the package itself
FURTHER = {
    "Layers": ["rmd_plugin.encoding.layer_encoder.LayerEncoder", "rmd_plugin.encoding.layer_encoder.LayerMean"],
    "Benchmarks": ["rmd_plugin.benchmarks.base.OODBenchmark", "rmd_plugin.benchmarks.base.as_benchmark"],
    "Backbones": ["rmd_plugin.backbones.base.Backbone"],
}
_ALT = re.compile(r'^# alt: (.+)\nfigure\.savefig\("([\w.]+)"', re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and those that stand outside docs/."""
    made: dict[str, str | bytes] = {"api.md": api_page(), "configuration.md": configuration_page()}
    for source, target in MOVED.items():
        if target != "index.md":
            made[target] = (ROOT / source).read_text(encoding="utf-8")
    for script in sorted((ROOT / "docs/gallery").glob("*.py")):
        made |= {f"gallery/{name}": content for name, content in run_script(script).items()}
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside docs/ lead to their copies in the site."""
    depth = page.file.src_uri.count("/")

    def lead(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        # as on GitHub: from docs/ one step up, from the top level none
        plain = path.removeprefix("../" * (depth + 1)) if path.startswith("../") else path
        plain = plain.removeprefix("docs/") if page.file.src_uri in MOVED.values() else plain
        if plain in MOVED:
            return f"]({'../' * depth}{MOVED[plain]}{anchor})"
        return f"]({plain}{anchor})" if page.file.src_uri in MOVED.values() else found[0]

    return re.sub(r"\]\(((?!https?:|#|mailto:)[^)#\s]+)(#[^)\s]*)?\)", lead, markdown)


# -- pages ------------------------------------------------------------------------------------------------------------


def api_page() -> str:
    """Every public name, with its docstring."""
    package = importlib.import_module("rmd_plugin")
    names = [name for name in package.__all__ if not name.startswith("__")]
    groups = {"rmd_plugin": [f"rmd_plugin.{package._EXPORTS[name]}.{name}" for name in names], **FURTHER}
    lines = ["# API", "", "What `from rmd_plugin import ...` gives, and what parts of one's own are made of.", ""]
    for title, paths in groups.items():
        lines += [f"## {title}", ""]
        for path in paths:
            lines += [f"::: {path}", "    options:", f'      heading: "{path.rpartition(".")[2]}"', ""]
    return "\n".join(lines)


def configuration_page() -> str:
    """Every config of ``conf/``: the commands, then each group with its choices."""
    conf = ROOT / "conf"
    lines = [
        "# Configuration",
        "",
        "Made from `conf/`. Any value is changed on the command line (`rmd-train trainer.max_epochs=3`), a choice by",
        "`GROUP=NAME`; `rmd-train --help` and `rmd-compare benchmark=NAME --help` say more.",
        "",
        "## Commands",
        "",
    ]
    for path in sorted(conf.glob("*.yaml")):
        lines += [f"### rmd-{path.stem}", "", "```yaml", path.read_text(encoding="utf-8").strip(), "```", ""]
    groups = sorted(
        path for path in conf.iterdir() if path.is_dir() and path.name not in ("command", "hydra", "shared")
    )
    for group in groups:
        choices = sorted(group.rglob("*.yaml"))
        lines += [f"## {group.name}", ""]
        for path in choices:
            name = path.relative_to(group).with_suffix("").as_posix()
            if name.rpartition("/")[2].startswith("_"):
                continue
            body = "\n".join(f"    {line}".rstrip() for line in path.read_text(encoding="utf-8").strip().splitlines())
            lines += [f'??? note "{group.name}={name}"', "", "    ```yaml", body, "    ```", ""]
    return "\n".join(lines)


# -- gallery ----------------------------------------------------------------------------------------------------------


def run_script(script: Path) -> dict[str, str | bytes]:
    """Run a script cell by cell, and give the page about it and its pictures by name. An error ends the build."""
    lines = [f"[Download this script]({script.name})", ""]
    made: dict[str, str | bytes] = {}
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    started = time.perf_counter()
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(os.chdir, here)
        os.chdir(folder)
        for kind, text in cells(script.read_text(encoding="utf-8")):
            if kind == "markdown":
                lines += [text, ""]
                continue
            lines += ["```python", text, "```", ""]
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(text, str(script), "exec"), names)
            if said.getvalue().strip():
                lines += ["```text", said.getvalue().rstrip(), "```", ""]
            for alt, file in _ALT.findall(text):
                unique = f"{script.stem}_{file}"
                made[unique] = Path(file).read_bytes()
                lines += [f"![{alt}]({unique})", ""]
    print(f"gallery/{script.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    title = lines.index(next(line for line in lines if line.startswith("# ")))
    lines[0], lines[title] = lines[title], lines[0]
    return {f"{script.stem}.md": "\n".join(lines), **made}


def cells(text: str) -> list[tuple[str, str]]:
    """Kind and text of the cells of a script in jupytext's percent format."""
    found = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            found.append(("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
        elif body.strip():
            found.append(("code", body.strip()))
    return found


os.environ.setdefault("MPLBACKEND", "Agg")
