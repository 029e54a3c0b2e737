"""Backbones of other libraries, offline: timm, open_clip, torchvision, transformers; and what happens without them."""

import hashlib
import importlib.util
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from rmd_plugin.backbones import fetch, text
from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.backbones.fetch import WeightsNotFoundError, hub_unavailable, url_file
from rmd_plugin.backbones.text import BERT
from rmd_plugin.backbones.vision import OpenCLIP, Timm, TorchVision
from rmd_plugin.extras import MissingExtraError, require

CONTENT = b"weights, or something like it"


def _no_network(*_: object) -> None:
    raise URLError(OSError("Name or service not known"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache and no network, on any machine."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("torch.hub.urlopen", _no_network)
    monkeypatch.setattr(fetch, "hub_unavailable", lambda: "Name or service not known")
    monkeypatch.setattr(text, "hub_unavailable", lambda: "Name or service not known")
    if importlib.util.find_spec("huggingface_hub") is not None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def put_in_hub_cache(cache: Path, repo_id: str, filename: str, state: dict[str, torch.Tensor]) -> None:
    """Lay a file where the hub's client keeps what it has downloaded."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    folder = cache / f"models--{repo_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    safetensors.save_file({name: value.contiguous() for name, value in state.items()}, snapshot / filename)


# --- packages that are not there ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "module", "extra"),
    [
        (lambda: Timm("resnet18", pretrained=False), "timm", "vision"),
        (lambda: OpenCLIP("ViT-B-32", pretrained=False), "open_clip", "vision"),
        (lambda: BERT(), "transformers", "text"),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(
    build: Callable[[], object], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf'{module}.*pip install "rmd-plugin\[{extra}\]"') as caught:
        build()
    assert "\n" not in str(caught.value)


def test_a_package_that_fails_in_itself_tells_its_own_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import something_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there") as caught:
        require("half_installed", extra="vision", needed_by="a test")
    assert not isinstance(caught.value, MissingExtraError)


@pytest.mark.slow
def test_optional_packages_are_imported_only_when_chosen() -> None:
    code = """
import sys
import rmd_plugin.backbones.text, rmd_plugin.backbones.vision, rmd_plugin.backbones.efficientnet
import rmd_plugin.backbones.genomics
heavy = {"timm", "open_clip", "transformers", "huggingface_hub", "torchvision", "pytorch_lightning"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- weights that are not there ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "build", "places"),
    [
        ("timm", lambda: Timm("resnet18.a1_in1k"), ["hub (not there)", "timm/resnet18.a1_in1k (Name or"]),
        ("open_clip", lambda: OpenCLIP("ViT-B-32-quickgelu"), ["hub (not there)", "clip_224.openai (Name or"]),
        ("torchvision", lambda: TorchVision("resnet18"), ["checkpoints/resnet18-f37072fd.pth", "pytorch.org"]),
        (
            "transformers",
            lambda: BERT("some-org/some-bert"),
            ["folder ", "installed packages", "hub (not there)", "some-org/some-bert (Name or"],
        ),
    ],
)
def test_unreachable_weights_say_so_quickly_in_one_line_with_the_places(
    module: str, build: Callable[[], object], places: list[str]
) -> None:
    pytest.importorskip(module, reason=f"{module} is not installed")
    started = time.monotonic()
    with pytest.raises(WeightsNotFoundError) as caught:
        build()
    message = str(caught.value)
    assert "\n" not in message
    for place in places:
        assert place in message
    assert "pretrained=false" in message or "local folder" in message
    # the libraries themselves retry for 20 to 50 s; generous, because the first build imports them
    assert time.monotonic() - started < 15


def test_offline_mode_is_respected_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: pytest.fail("asked the network in offline mode"))
    monkeypatch.setattr(fetch, "hub_unavailable", hub_unavailable)
    with pytest.raises(WeightsNotFoundError, match="HF_HUB_OFFLINE is set"):
        fetch.hub_file("org/model", ["model.safetensors"])


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(403)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)

        def log_message(self, *_: object) -> None:
            pass

    web = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_port}/file"
    web.shutdown()
    web.server_close()


def test_the_hub_is_available_if_it_answers_at_all(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server)
    assert hub_unavailable() is None
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        started = time.monotonic()
        reasons = [hub_unavailable(timeout=0.2)]
        assert time.monotonic() - started < 3
    reasons.append(hub_unavailable(timeout=0.2))  # now nobody listens at all
    assert all(reasons)


class _FakeHub:
    """Answers a download by what it was told to hold."""

    def __init__(self, held: dict[str, str | Exception]) -> None:
        self.held = held
        self.asked: list[str] = []

    def __call__(self, repo_id: str, filename: str) -> str:
        self.asked.append(filename)
        answer = self.held[filename]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_download_tries_each_name_and_reports_the_last_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("huggingface_hub.utils", reason="huggingface_hub is not installed")
    absent = utils.EntryNotFoundError("404: no such file")
    monkeypatch.setattr(fetch, "hub_unavailable", lambda: None)
    hub = _FakeHub({"a.bin": absent, "b.bin": "/cache/b.bin"})
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    assert fetch.hub_file("org/model", ["a.bin", "b.bin"]) == Path("/cache/b.bin")
    for error, tried in ((absent, ["a.bin", "b.bin"]), (OSError("disk\nfull"), ["a.bin"])):
        hub = _FakeHub({"a.bin": error, "b.bin": absent})
        monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
        with pytest.raises(WeightsNotFoundError, match=r"org/model \((404: no such file|disk full)\)"):
            fetch.hub_file("org/model", ["a.bin", "b.bin"])
        assert hub.asked == tried


@pytest.mark.slow
@pytest.mark.parametrize("in_name", [True, False])
@pytest.mark.parametrize("honest", [True, False])
def test_a_download_by_address_is_checked_against_the_hash_in_the_address(
    honest: bool, in_name: bool, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("torch.hub.urlopen", urlopen)
    digest = hashlib.sha256(CONTENT if honest else b"other").hexdigest()
    address = f"{server}-{digest[:8]}.pth" if in_name else f"{server}/{digest}/file.pth"
    if honest:
        path = url_file(address)
        assert path.read_bytes() == CONTENT
        monkeypatch.setattr("torch.hub.download_url_to_file", lambda *_: pytest.fail("downloaded twice"))
        assert url_file(address) == path
    else:
        with pytest.raises(WeightsNotFoundError, match="invalid hash value"):
            url_file(address)
        assert not list((Path(torch.hub.get_dir()) / "checkpoints").iterdir())


# --- timm --------------------------------------------------------------------------------------------------------


def test_timm_gives_timms_own_features_and_head_from_the_cache(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    torch.manual_seed(0)
    name = "test_resnet.r160_in1k"
    reference = timm.create_model(name, pretrained=False).eval()
    put_in_hub_cache(tmp_path / "hub", f"timm/{name}", "model.safetensors", reference.state_dict())
    x = torch.rand(2, 3, 64, 64)
    plain = Timm(name, frozen=True)
    assert plain.head is None
    expected = reference.forward_head(reference.forward_features(x), pre_logits=True)
    torch.testing.assert_close(plain.encoder(x), expected)
    # weights once: a forgotten copy would double every pickled or deep-copied model
    assert len(pickle.dumps(plain)) < 1.2 * len(pickle.dumps(reference))
    full = Timm(name, pretrained_head=True).eval()
    assert full.head_loaded
    torch.testing.assert_close(full(x), reference(x))
    with pytest.raises(ValueError, match=r"1000 classes, num_classes is 7.*pretrained_head=false"):
        Timm(name, pretrained_head=True, num_classes=7)


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet", "test_convnext"])
def test_a_timm_checkpoint_loads_with_its_classifier(name: str, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    torch.manual_seed(0)
    reference = timm.create_model(name, num_classes=7).eval()
    torch.save({"state_dict": {f"net.{k}": v for k, v in reference.state_dict().items()}}, tmp_path / "model.pt")
    ours = Timm(name, checkpoint=tmp_path / "model.pt").eval()
    assert ours.num_classes == 7
    size = ours.test_transform.size
    x = torch.rand(2, 3, size, size)
    torch.testing.assert_close(ours(x), reference(x))


def test_bits_convolutional_head_becomes_a_linear_one(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    torch.manual_seed(0)
    options = {"channels": (128, 128, 128, 128), "stem_chs": 32}
    name = "resnetv2_50x1_bit.goog_in21k"
    reference = timm.create_model(name, num_classes=7, **options).eval()
    torch.nn.init.normal_(reference.head.fc.weight)  # timm starts it at zero, which would show nothing
    torch.save(reference.state_dict(), tmp_path / "bit.pt")
    ours = Timm(name, options=options, image_size=64, checkpoint=tmp_path / "bit.pt").eval()
    x = torch.rand(2, 3, 64, 64)
    assert ours.feature_dim == 128
    torch.testing.assert_close(ours(x), reference(x))


def test_the_original_numpy_weights_of_a_vision_transformer_load(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    torch.manual_seed(0)
    name, options = "vit_base_patch16_224.orig_in21k", {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 32}
    reference = timm.create_model(name, num_classes=0, **options).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    state = {key: value.numpy() for key, value in reference.state_dict().items()}
    block, out = "Transformer/encoderblock_0", {}
    out["embedding/kernel"] = state["patch_embed.proj.weight"].transpose(2, 3, 1, 0)
    out["embedding/bias"] = state["patch_embed.proj.bias"]
    out["cls"], out["Transformer/posembed_input/pos_embedding"] = state["cls_token"], state["pos_embed"]
    norms = {"Transformer/encoder_norm": "norm", f"{block}/LayerNorm_0": "blocks.0.norm1"}
    for place, module in {**norms, f"{block}/LayerNorm_2": "blocks.0.norm2"}.items():
        out[f"{place}/scale"], out[f"{place}/bias"] = state[f"{module}.weight"], state[f"{module}.bias"]
    for index, part in enumerate(("query", "key", "value")):
        rows = slice(32 * index, 32 * index + 32)
        weight, bias = state["blocks.0.attn.qkv.weight"][rows], state["blocks.0.attn.qkv.bias"][rows]
        out[f"{block}/MultiHeadDotProductAttention_1/{part}/kernel"] = weight.T.reshape(32, 2, 16)
        out[f"{block}/MultiHeadDotProductAttention_1/{part}/bias"] = bias.reshape(2, 16)
    out[f"{block}/MultiHeadDotProductAttention_1/out/kernel"] = state["blocks.0.attn.proj.weight"].T.reshape(2, 16, 32)
    out[f"{block}/MultiHeadDotProductAttention_1/out/bias"] = state["blocks.0.attn.proj.bias"]
    for index, layer in enumerate(("fc1", "fc2")):
        out[f"{block}/MlpBlock_3/Dense_{index}/kernel"] = state[f"blocks.0.mlp.{layer}.weight"].T
        out[f"{block}/MlpBlock_3/Dense_{index}/bias"] = state[f"blocks.0.mlp.{layer}.bias"]
    np.savez(tmp_path / "ViT.npz", **out)
    ours = Timm(name, options=options, image_size=32, checkpoint=tmp_path / "ViT.npz").eval()
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(ours.encoder(x), reference(x))
    np.savez(tmp_path / "other.npz", images=np.zeros(3))
    with pytest.raises(CheckpointError, match=r"other\.npz does not hold the weights of vit_base"):
        Timm(name, options=options, image_size=32, checkpoint=tmp_path / "other.npz")


def test_names_that_timm_does_not_have_are_refused_with_what_it_has() -> None:
    pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    with pytest.raises(ValueError, match=r"no model 'resnet1000'"):
        Timm("resnet1000")
    with pytest.raises(ValueError, match=r"no weights 'resnet18\.mine'.*resnet18\.a1_in1k"):
        Timm("resnet18.mine")


# --- open_clip ---------------------------------------------------------------------------------------------------


def test_clip_gives_the_image_embedding_of_a_whole_clip_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed (extra vision)")
    torch.manual_seed(0)
    tower = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16}
    words = {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    (tmp_path / "rmd-tiny-clip.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": tower, "text_cfg": words}))
    open_clip.add_model_config(tmp_path / "rmd-tiny-clip.json")
    reference = open_clip.create_model("rmd-tiny-clip").eval()
    torch.save(reference.state_dict(), tmp_path / "clip.pt")
    x = torch.rand(2, 3, 32, 32)
    ours = OpenCLIP("rmd-tiny-clip", checkpoint=tmp_path / "clip.pt", frozen=True)
    assert ours.feature_dim == 16
    assert ours.head is None
    torch.testing.assert_close(ours.encoder(x), reference.encode_image(x))

    config = {"hf_hub": "org/tiny/", "url": "", "mean": (0.5,) * 3, "std": (0.25,) * 3}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "rmd-tiny-clip", {"mine": config})
    put_in_hub_cache(tmp_path / "hub", "org/tiny", "open_clip_model.safetensors", reference.state_dict())
    cached = OpenCLIP("rmd-tiny-clip", tag="mine")
    assert cached.test_transform.std == (0.25,) * 3
    torch.testing.assert_close(cached.eval().encoder(x), reference.encode_image(x))
    with pytest.raises(ValueError, match="no weights 'yours' of rmd-tiny-clip; it has mine"):
        OpenCLIP("rmd-tiny-clip", tag="yours")
    with pytest.raises(ValueError, match="no model 'ViT-Z'"):
        OpenCLIP("ViT-Z")


# --- torchvision -------------------------------------------------------------------------------------------------


def test_torchvision_gives_torchvisions_own_logits_from_the_cache(tmp_path: Path) -> None:
    from torchvision.models import mobilenet_v3_small

    torch.manual_seed(0)
    reference = mobilenet_v3_small().eval()
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(reference.state_dict(), folder / "mobilenet_v3_small-047dcff4.pth")
    x = torch.rand(2, 3, 64, 64)
    full = TorchVision("mobilenet_v3_small", pretrained_head=True).eval()
    torch.testing.assert_close(full(x), reference(x))
    assert TorchVision("mobilenet_v3_small").head is None
    with pytest.raises(ValueError, match=r"1000 classes, num_classes is 7.*pretrained_head=false"):
        TorchVision("mobilenet_v3_small", pretrained_head=True, num_classes=7)

    torch.save(reference.state_dict(), tmp_path / "mine.pt")
    loaded = TorchVision("mobilenet_v3_small", checkpoint=tmp_path / "mine.pt").eval()
    assert loaded.num_classes == 1000
    torch.testing.assert_close(loaded(x), reference(x))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("squeezenet1_1", "does not end in a linear classifier"),
        ("googlenet", "several outputs while training"),
        ("fcn_resnet50", "no classifier 'fcn_resnet50'"),
    ],
)
def test_torchvision_models_without_a_linear_classifier_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchVision(name, pretrained=False)


def test_weights_that_torchvision_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="no weights 'BEST'; torchvision has IMAGENET1K_V1, DEFAULT"):
        TorchVision("resnet18", weights="BEST")
