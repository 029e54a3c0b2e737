"""``compare(cfg)``, the whole of ``rmd-compare``; and what it shares with ``rmd-train``: tables, figures, outputs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import safetensors.torch
from filelock import FileLock, Timeout
from omegaconf import DictConfig

from rmd_plugin.app.commands import repeatable
from rmd_plugin.app.parts import (
    choose_device,
    make_backbone,
    make_benchmark,
    make_detectors,
    make_extractor,
    run_names,
    say_preprocessing,
    untrained_remark,
)
from rmd_plugin.compare import comparison
from rmd_plugin.compare.comparison import Comparison
from rmd_plugin.compare.features import Extractor
from rmd_plugin.detectors.conformal import Calibrated
from rmd_plugin.detectors.moments import write_state
from rmd_plugin.files import replacing
from rmd_plugin.report.run import DETECTORS, HEAD, RunFolder, current_command
from rmd_plugin.report.tables import (
    advice,
    choose,
    comparison_tables,
    decision_tables,
    openood_tables,
    print_tables,
    to_html,
    to_latex,
    to_markdown,
)

log = logging.getLogger(__name__)


def compare(cfg: DictConfig) -> None:
    """Compare the detectors of a config, the composed ``conf/compare.yaml``, and write everything into its folder."""
    if cfg.format not in (None, "openood"):
        raise ValueError(f"format must be openood or null, got {cfg.format!r}.")
    with run_folder(cfg, "compare") as folder:
        # all generators: an untrained backbone, of the user's own too, starts the same every time
        pl.seed_everything(cfg.seed, workers=True, verbose=False)
        device = choose_device(str(cfg.device))
        benchmark = make_benchmark(cfg)
        backbone = make_backbone(cfg, benchmark)
        folder.note(preprocessing=say_preprocessing(cfg, backbone, benchmark))
        extractor = make_extractor(cfg, benchmark, backbone, device)
        result = evaluate(cfg, extractor, folder, remark=untrained_remark(cfg, backbone))
        if result.interrupted:
            raise KeyboardInterrupt


@contextmanager
def run_folder(cfg: DictConfig, command: str, typed: str | None = None) -> Iterator[RunFolder]:
    """The folder of a run, which keeps its config and status, and which no other run may write to meanwhile.

    Raises:
        ValueError: if another run writes to it.
    """
    # some detectors tell how their fit went; the table has what counts
    logging.getLogger("pytorch_ood").setLevel(logging.WARNING)
    folder, (benchmark, backbone) = RunFolder(cfg.paths.output_dir), run_names(cfg)
    about: dict[str, str | int] = {"benchmark": benchmark, "backbone": backbone, "seed": int(cfg.seed)}
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.file(".lock"), timeout=0):
            typed = typed or current_command(f"rmd-{command}")
            with folder.running(config=repeatable(cfg, command), about=about, command=typed):
                yield folder
    except Timeout:
        raise ValueError(f"another run writes to {folder.path}. Wait for it, or give hydra.run.dir=FOLDER.") from None


def compare_detectors(cfg: DictConfig, extractor: Extractor, **options: Any) -> Comparison:
    """:func:`rmd_plugin.compare.comparison.compare` with the detectors and options of a config."""
    benchmark, backbone = run_names(cfg)
    options |= {"seed": cfg.seed, "head": cfg.head, "alpha": cfg.alpha}
    return comparison.compare(extractor, make_detectors(cfg), benchmark=benchmark, backbone=backbone, **options)


def evaluate(cfg: DictConfig, extractor: Extractor, folder: RunFolder, *, remark: str = "") -> Comparison:
    """Compare the detectors of a config; write and show the results. The remark is for the accuracy's row."""
    options = {"remark": remark, "after_each": lambda so_far: folder.write_rows(so_far.rows)}
    result = compare_detectors(cfg, extractor, resamples=cfg.resamples, **options)
    folder.write_rows(result.rows)
    folder.write_scores(result.scores)
    tables = comparison_tables(result.rows) + decision_tables(result.rows)
    for name, render in (("table.md", to_markdown), ("table.tex", to_latex), ("table.html", to_html)):
        with replacing(folder.file(name)) as file:
            file.write("\n".join(map(render, tables)))
    if cfg.get("format") == "openood":
        folder.file("openood").mkdir(parents=True, exist_ok=True)
        for name, table in openood_tables(result.rows).items():
            with replacing(folder.file("openood") / f"{name}.csv", newline="") as file:
                table.to_csv(file, float_format="%.2f", lineterminator="\n")
    if cfg.figures and result.scores:
        _draw(result, folder)
    print_tables(tables)
    _keep_detectors(result, folder)
    _report(extractor, result, folder)
    return result


def _report(extractor: Extractor, result: Comparison, folder: RunFolder) -> None:
    """Write the page about the run, and what it shows beside the numbers."""
    from rmd_plugin.report.page import collect_samples, write_report  # imports matplotlib

    if samples := collect_samples(result.rows, result.scores, extractor.raw):
        folder.write_samples(samples)
    report = write_report(folder)
    if len(result.scores) > 1 and (words := advice(choose(result.rows, result.scores))):
        print(*words)
    print(f"Report: {report}")


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
            Calibrated.from_state(state)  # refuses a file that could not be read again
            write_state(path, state)
        except Exception as error:  # the numbers are what the run was for
            lost.append(f"{name} ({str(error).rstrip('.')})")
    if lost:
        log.info("%s/ does not hold: %s.", DETECTORS, ", ".join(lost))


def _draw(result: Comparison, folder: RunFolder) -> None:
    from rmd_plugin.report import figures  # imports matplotlib, and not every run draws

    folder.file("figures").mkdir(parents=True, exist_ok=True)
    rows, title = result.rows, ", ".join(result.rows.loc[0, ["benchmark", "backbone"]])
    drawn = {
        "roc": figures.roc_figure(result.scores, rows, title=title),
        "histograms": figures.histogram_figure(result.scores, rows, title=title),
        "calibration": figures.calibration_figure(result.scores, rows, title=title),
    }
    for name, figure in drawn.items():
        if figure is not None:
            figures.save_figure(figure, folder.file("figures") / name)


if __name__ == "__main__":
    from rmd_plugin.app import commands

    commands.compare()
