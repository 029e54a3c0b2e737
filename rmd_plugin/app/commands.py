"""The entry points of ``rmd-train``, ``rmd-compare``, ``rmd-fit``: how Hydra runs them. Imports nothing heavy.

A mistake in the options or in a data file is told before torch is imported, and ``--help`` takes a second.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rmd_plugin.files import config_path, config_root, missing_extra, one_line

log = logging.getLogger(__name__)

#: whether the user asks for whole tracebacks
_FULL_ERROR = os.environ.get("HYDRA_FULL_ERROR", "0") == "1"
#: of a folder's name, in bytes: file systems allow 255, and the hash comes behind it
_LONGEST = 150
#: what is watched during training if the config does not say: of the first all that are chosen, else one of the second
_WATCHED = (("rmd", "mahalanobis", "fused"), ("msp", "energy", "max_logit", "knn", "marginal", "partial"))
#: what is left to do when a command ends, however it ends
_AT_END: list[Callable[[], None]] = []


# -- what the configs ask for -----------------------------------------------------------------------------------------


def prepare_hydra() -> str:
    """Make our resolvers and shared configs known to Hydra; the search path of the configs, for ``hydra.main``."""
    resolvers = (watched, monitored, job_folder, choices, options, terminal)
    for resolver in resolvers:
        OmegaConf.register_new_resolver(f"rmd_{resolver.__name__}", resolver, replace=True)
    # of the joblib launcher itself, in every process of it
    warnings.filterwarnings("ignore", message=r"\n'hydra/launcher/joblib' is validated against ConfigStore schema")
    if not _is_installed("hydra_plugins.rmd_plugin"):  # a checkout that is not installed: Hydra does not find it itself
        from hydra.core.plugins import Plugins

        from rmd_plugin.hydra_plugin.search_path import RmdSearchPath

        Plugins.instance().register(RmdSearchPath)
    return config_path()


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _config_files(pattern: str, config: DictConfig) -> dict[str, Path]:
    """Files of the configs by name: those of the ``--config-dir`` of this command, if it has one, and ours."""
    sources = config.hydra.runtime.config_sources
    users = [Path(source.path) for source in sources if source.provider == "command-line"]
    folders = [*users, config_root() / "shared", config_root()]  # of equal names Hydra takes ours
    return {file.relative_to(folder).as_posix(): file for folder in folders for file in folder.glob(pattern)}


def choices(*groups: str, _root_: DictConfig) -> str:
    """The configs of some groups, a line each: Hydra's own list has those of the other commands too."""
    lines = []
    for group in groups:
        files = _config_files(f"{group}/**/[!_]*.yaml", _root_)
        names = sorted(name.removeprefix(f"{group}/").removesuffix(".yaml") for name in files)
        lines.append(f"{group}: {', '.join(names)}")
    return "\n".join(lines)


def options(name: str, _root_: DictConfig) -> str:
    """The options of a command or choice as they stand in its YAML, with the comments, which Hydra's own help drops."""
    files = _config_files(f"{name}.yaml", _root_)
    text = "".join(file.read_text(encoding="utf-8") for file in files.values())
    after_defaults = re.split(r"^defaults:\n(?:  .*\n)+", text, maxsplit=1, flags=re.MULTILINE)[-1]
    shown = re.sub(r"^names:.*\Z", "", after_defaults, flags=re.MULTILINE | re.DOTALL).strip()
    return shown.replace("$", "$$")  # Hydra fills in $CONFIG afterwards, and takes any other dollar for a mistake


def terminal() -> bool:
    """Whether a progress bar would be seen."""
    return sys.stderr.isatty()


def watched(detectors: Sequence[str]) -> list[str]:
    """Names of the chosen detectors that are watched during training by default."""
    usual, others = ([name for name in names if name in detectors] for names in _WATCHED)
    return usual or others[:1]


def monitored(detectors: DictConfig, names: Sequence[str] | None) -> DictConfig:
    """The nodes of ``detector=`` that ``monitor=`` names, for OODMonitor to complete with what the network has.

    Raises:
        ValueError: if a name is not among the chosen detectors.
    """
    if missing := [str(name) for name in names or () if name not in detectors]:
        raise ValueError(f"monitor names {missing[0]}, but detector= chooses {', '.join(map(str, detectors))}.")
    return OmegaConf.create({str(name): {**detectors[name], "_partial_": True} for name in names or ()})


def job_folder(overrides: str) -> str:
    """Name of a job's folder in a sweep: its overrides as Hydra joins them, for example ``backbone=mlp,seed=0``.

    Where they cannot be the name of one folder, being long or with separators: their start and a hash of all.
    """
    name = re.sub(r"[^\w.,=+\[\]{}~@-]", "-", overrides)
    if name == overrides and 0 < len(name.encode()) <= _LONGEST and name.strip("."):
        return name
    start = name.encode()[:_LONGEST].decode(errors="ignore").strip(".") or "job"
    return f"{start}-{hashlib.sha256(overrides.encode()).hexdigest()[:10]}"


def compose_train(overrides: Sequence[str]) -> DictConfig:
    """Compose the config of one run of ``rmd-train``, as typed after it, inside of another Hydra command."""
    cfg = hydra.compose("train", overrides=list(overrides), return_hydra_config=True)
    with open_dict(cfg):  # outside of its own job Hydra does not answer questions about its choices
        cfg.names.update({name: cfg.hydra.runtime.choices[name] for name in ("benchmark", "backbone")})
        del cfg.hydra
    return cfg


def repeatable(cfg: DictConfig, command: str) -> str:
    """The config as text from which the run can be repeated: ``rmd-train --config-dir OUT --config-name config``.

    References to the output folder stay references, so that the repetition writes to a folder of its own.
    """
    plain: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
    plain.names = OmegaConf.to_container(cfg.names, resolve=True)  # known to Hydra only while it composes
    return f"defaults:\n  - command@hydra: {command}\n  - _self_\n{OmegaConf.to_yaml(plain)}"


class ReportCallback(Callback):
    """Summarises a sweep when it ends, however it ends, and notes the reason of a job that failed early.

    Neither ever makes a job or a sweep fail: a problem is one warning. ``metric`` is what the summary is of, and
    ``reference`` the detector that the others are compared with.
    """

    def __init__(self, metric: str = "AUROC", reference: str = "rmd") -> None:
        self.options = {"metric": metric, "reference": reference}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember folder and time, and report later: Hydra calls no end if a job failed or the sweep was stopped."""
        self.folder = Path(os.path.abspath(config.hydra.sweep.dir))
        self.folder.mkdir(parents=True, exist_ok=True)
        # the clock of the folder's file system: jobs may run on other machines, and others may be there from before
        stamp = self.folder / ".started"
        stamp.write_text(f"{os.getpid()}\n", encoding="utf-8")
        self.started = stamp.stat().st_mtime_ns
        _AT_END.append(self.report)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write why a job failed, if it failed before it could do so itself."""
        if job_return.status is not JobStatus.FAILED:
            return
        from rmd_plugin.report.run import STATUS, RunFolder, describe_error

        folder = RunFolder(config.hydra.runtime.output_dir)
        if not folder.file(STATUS).is_file() or folder.read_status().state == "running":
            # the property of this name raises the job's error instead of returning it
            folder.finish("failed", describe_error(job_return._return_value))

    def report(self) -> None:
        """Summarise the jobs of this sweep, those that were finished before too: Hydra notes its overrides in each."""
        try:
            from rmd_plugin.app.report import report_runs

            notes = self.folder.rglob(".hydra/overrides.yaml")
            jobs = sorted(note.parents[1] for note in notes if note.stat().st_mtime_ns >= self.started)
            report_runs(jobs or [self.folder], self.folder, **self.options)
        except Exception as problem:
            log.warning("The sweep could not be summarised: %s", one_line(problem))


# -- the commands -----------------------------------------------------------------------------------------------------

CONF = prepare_hydra()


def check_required(cfg: DictConfig) -> None:
    """Refuse a config that leaves open what benchmark and backbone must be told, and data files with a mistake.

    Without importing torch.
    """
    # the number of input features is found from the data
    missing = sorted(OmegaConf.missing_keys(cfg.benchmark) | OmegaConf.missing_keys(cfg.backbone))
    if missing := [key for key in missing if key != "backbone.in_features"]:
        group = missing[0].partition(".")[0]
        raise ValueError(f"{group}={cfg.names[group]} needs {' and '.join(missing)}: give {missing[0]}=VALUE.")
    from rmd_plugin.benchmarks.dataset_files import check_data

    node: Any = OmegaConf.to_container(cfg.benchmark, resolve=True)
    check_data(node)


def take_run(cfg: DictConfig) -> None:
    """Take over data, network and weights of the finished ``rmd-train`` or ``rmd-compare`` that ``run=`` names."""
    run = Path(cfg.run)
    config: Any = OmegaConf.load(run / "config.yaml")
    weights = run / "checkpoints" / f"{config.get('weights', 'best')}.ckpt"
    with open_dict(cfg):
        for name in ("benchmark", "backbone", "names", "seed", "limit_train", "limit_test", "checkpoint"):
            if name in config:
                cfg[name] = config[name]
        if weights.is_file():
            cfg.checkpoint = str(weights)


def _command(name: str) -> Callable[[], None]:
    """The entry point of a command: what ``rmd_plugin.app.NAME`` does with the config NAME."""

    @hydra.main(version_base="1.3", config_path=CONF, config_name=name)
    def job(cfg: DictConfig) -> Any:
        if cfg.get("run") is not None:
            take_run(cfg)
        check_required(cfg)
        return getattr(import_module(f"rmd_plugin.app.{name}"), name)(cfg)

    return lambda: run_command(job, f"rmd-{name}")


#: trains a backbone, watches and compares its detectors; a job gives back the number of ``objective=`` to sweepers
train = _command("train")
#: compares detectors from a checkpoint, a frozen backbone or a file of features; returns nothing to sweepers: do not
#: tune on test data
compare = _command("compare")
#: fits and calibrates one detector behind a network, and writes both as a guard: one folder that can be deployed
fit = _command("fit")


def run_command(main: Callable[[], object], name: str) -> None:
    """Run a Hydra command: what a user can fix is one sentence, and modules of the current folder can be imported."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # benchmarks, backbones and callbacks of the user's own, as for python script.py
    if "hydra/sweeper=optuna" in sys.argv and not any(word.startswith("hydra.sweeper.direction=") for word in sys.argv):
        sys.argv.append("hydra.sweeper.direction=maximize")  # Optuna minimises; objective= is an accuracy or an AUROC
    # of no use in our help, where it takes half of the time
    Hydra.format_config_groups = lambda *_, **__: ""  # type: ignore[method-assign]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # or Hydra would print its own lines and end the program
    try:
        with one_clear_error(name):
            _check_plugins()
            main()
    finally:
        if not _FULL_ERROR:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        while _AT_END:
            _AT_END.pop()()


def _check_plugins() -> None:
    """Name the extra of a launcher or sweeper that is chosen and not installed."""
    for word in sys.argv:
        if plugin := re.match("hydra/(launcher|sweeper)=(joblib|submitit|optuna)", word):
            package, extra = f"hydra-{plugin[2]}-{plugin[1]}", "optuna" if plugin[2] == "optuna" else "sweep"
            if not _is_installed(f"hydra_plugins.{package.replace('-', '_')}"):
                raise missing_extra(package, extra, needed_by=word)


@contextmanager
def one_clear_error(name: str) -> Iterator[None]:
    """End the command with one sentence where options, data, weights or the disk are at fault.

    Errors of other kinds are faults of the program and keep their traceback, as does everything under
    ``HYDRA_FULL_ERROR=1``.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)  # what a shell expects of a program that was stopped, instead of a traceback
    except Exception as error:
        kinds = (HydraException, OmegaConfBaseException, OSError, ValueError, ImportError)
        # by name: --help does not import Lightning
        expected = isinstance(error, kinds) or type(error).__name__ == "MisconfigurationException"
        if _FULL_ERROR or not expected:
            raise
        print(f"{name}: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
