import functools
import http.server
import logging
import os
import threading
from pathlib import Path

# some virtual machines announce AMX and then stop a program that uses it; oneDNN reads this when torch is imported
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hub_cache
import hypothesis
import pytest
import torch

# CI draws the same examples each time: what it fails on fails here too (`CI=1 pytest`); without it, new ones are drawn
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("new", deadline=None)
hypothesis.settings.load_profile("same" if os.environ.get("CI") else "new")

# small tensors: a second thread costs more than it brings, and far more on a busy machine; commands in processes of
# their own too
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


def pytest_configure(config):
    """No network: the models of the default configs come from packages."""
    if hub_cache.available() and not hasattr(config, "workerinput"):
        home = config.cache.mkdir("hub")
        hub_cache.fill(home)
        os.environ |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _loggers():
    """A command that runs in this process configures logging as a program may, a test must not."""
    root, known = logging.getLogger(), list(logging.root.manager.loggerDict)
    levels = {name: logging.getLogger(name).level for name in ["root", *known]}
    yield
    for handler in list(root.handlers):
        if type(handler) in (logging.StreamHandler, logging.FileHandler):  # not pytest's own
            root.removeHandler(handler)
            handler.close()
    for name in logging.root.manager.loggerDict:
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
    root.setLevel(levels["root"])


@pytest.fixture
def blobs():
    """Training features, labels and a mixed set of test features, float64: 5 correlated classes in 12 dimensions."""
    return make_blobs()


def make_blobs(num_classes=5, width=12, per_class=60, separation=1.5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mix, centres = normal(width, width), separation * normal(num_classes, width)
    y = torch.arange(num_classes * per_class) % num_classes
    z = (normal(len(y), width) + centres[y]) @ mix + 3.0
    inlier = (normal(40, width) + centres[torch.arange(40) % num_classes]) @ mix + 3.0
    outlier = 2.0 * normal(40, width) @ mix
    return z.to(dtype), y, torch.cat([inlier, outlier]).to(dtype)


@pytest.fixture(scope="session")
def data_dir():
    path = os.environ.get("RMD_DATA_DIR")
    if not path or not Path(path).is_dir():
        pytest.skip("set RMD_DATA_DIR to the folder with the real data")
    return Path(path)


@pytest.fixture
def server(tmp_path):
    """A web server on this machine over a folder of its own: (folder, address)."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path.endswith("short"):  # announces more than it sends
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"only this")
            else:
                super().do_GET()

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{web.server_port}"
    web.shutdown()
    web.server_close()
    thread.join()


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a command in this process, in a folder of its own; what it printed, with another exit code its error."""
    import config_kit

    from rmd_plugin.app import commands

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RMD_CACHE_DIR", str(tmp_path / "cache"))

    def call(name, *words, flags=(), code=0, quiet=True):
        silent = ["hydra/job_logging=none", "hydra/hydra_logging=none"] if quiet else []
        ended = config_kit.call(getattr(commands, name), monkeypatch, f"rmd-{name}", *flags, *words, *silent)
        printed = capsys.readouterr()
        assert ended == code, printed.err
        return printed.err if code else printed.out

    return call
