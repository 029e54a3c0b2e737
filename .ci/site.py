"""Build the site: ``python .ci/site.py OUT`` (extra ``docs``; runs the gallery, a few minutes on two cores).

The pages about the code, the configs and the gallery are generated first, so any tool that reads Markdown and
``mkdocs.yml`` can build the rest; here it is Zensical.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: pages outside docs/, and where they are in the site
COPIED = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
COPIED |= {f"examples/{path.name}": f"examples/{path.name}" for path in (ROOT / "examples").glob("*.md")}
REPOSITORY = "https://github.com/rmd-plugin/rmd-plugin"
#: the pages of the API, and the public names on each
API = {
    "detectors": (
        "Detectors",
        "Fit a detector on features or on a loader, score new samples, save it. RMD lists the methods that all share.",
        "RMD FusedRMD Mahalanobis MarginalMahalanobis PartialMahalanobis RelativeFlow FlowLikelihood load_detector "
        "NumericalWarning",
    ),
    "decisions": ("Decisions", "Turn scores into p-values and decisions.", "Calibrated CalibrationScores DriftAlarm"),
    "training": ("Training and metrics", "Watch OOD detection during training.", "OODMonitor OODScores"),
    "deploy": ("Deploy", "Use a network and its detector as one object.", "Guard"),
    "tables": (
        "Large tables",
        "Fit and score embeddings in many files, or collect moments in several processes.",
        "fit_table score_table table_state ClassMoments Moments",
    ),
    "benchmarks": (
        "Benchmarks",
        "Subclass these to bring your own data.",
        "benchmarks.base.OODBenchmark benchmarks.framework.as_benchmark",
    ),
    "backbones": ("Backbones", "Subclass this to bring your own network.", "backbones.base.Backbone"),
}
#: gallery scripts that are also kept as notebooks, which Colab opens from the repository
NOTEBOOKS = ("monitor", "compare", "own_images")
_ALT = re.compile(r'^# alt: (.+)\nfigure\.savefig\("([\w.]+)"', re.MULTILINE)


def main() -> int:
    """Generate the pages and build them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "out", type=Path, nargs="?", help="folder of the site, replaced; without it only notebooks are written"
    )
    parser.add_argument("--skip-gallery", action="store_true", help="show the scripts without running them")
    options = parser.parse_args()
    for name in NOTEBOOKS:
        (ROOT / f"docs/gallery/{name}.ipynb").write_text(notebook(name))
    if options.out is None:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copytree(ROOT / "docs", work / "docs")
        for name in ("mkdocs.yml", "site_docstrings.py"):
            shutil.copy(ROOT / ".ci" / name, work)
        for uri, content in generated_pages(run_gallery=not options.skip_gallery).items():
            path = work / "docs" / uri
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        for path in (work / "docs").rglob("*.md"):
            path.write_text(redirect_links(path.read_text(), path.relative_to(work / "docs").as_posix()))
        build = [sys.executable, "-m", "zensical", "build", "--strict", "-f", work / "mkdocs.yml"]
        code = subprocess.run(build).returncode
        if code == 0:
            shutil.rmtree(options.out, ignore_errors=True)
            shutil.move(work / "site", options.out)
    return code


def generated_pages(*, run_gallery: bool) -> dict[str, str | bytes]:
    """Content by place in the site, of all that is not in docs/."""
    pages: dict[str, str | bytes] = {"configuration.md": configuration_page(), **api_pages()}
    for source, target in COPIED.items():
        pages[target] = (ROOT / source).read_text(encoding="utf-8")
    for script in sorted((ROOT / "docs/gallery").glob("*.py")):
        for name, content in script_page(script, run=run_gallery).items():
            pages[f"gallery/{name}"] = content
    return pages


def redirect_links(markdown: str, uri: str) -> str:
    """Let links to files outside docs/ lead to their copies in the site, or to the repository."""
    depth = uri.count("/")

    def redirect(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        # as on GitHub: from docs/ one step up, from the top level none
        plain = path.removeprefix("../" * (depth + 1)) if path.startswith("../") else path
        plain = plain.removeprefix("docs/") if uri in COPIED.values() else plain
        if plain in COPIED:
            return f"]({'../' * depth}{COPIED[plain]}{anchor})"
        if path.startswith("../" * (depth + 1)):
            return f"]({REPOSITORY}/blob/main/{plain}{anchor})"
        return f"]({plain}{anchor})" if uri in COPIED.values() else link[0]

    return re.sub(r"\]\(((?!https?:|#|mailto:)[^)#\s]+)(#[^)\s]*)?\)", redirect, markdown)


# -- pages ------------------------------------------------------------------------------------------------------------


def api_pages() -> dict[str, str]:
    """One page per topic, with the docstrings of its public names."""
    package = importlib.import_module("rmd_plugin")
    listed = {name for _, _, names in API.values() for name in names.split() if "." not in name}
    if listed != set(package.__all__) - {"__version__"}:
        raise SystemExit(f"API in {__file__} and rmd_plugin.__all__ differ: {listed ^ set(package.__all__)}")
    pages = {}
    for topic, (title, task, names) in API.items():
        lines = [f"# {title}", "", task, ""]
        for name in names.split():
            path = f"rmd_plugin.{name if '.' in name else f'{package._EXPORTS[name]}.{name}'}"
            # what all detectors share is described once, with RMD
            inherited = str(topic != "detectors" or name == "RMD").lower()
            options = [f'heading: "{name.rpartition(".")[2]}"', f"inherited_members: {inherited}"]
            lines += [f"::: {path}", "    options:", *(f"      {option}" for option in options), ""]
        pages[f"api/{topic}.md"] = "\n".join(lines)
    return pages


def configuration_page() -> str:
    """Every config of ``conf/``: the commands, then each group with its choices."""
    conf = ROOT / "conf"
    lines = [
        "# Configuration",
        "",
        "Look up what can be set. Any value is changed on the command line (`rmd-train trainer.max_epochs=3`), a",
        "choice by `GROUP=NAME`; `rmd-train --help` and `rmd-compare benchmark=NAME --help` explain the options. This",
        "page is generated from `conf/`.",
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
        lines += [f"## {group.name}", ""]
        for path in sorted(group.rglob("*.yaml")):
            name = path.relative_to(group).with_suffix("").as_posix()
            if name.rpartition("/")[2].startswith("_"):
                continue
            body = "\n".join(f"    {line}".rstrip() for line in path.read_text(encoding="utf-8").strip().splitlines())
            lines += [f'??? note "{group.name}={name}"', "", "    ```yaml", body, "    ```", ""]
    return "\n".join(lines)


# -- gallery ----------------------------------------------------------------------------------------------------------


def script_page(script: Path, *, run: bool = True) -> dict[str, str | bytes]:
    """Run a script cell by cell, and give the page about it and its figures by name. An error ends the build."""
    download = f"[Download this script]({script.name})"
    if script.stem in NOTEBOOKS:
        colab = f"https://colab.research.google.com/github/{REPOSITORY.partition('.com/')[2]}/blob/main/docs/gallery"
        download += f", [as a notebook]({script.stem}.ipynb), or [open it in Colab]({colab}/{script.stem}.ipynb)"
    lines = [download, ""]
    files: dict[str, str | bytes] = {}
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
            if not run:
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, str(script), "exec"), names)
            if printed.getvalue().strip():
                lines += ["```text", printed.getvalue().rstrip(), "```", ""]
            for alt, file in _ALT.findall(text):
                unique = f"{script.stem}_{file}"
                files[unique] = Path(file).read_bytes()
                lines += [f"![{alt}]({unique})", ""]
    print(f"gallery/{script.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    title = lines.index(next(line for line in lines if line.startswith("# ")))
    lines[0], lines[title] = lines[title], lines[0]
    return {f"{script.stem}.md": "\n".join(lines), **files}


def cells(text: str) -> list[tuple[str, str]]:
    """Kind and text of the cells of a script in jupytext's percent format."""
    parsed = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            parsed.append(("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
        elif body.strip():
            parsed.append(("code", body.strip()))
    return parsed


def notebook(name: str) -> str:
    """A script of the gallery as a Jupyter notebook, whose first cell installs the package."""
    text = (ROOT / f"docs/gallery/{name}.py").read_text(encoding="utf-8")
    install = f"%pip install -q git+{REPOSITORY}"
    content = {
        "cells": [
            {
                "cell_type": kind,
                "id": f"cell-{number}",
                "metadata": {},
                "source": source.splitlines(keepends=True),
                **({"execution_count": None, "outputs": []} if kind == "code" else {}),
            }
            for number, (kind, source) in enumerate([("code", install), *cells(text)])
        ],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1) + "\n"


os.environ.setdefault("MPLBACKEND", "Agg")
if __name__ == "__main__":
    sys.exit(main())
