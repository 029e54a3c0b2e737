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

from rmd_plugin.app import parts
from rmd_plugin.app.commands import repeatable
from rmd_plugin.compare import comparison
from rmd_plugin.compare.comparison import Comparison
from rmd_plugin.compare.features import Extractor
from rmd_plugin.detectors.conformal import Calibrated
from rmd_plugin.files import name_file_in_errors, replacing
from rmd_plugin.report import tables
from rmd_plugin.report.run import DETECTORS, HEAD, RunFolder, current_command

log = logging.getLogger(__name__)


def compare(cfg: DictConfig) -> None:
    """Compare the detectors of a config, the composed ``conf/compare.yaml``, and write everything into its folder."""
    if cfg.format not in (None, "openood"):
        raise ValueError(f"format must be openood or null, got {cfg.format!r}.")
    with run_folder(cfg, "compare") as folder:
        # all generators: an untrained backbone, of the user's own too, starts the same every time
        pl.seed_everything(cfg.seed, workers=True, verbose=False)
        device = parts.choose_device(str(cfg.device))
        benchmark = parts.make_benchmark(cfg)
        backbone = parts.make_backbone(cfg, benchmark)
        folder.note(preprocessing=parts.say_preprocessing(cfg, backbone, benchmark))
        extractor = parts.make_extractor(cfg, benchmark, backbone, device)
        if evaluate(cfg, extractor, folder, remark=parts.untrained_remark(cfg, backbone)).interrupted:
            raise KeyboardInterrupt


@contextmanager
def run_folder(cfg: DictConfig, command: str, typed: str | None = None) -> Iterator[RunFolder]:
    """The folder of a run, which keeps its config and status, and which no other run may write to meanwhile.

    Raises:
        ValueError: if another run writes to it.
    """
    # some detectors tell how their fit went; the table has what counts
    logging.getLogger("pytorch_ood").setLevel(logging.WARNING)
    folder, (benchmark, backbone) = RunFolder(cfg.paths.output_dir), parts.run_names(cfg)
    about: dict[str, str | int] = {"benchmark": benchmark, "backbone": backbone, "seed": int(cfg.seed)}
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.file(".lock"), timeout=0):
            typed = typed or current_command(f"rmd-{command}")
            running = folder.running(config=repeatable(cfg, command), about=about, command=typed)
            with running, name_file_in_errors(folder.path):
                yield folder
    except Timeout:
        raise ValueError(f"another run writes to {folder.path}. Wait for it, or give hydra.run.dir=FOLDER.") from None


def compare_detectors(cfg: DictConfig, extractor: Extractor, **options: Any) -> Comparison:
    """:func:`rmd_plugin.compare.comparison.compare` with the detectors and options of a config."""
    benchmark, backbone = parts.run_names(cfg)
    options |= {"seed": cfg.seed, "head": cfg.head, "alpha": cfg.alpha}
    return comparison.compare(extractor, parts.make_detectors(cfg), benchmark=benchmark, backbone=backbone, **options)


def evaluate(cfg: DictConfig, extractor: Extractor, folder: RunFolder, *, remark: str = "") -> Comparison:
    """Compare the detectors of a config; write and show the results. The remark is for the accuracy's row."""
    options = {"remark": remark, "after_each": lambda so_far: folder.write_rows(so_far.rows)}
    result = compare_detectors(cfg, extractor, resamples=cfg.resamples, **options)
    rows, scores = result.rows, result.scores
    folder.write_rows(rows)
    folder.write_scores(scores)
    shown = tables.comparison_tables(rows) + tables.decision_tables(rows)
    for ending, render in (("md", tables.to_markdown), ("tex", tables.to_latex), ("html", tables.to_html)):
        folder.write_text(f"table.{ending}", "\n".join(map(render, shown)))
    if cfg.get("format") == "openood":
        folder.file("openood").mkdir(parents=True, exist_ok=True)
        for name, table in tables.openood_tables(rows).items():
            folder.write_text(f"openood/{name}.csv", table.to_csv(float_format="%.2f", lineterminator="\n"))
    from rmd_plugin.report import figures, page  # import matplotlib

    if cfg.figures and scores:
        folder.file("figures").mkdir(parents=True, exist_ok=True)
        title = ", ".join(rows.loc[0, ["benchmark", "backbone"]])
        drawings: dict[str, Any] = {"roc": figures.roc_figure, "histograms": figures.histogram_figure}
        drawings["calibration"] = figures.calibration_figure
        for name, draw in drawings.items():
            if (figure := draw(scores, rows, title=title)) is not None:
                figures.save_figure(figure, folder.file("figures") / name)
    tables.print_tables(shown)
    _keep_detectors(result, folder)
    if samples := page.collect_samples(rows, scores, extractor.raw):
        folder.write_samples(samples)
    report = page.write_report(folder)
    if len(scores) > 1 and (words := tables.advice(tables.choose(rows, scores))):
        print(*words)
    print(f"Report: {report}")
    return result


def _keep_detectors(result: Comparison, folder: RunFolder) -> None:
    """Write every detector, fitted and calibrated, to a file for ``Calibrated.load``; name those that cannot be.

    The head that those on logits were fed by stands beside them.
    """
    folder.file(DETECTORS).mkdir(exist_ok=True)
    for path in folder.file(DETECTORS).glob("*.safetensors"):  # of a run before
        path.unlink()
    if result.classifier is not None:
        with replacing(folder.file(HEAD), "wb") as file:
            file.write(safetensors.torch.save({k: v.contiguous() for k, v in result.classifier.state_dict().items()}))
    lost = []
    for name, detector in result.detectors.items():
        try:
            Calibrated.from_state(detector.state_dict())  # refuses what could not be read again
            detector.save(folder.file(DETECTORS) / (re.sub(r"[^\w.-]+", "_", name) + ".safetensors"))
        except Exception as error:  # the numbers are what the run was for
            lost.append(f"{name} ({str(error).rstrip('.')})")
    if lost:
        log.info("%s/ does not hold: %s.", DETECTORS, ", ".join(lost))


if __name__ == "__main__":
    from rmd_plugin.app import commands

    commands.compare()
