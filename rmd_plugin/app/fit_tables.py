"""``rmd-fit benchmark=embeddings engine=ray``: the training table is read file by file, see docs/scale.md."""

from __future__ import annotations

from hydra.utils import get_class
from omegaconf import DictConfig

from rmd_plugin.app.errors import whole_number
from rmd_plugin.backbones.small import Identity
from rmd_plugin.benchmarks.embeddings import Embeddings, find_tables
from rmd_plugin.benchmarks.own import TEST, TRAIN, VAL
from rmd_plugin.compare.building import Factory, NetworkParts, build, detector_class
from rmd_plugin.detectors.functional import listed
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.table.engines import check_engine
from rmd_plugin.table.fit import check_on_moments, table_moments
from rmd_plugin.table.places import ENDINGS
from rmd_plugin.untrusted import DataFormatError


def train_moments(cfg: DictConfig, factory: Factory) -> Moments:
    """Moments of the training table of ``benchmark=embeddings``, read by the workers of ``engine``.

    Raises:
        ValueError: with the option that does not go with ``engine``, before any row is read; or if a file is bad.
    """
    workers, node = whole_number(cfg.num_workers, "num_workers"), cfg.benchmark
    if workers < 0:
        raise ValueError(f"num_workers must be at least 1, or 0 for all processors, got {workers}.")
    check_engine(cfg.engine, workers or None)
    for group, kind in (("benchmark", Embeddings), ("backbone", Identity)):
        if not issubclass(get_class(cfg[group]._target_), kind):
            raise ValueError(
                f"engine= reads tables of features: benchmark=embeddings with backbone=identity, got {group}="
                f"{cfg.names[group]}. Leave engine= out."
            )
    check_on_moments(detector_class(factory) or type(factory))
    detector = build(factory, NetworkParts(seed=cfg.seed)).detector
    if getattr(detector, "normalize", False):
        raise ValueError(
            "normalize=true cannot be used with engine=: the classifier of the guard is made of the same moments, and "
            "takes features as they come. Write features of unit length into the table, or leave engine= out."
        )
    if cfg.head == "linear_probe" or node.limit_train is not None:
        wrong = "head=linear_probe" if cfg.head == "linear_probe" else "limit_train="
        raise ValueError(
            f"{wrong} needs training rows in memory, of which engine= keeps the moments alone. Take "
            "head=linear_discriminant and all rows, or leave engine= out."
        )
    if node.features is None or node.labels is None:
        raise ValueError("engine= needs the names of the columns: benchmark.features=NAME and benchmark.labels=NAME.")
    path, tables = find_tables(node.path, node.data_dir, node.labels, node.split)
    if not {TRAIN, VAL, TEST} <= tables.keys():
        raise DataFormatError(
            path,
            "engine= needs a folder with a table for each split: train, val and test, a folder of Parquet files or one "
            f"file each; it has {', '.join(tables) or 'none of them'}. Write the rows of each split apart",
        )
    train = tables[TRAIN]
    if not train.is_dir() and train.suffix.lower() not in ENDINGS:
        raise DataFormatError(train, f"engine= reads {', '.join(ENDINGS)} files. Leave it out for others")
    moments = table_moments(detector, train, node.features, node.labels, cfg.engine, workers=workers or None)
    if missing := (moments.counts == 0).nonzero().flatten().tolist():
        raise DataFormatError(
            train,
            f"has no row of class {listed(missing)}; with engine= the labels are numbers 0 to K - 1. Renumber them, or "
            "leave engine= out",
        )
    return moments
