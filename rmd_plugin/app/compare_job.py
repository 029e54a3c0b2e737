"""One job of ``rmd-compare``: assemble, compare, write. Composed by :mod:`rmd_plugin.app.compare`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from rmd_plugin.app.assembly import (
    choose_device,
    make_backbone,
    make_benchmark,
    make_detectors,
    one_clear_error,
    run_names,
)
from rmd_plugin.app.options import whole_number
from rmd_plugin.atomic import replacing
from rmd_plugin.compare.cache import FeatureCache
from rmd_plugin.compare.comparison import Comparison, compare
from rmd_plugin.compare.extraction import Extractor
from rmd_plugin.report.provenance import current_command
from rmd_plugin.report.run_folder import RunFolder
from rmd_plugin.report.table import to_html, to_latex, to_markdown, to_terminal
from rmd_plugin.report.tables import comparison_tables

log = logging.getLogger(__name__)


def run(config: DictConfig) -> None:
    """Compare the detectors of a config and write everything into its output folder.

    Args:
        config: the composed config.
    """
    # some detectors tell how their fit went; the table has what counts
    logging.getLogger("pytorch_ood").setLevel(logging.WARNING)
    with one_clear_error("rmd-compare"):
        whole_number(config.seed, "seed")
        benchmark, backbone = run_names(config)
        folder = RunFolder(config.paths.output_dir)
        about: dict[str, str | int] = {"benchmark": benchmark, "backbone": backbone, "seed": int(config.seed)}
        with folder.running(config=_repeatable(config), about=about, command=current_command("rmd-compare")):
            result = _compare(config, benchmark, backbone, folder)
            write_outputs(result, folder, figures=bool(config.figures))
            print_tables(result)
            print(f"Written to {folder.path}")
            if result.interrupted:
                raise KeyboardInterrupt


def _compare(config: DictConfig, benchmark_name: str, backbone_name: str, folder: RunFolder) -> Comparison:
    # the number of input features is found from the data
    missing = sorted(OmegaConf.missing_keys(config.benchmark) | OmegaConf.missing_keys(config.backbone))
    if missing := [key for key in missing if key != "backbone.in_features"]:
        group = missing[0].partition(".")[0]
        raise ValueError(f"{group}={config.names[group]} needs {' and '.join(missing)}: give {missing[0]}=VALUE.")
    detectors = make_detectors(config)
    device = choose_device(str(config.device))
    benchmark = make_benchmark(config)
    backbone = make_backbone(config, benchmark, num_classes=benchmark.num_classes if config.head == "own" else None)
    extractor = Extractor(
        benchmark,
        backbone,
        cache=None if config.cache_dir is None else FeatureCache(config.cache_dir),
        batch_size=config.batch_size,
        num_workers=config.num_workers,
        device=device,
        names={"benchmark": benchmark_name, "backbone": backbone_name},
        progress=bool(config.progress) and sys.stderr.isatty(),
    )
    return compare(
        extractor,
        detectors,
        benchmark=benchmark_name,
        backbone=backbone_name,
        seed=config.seed,
        head=config.head,
        resamples=config.resamples,
        remark=_remark(config, backbone),
        after_each=lambda so_far: folder.write_rows(so_far.rows),
    )


def write_outputs(result: Comparison, folder: RunFolder, *, figures: bool = True) -> None:
    """Write rows, scores, tables and pictures of a comparison.

    Args:
        result: the comparison.
        folder: where to.
        figures: whether to draw the pictures.
    """
    folder.write_rows(result.rows)
    folder.write_scores(result.scores)
    tables = comparison_tables(result.rows)
    for name, render in (("table.md", to_markdown), ("table.tex", to_latex), ("table.html", to_html)):
        with replacing(folder.file(name)) as file:
            file.write("\n".join(map(render, tables)))
    if figures and result.scores:
        draw(result, folder.file("figures"))


def draw(result: Comparison, folder: Path) -> list[Path]:
    """Draw the pictures of a comparison as PNG and PDF.

    Returns:
        The files.
    """
    # matplotlib takes a second to import, and not every run draws
    from rmd_plugin.report.figures import auroc_figure, histogram_figure, roc_figure
    from rmd_plugin.report.style import save_figure

    folder.mkdir(parents=True, exist_ok=True)
    title = f"{result.rows[0].benchmark}, {result.rows[0].backbone}"
    made = {
        "auroc": auroc_figure(result.rows, title),
        "roc": roc_figure(result.scores, result.rows, title=title),
        "histograms": histogram_figure(result.scores, result.rows, title=title),
    }
    return [path for name, figure in made.items() for path in save_figure(figure, folder / name)]


def print_tables(result: Comparison) -> None:
    """Show the tables on the terminal; into a file or pipe they go at full width."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in comparison_tables(result.rows):
        console.print(to_terminal(table, width=console.width))


def _remark(config: DictConfig, backbone: object) -> str:
    node = config.backbone
    weights = any(True for _ in backbone.parameters())  # type: ignore[attr-defined]
    trained = node.get("pretrained", False) or (config.checkpoint or node.get("checkpoint")) is not None
    if weights and not trained:
        return "the encoder is untrained: checkpoint=FILE loads a trained one"
    return ""


def _repeatable(config: DictConfig) -> str:
    """The config as text from which the run can be repeated: ``rmd-compare --config-dir OUT --config-name config``."""
    plain = cast(DictConfig, OmegaConf.create(OmegaConf.to_container(config, resolve=False)))
    plain.names = OmegaConf.to_container(config.names, resolve=True)  # known to Hydra only while it composes
    return OmegaConf.to_yaml(plain)
