"""Downloads end, arrive whole and are checked. What backbones and benchmarks make of them is tested beside those."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from torchvision.datasets import CIFAR10

from rmd_plugin import downloads
from rmd_plugin.backbones.fetch import WeightsNotFoundError, url_file
from rmd_plugin.benchmarks import DownloadError
from rmd_plugin.benchmarks.cifar import load_cifar
from rmd_plugin.benchmarks.readers.downloads import fetch


def _cifar(url: str, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CIFAR10, "url", url)
        load_cifar(folder, "cifar10", train=True, download=True)


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (lambda url, folder: downloads.download(url, folder / "file", None), DownloadError),
        (lambda url, folder: fetch(url, "0" * 64, folder / "file"), DownloadError),
        (_cifar, DownloadError),
        (lambda url, folder: url_file(url), WeightsNotFoundError),
    ],
    ids=["download", "benchmark", "cifar", "weights"],
)
def test_a_download_from_a_silent_server_ends_and_leaves_nothing(
    start: Callable[[str, Path], None], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(downloads, "SILENCE_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(error, match=r"timed out.*Download it by hand"):
            start(f"http://127.0.0.1:{silent.getsockname()[1]}/file", tmp_path)
    assert socket.getdefaulttimeout() is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
