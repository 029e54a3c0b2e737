"""``compare(cfg)``, the whole of ``rmd-compare``; and what it shares with ``rmd-train``: tables, figures, outputs."""

from __future__ import annotations

import logging
import re
import sys

import pytorch_lightning as pl
import safetensors.torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from rmd_plugin.app.configs import repeatable
from rmd_plugin.app.device import choose_device
from rmd_plugin.app.errors import whole_number
from rmd_plugin.app.parts import (
    about,
    check_backbone_takes,
    make_backbone,
    make_benchmark,
    make_detectors,
    make_extractor,
    run_names,
)
from rmd_plugin.app.preprocessing import say_preprocessing
from rmd_plugin.atomic import replacing
from rmd_plugin.backbones.base import Backbone
from rmd_plugin.compare.comparison import Comparison
from rmd_plugin.compare.comparison import compare as compare_detectors
from rmd_plugin.compare.directions import direction_terms
from rmd_plugin.compare.extraction import Extractor
from rmd_plugin.detectors.calibrated import Calibrated
from rmd_plugin.detectors.files import write_state
from rmd_plugin.report.choice import advice, choose
from rmd_plugin.report.provenance import current_command
from rmd_plugin.report.run_folder import DETECTORS, HEAD, RunFolder
from rmd_plugin.report.samples import collect_samples
from rmd_plugin.report.table import to_html, to_latex, to_markdown, to_terminal
from rmd_plugin.report.tables import comparison_tables, decision_tables

log = logging.getLogger(__name__)


def compare(cfg: DictConfig) -> None:
    """Compare the detectors of a config, the composed ``conf/compare.yaml``, and write everything into its folder."""
    # all generators: an untrained backbone, of the user's own too, starts the same every time
    pl.seed_everything(whole_number(cfg.seed, "seed"), workers=True, verbose=False)
    # some detectors tell how their fit went; the table has what counts
    logging.getLogger("pytorch_ood").setLevel(logging.WARNING)
    folder = RunFolder(cfg.paths.output_dir)
    with folder.running(config=repeatable(cfg, "compare"), about=about(cfg), command=current_command("rmd-compare")):
        check_required(cfg)
        device = choose_device(str(cfg.device))
        benchmark = make_benchmark(cfg)
        num_classes = benchmark.num_classes if cfg.head == "own" else None
        backbone = make_backbone(cfg, benchmark, num_classes=num_classes)
        check_backbone_takes(cfg, backbone, benchmark)
        folder.note(preprocessing=say_preprocessing(cfg, backbone, benchmark))
        extractor = make_extractor(cfg, benchmark, backbone, device)
        result = evaluate(cfg, extractor, folder, remark=untrained_remark(cfg, backbone))
        if result.interrupted:
            raise KeyboardInterrupt


def evaluate(cfg: DictConfig, extractor: Extractor, folder: RunFolder, *, remark: str = "") -> Comparison:
    """Compare the detectors of a config; write and show the results. The remark is for the accuracy's row."""
    benchmark, backbone = run_names(cfg)
    result = compare_detectors(
        extractor,
        make_detectors(cfg),
        benchmark=benchmark,
        backbone=backbone,
        seed=cfg.seed,
        head=cfg.head,
        resamples=cfg.resamples,
        alpha=cfg.alpha,
        remark=remark,
        after_each=lambda so_far: folder.write_rows(so_far.rows),
    )
    folder.write_rows(result.rows)
    folder.write_scores(result.scores)
    tables = comparison_tables(result.rows) + decision_tables(result.rows)
    for name, render in (("table.md", to_markdown), ("table.tex", to_latex), ("table.html", to_html)):
        with replacing(folder.file(name)) as file:
            file.write("\n".join(map(render, tables)))
    if cfg.figures and result.scores:
        _draw(result, folder)
    console = Console(width=console_width())
    for table in tables:
        console.print(to_terminal(table, width=console.width))
    _keep_detectors(result, folder)
    _report(extractor, result, folder)
    return result


def _report(extractor: Extractor, result: Comparison, folder: RunFolder) -> None:
    """Write the page about the run, and what it shows beside the numbers."""
    if terms := direction_terms(extractor, result.detectors):
        folder.write_directions(terms)
    if samples := collect_samples(result.rows, result.scores, extractor.raw):
        folder.write_samples(samples)
    from rmd_plugin.report.page import write_report  # imports matplotlib

    report = write_report(folder)
    if len(result.scores) > 1 and (words := advice(choose(result.rows, result.scores))):
        print(*words)
    print(f"Report: {report}")


def console_width() -> int | None:
    """Width of what is printed: that of the terminal; into a file or pipe at full width."""
    return None if sys.stdout.isatty() else 200


def _keep_detectors(result: Comparison, folder: RunFolder) -> None:
    """Write every detector, fitted and calibrated, to a file for ``Calibrated.load``; name those that cannot be.

    The head that those on logits were fed by stands beside them.
    """
    for old in folder.file(DETECTORS).glob("*.safetensors"):  # of a run before
        old.unlink()
    if result.classifier is not None:
        with replacing(folder.file(HEAD), "wb") as file:
            file.write(safetensors.torch.save({k: v.contiguous() for k, v in result.classifier.state_dict().items()}))
    lost = []
    for name, detector in result.detectors.items():
        path = folder.file(DETECTORS) / (re.sub(r"[^\w.-]+", "_", name) + ".safetensors")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            state = detector.state_dict()
            Calibrated.from_state(state)  # whoever reads the file gets a detector that works
            write_state(path, state)
        except Exception as error:  # the numbers are what the run was for
            lost.append(f"{name} ({str(error).rstrip('.')})")
    if lost:
        log.info("%s/ does not hold: %s.", DETECTORS, ", ".join(lost))


def _draw(result: Comparison, folder: RunFolder) -> None:
    # matplotlib takes a second to import, and not every run draws
    from rmd_plugin.report.figures import auroc_figure, calibration_figure, histogram_figure, roc_figure
    from rmd_plugin.report.style import save_figure

    folder.file("figures").mkdir(parents=True, exist_ok=True)
    title = f"{result.rows[0].benchmark}, {result.rows[0].backbone}"
    made = {
        "auroc": auroc_figure(result.rows, title),
        "roc": roc_figure(result.scores, result.rows, title=title),
        "histograms": histogram_figure(result.scores, result.rows, title=title),
        "calibration": calibration_figure(result.scores, result.rows, title=title),
    }
    for name, figure in made.items():
        if figure is not None:
            save_figure(figure, folder.file("figures") / name)


def check_required(cfg: DictConfig) -> None:
    """Refuse a config that leaves open what benchmark and backbone must be told."""
    # the number of input features is found from the data
    missing = sorted(OmegaConf.missing_keys(cfg.benchmark) | OmegaConf.missing_keys(cfg.backbone))
    if missing := [key for key in missing if key != "backbone.in_features"]:
        group = missing[0].partition(".")[0]
        raise ValueError(f"{group}={cfg.names[group]} needs {' and '.join(missing)}: give {missing[0]}=VALUE.")


def untrained_remark(cfg: DictConfig, backbone: Backbone) -> str:
    """That the encoder is untrained, if it is; else nothing."""
    node = cfg.backbone
    trained = node.get("pretrained", False) or (cfg.checkpoint or node.get("checkpoint")) is not None
    has_weights = next(backbone.parameters(), None) is not None
    return "the encoder is untrained: checkpoint=FILE loads a trained one" if has_weights and not trained else ""


if __name__ == "__main__":
    from rmd_plugin.app import commands

    commands.compare()
