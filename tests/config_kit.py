"""One way to compose the shipped configs in tests, and to run the commands in this process or in one of their own."""

import inspect
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from rmd_plugin.app.commands import prepare_hydra

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"


def choices(group):
    """Names of the configs of a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@contextmanager
def hydra_initialised(folder=CONF):
    """Hydra as it is inside of a command."""
    prepare_hydra()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def composed(command, *overrides):
    """The config of a command, with its Hydra settings; names are what was chosen."""
    with hydra_initialised():
        cfg = compose(command, overrides=list(overrides), return_hydra_config=True)
    if "names" in cfg:
        with open_dict(cfg):  # outside a job Hydra does not answer questions about its choices
            cfg.names.update({name: cfg.hydra.runtime.choices[name] for name in ("benchmark", "backbone")})
    return cfg


def chosen(group, choice, *overrides, folder=CONF):
    """The config of one choice of a group, without a command around it."""
    with hydra_initialised(folder):
        return compose(overrides=[f"+{group}={choice}", *overrides])[group]


def environment(**more):
    """For commands in a process of their own: one thread, no cache and no data of the user's."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def call(main, monkeypatch, *words):
    """Run a command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", list(words))
    GlobalHydra.instance().clear()
    try:
        main()
    except SystemExit as stop:
        return stop.code or 0
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None  # a later test is not part of this job
    return 0


def python(*arguments, cwd, **more):
    """Run Python in a process of its own; further keywords are variables of its environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def run(module, folder, *arguments, **more):
    """Run a command in a process of its own."""
    return python("-m", module, *arguments, cwd=folder, **more)


def start(module, folder, *arguments, **more):
    """Start a command in a process of its own, and in a session of its own, so that it alone can be interrupted.

    A shell that starts the tests in the background lets them, and all that they start, ignore Ctrl-C: not this one.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def arguments(kind):
    """The names of the arguments of a class, those of a typed ``**options`` one by one."""
    for name, parameter in inspect.signature(kind).parameters.items():
        typed = get_args(parameter.annotation) if parameter.kind is parameter.VAR_KEYWORD else ()
        yield from typed[0].__annotations__ if typed else [name]
