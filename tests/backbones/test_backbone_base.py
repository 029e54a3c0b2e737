"""What every backbone promises: encoder and head, freezing, checkpoints, fingerprints."""

import copy
import hashlib
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rmd_plugin import backbones
from rmd_plugin.backbones.base import Backbone, as_backbone
from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.backbones.efficientnet import EfficientNetLite0
from rmd_plugin.backbones.fetch import WeightsNotFoundError, find_checkpoint
from rmd_plugin.backbones.genomics import GenomicsBERT, GenomicsCNN
from rmd_plugin.backbones.resnet import ResNet, WideResNet
from rmd_plugin.backbones.small import MLP, Identity, SmallCNN

# name -> (constructor at a tiny size, batch)
TINY: dict[str, tuple[Callable[..., Backbone], torch.Tensor]] = {
    "wrn": (lambda **kw: WideResNet(10, 1, dropout=0.3, **kw), torch.rand(4, 3, 16, 16)),
    "resnet_conv": (lambda **kw: ResNet((1, 1), (4, 8), **kw), torch.rand(4, 3, 16, 16)),
    "resnet_pad": (lambda **kw: ResNet((1, 2), (4, 8), shortcut="pad", **kw), torch.rand(4, 3, 16, 16)),
    "small_cnn": (lambda **kw: SmallCNN(1, (4, 8), dropout=0.2, **kw), torch.rand(4, 1, 8, 8)),
    "mlp": (lambda **kw: MLP(64, (16,), dropout=0.2, **kw), torch.rand(4, 1, 8, 8)),
    "identity": (lambda **kw: Identity(5, **kw), torch.rand(4, 5)),
    "genomics_cnn": (lambda **kw: GenomicsCNN(8, 5, 16, **kw), torch.rand(4, 4, 30)),
    "genomics_bert": (
        lambda **kw: GenomicsBERT(kmer=2, max_length=30, width=8, depth=1, heads=2, **kw),
        torch.randint(0, 4, (4, 30)),
    ),
    "efficientnet_lite0": (lambda **kw: EfficientNetLite0(pretrained=False, **kw), torch.rand(4, 3, 32, 32)),
}
every_backbone = pytest.mark.parametrize("name", TINY)


def build(name: str, **options: object) -> Backbone:
    torch.manual_seed(0)
    return TINY[name][0](**options)


@every_backbone
def test_logits_are_the_head_on_the_encoders_pooled_features(name: str) -> None:
    backbone = build(name, num_classes=3).eval()
    x = TINY[name][1]
    features = backbone.encoder(x)
    assert features.shape == (4, backbone.feature_dim)
    assert isinstance(backbone.head, nn.Linear)
    assert backbone(x).shape == (4, 3)
    torch.testing.assert_close(backbone(x), features @ backbone.head.weight.T + backbone.head.bias)
    assert backbone.num_classes == 3


@every_backbone
def test_without_classes_there_is_no_head_and_the_error_names_the_remedy(name: str) -> None:
    backbone = build(name)
    assert backbone.head is None
    assert backbone.num_classes is None
    with pytest.raises(RuntimeError, match=r"no head.*num_classes=.*\.encoder"):
        backbone(TINY[name][1])
    backbone.reset_head(7)
    assert backbone(TINY[name][1]).shape == (4, 7)
    backbone.reset_head(None)
    assert backbone.head is None


@every_backbone
def test_a_frozen_encoder_does_not_move_while_the_head_learns(name: str) -> None:
    backbone = build(name, num_classes=3, frozen=True)
    model = nn.Sequential(backbone).train()
    assert backbone.frozen
    assert backbone.training
    assert not any(module.training for module in backbone.encoder.modules())
    before = copy.deepcopy(backbone.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(TINY[name][1]), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
    moved = {key for key, value in backbone.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {"head.weight", "head.bias"}


def test_unfreezing_lets_exactly_the_former_parameters_learn() -> None:
    backbone = build("wrn", num_classes=2)
    backbone.encoder.get_parameter("conv1.weight").requires_grad_(False)
    backbone.freeze().freeze().train()
    assert not any(p.requires_grad for p in backbone.encoder.parameters())
    backbone.unfreeze()
    fixed = [n for n, p in backbone.encoder.named_parameters() if not p.requires_grad]
    assert fixed == ["conv1.weight"]
    assert all(module.training for module in backbone.encoder.modules())


def test_a_frozen_encoder_still_passes_gradients_to_its_input() -> None:
    # ODIN and its like perturb the input against the gradient
    backbone = build("small_cnn", num_classes=3, frozen=True)
    x = TINY["small_cnn"][1].clone().requires_grad_(True)
    backbone(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.slow
@every_backbone
@pytest.mark.parametrize("prefix", ["", "model.", "backbone.", "module.net._orig_mod."])
def test_a_checkpoint_comes_back_under_any_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    source = build(name, num_classes=3).train()
    source(TINY[name][1])  # moves the batch statistics away from their start
    source.eval()
    content: dict[str, object] = {prefix + key: value for key, value in source.state_dict().items()}
    if prefix:
        content = {"state_dict": {**content, "loss.scale": torch.ones(3)}, "epoch": 3, "optimizer_states": [{}]}
    torch.save(content, tmp_path / "model.ckpt")
    torch.manual_seed(1)
    loaded = TINY[name][0](checkpoint=tmp_path / "model.ckpt").eval()
    assert loaded.num_classes == 3
    assert loaded.head_loaded
    assert torch.equal(loaded(TINY[name][1]), source(TINY[name][1]))
    assert loaded.fingerprint() == source.fingerprint()


def test_a_checkpoint_in_another_projects_layout_loads(tmp_path: Path) -> None:
    source = build("resnet_conv", num_classes=3).eval()
    foreign = {
        re.sub(r"^head\.", "linear.", key).removeprefix("encoder.").replace("downsample", "shortcut"): value
        for key, value in source.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    assert "layer2.0.shortcut.0.weight" in foreign
    torch.save(foreign, tmp_path / "model.pt")
    loaded = ResNet((1, 1), (4, 8), checkpoint=tmp_path / "model.pt").eval()
    assert torch.equal(loaded(TINY["resnet_conv"][1]), source(TINY["resnet_conv"][1]))


def test_a_safetensors_file_loads(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    source = build("mlp", num_classes=3)
    safetensors.save_file(source.state_dict(), tmp_path / "model.safetensors")
    assert MLP(64, (16,), checkpoint=tmp_path / "model.safetensors").fingerprint() == source.fingerprint()
    (tmp_path / "bad.safetensors").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match=r"bad\.safetensors is not a readable safetensors file"):
        MLP(64, (16,), checkpoint=tmp_path / "bad.safetensors")


def test_a_checkpoint_of_another_network_is_refused_with_counts_and_examples(tmp_path: Path) -> None:
    path = tmp_path / "wrn.pt"
    torch.save(WideResNet(16, 1, num_classes=3).state_dict(), path)
    # a shallower network finds all its weights in the file: the left-over layers must give it away
    with pytest.raises(CheckpointError, match=r"does not fit WideResNet\(depth=10.* unexpected: encoder\.block1\.1\."):
        WideResNet(10, 1, checkpoint=path)
    with pytest.raises(CheckpointError, match=r"of another shape: encoder\.block1.* is \(16, 16, 3, 3\), expected"):
        WideResNet(16, 2, checkpoint=path)
    with pytest.raises(CheckpointError, match=r"\d+ missing: encoder\.\S+, encoder\.\S+, encoder\.\S+ and \d+ more"):
        ResNet((1, 1), (4, 8), checkpoint=path)


def test_a_head_for_other_classes_is_refused_unless_a_new_one_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "mlp.pt"
    source = build("mlp", num_classes=3)
    torch.save(source.state_dict(), path)
    with pytest.raises(CheckpointError, match=r"3 classes, num_classes is 5.*load_head=false"):
        MLP(64, (16,), num_classes=5, checkpoint=path)
    loaded = MLP(64, (16,), num_classes=5, checkpoint=path, load_head=False)
    assert loaded.num_classes == 5
    assert not loaded.head_loaded
    assert torch.equal(loaded.encoder.get_parameter("1.weight"), source.encoder.get_parameter("1.weight"))


def test_an_encoder_only_checkpoint_leaves_the_head_untrained(tmp_path: Path) -> None:
    path = tmp_path / "encoder.pt"
    torch.save(build("mlp").encoder.state_dict(), path)
    loaded = MLP(64, (16,), num_classes=5, checkpoint=path)
    assert loaded.num_classes == 5
    assert not loaded.head_loaded
    assert MLP(64, (16,), checkpoint=path).head is None


class _Trap:
    """Pickles into a call that leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


def test_a_file_with_python_objects_is_refused_and_never_run(tmp_path: Path) -> None:
    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": build("mlp").state_dict(), "extra": _Trap(tmp_path / "ran")}, path)
    with pytest.raises(CheckpointError, match=r"evil\.ckpt holds more than tensors.*torch\.save\(model\.state_dict"):
        MLP(64, (16,), checkpoint=path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", [b"", b"garbage", pickle.dumps([1, 2]), b"PK\x03\x04broken"], ids=["empty", "text", "pickle", "zip"]
)
def test_a_damaged_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged\.pt") as caught:
        MLP(64, (16,), checkpoint=path)
    # torch's own message advises to turn the protection off
    assert "weights_only" not in str(caught.value)


def test_a_truncated_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    torch.save(build("mlp").state_dict(), path)
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 20)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            MLP(64, (16,), checkpoint=path)


@pytest.mark.parametrize("content", [{"epoch": 3}, [torch.ones(2)]], ids=["no tensors", "list"])
def test_a_file_without_a_state_dict_is_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"other\.pt holds (no tensors|a list)"):
        MLP(64, (16,), checkpoint=tmp_path / "other.pt")


def test_a_relative_checkpoint_is_also_looked_for_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMD_DATA_DIR", str(tmp_path))
    with pytest.raises(WeightsNotFoundError) as caught:
        build("mlp", checkpoint="weights/mlp.pt")
    message = str(caught.value)
    assert "\n" not in message
    assert str(Path("weights/mlp.pt").absolute()) in message
    assert str(tmp_path / "weights/mlp.pt") in message
    (tmp_path / "weights").mkdir()
    source = build("mlp", num_classes=3)
    torch.save(source.state_dict(), tmp_path / "weights/mlp.pt")
    assert build("mlp", checkpoint="weights/mlp.pt").fingerprint() == source.fingerprint()
    monkeypatch.delenv("RMD_DATA_DIR")
    with pytest.raises(WeightsNotFoundError, match=r"RMD_DATA_DIR \(not set\)"):
        build("mlp", checkpoint="weights/mlp.pt")


def test_a_missing_checkpoint_names_the_option_it_was_given_to(tmp_path: Path) -> None:
    with pytest.raises(
        WeightsNotFoundError, match=r"^checkpoint '.*a\.pt' not found.* Give checkpoint the path of a file"
    ):
        build("mlp", checkpoint=tmp_path / "a.pt")
    with pytest.raises(WeightsNotFoundError, match=r"^ckpt_path '.*a\.pt' not found.* Give ckpt_path the path"):
        find_checkpoint(tmp_path / "a.pt", option="ckpt_path")


def test_weights_inside_a_package_are_taken_only_with_the_hash_that_stands_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "some_package" / "weights"
    folder.mkdir(parents=True)
    (tmp_path / "some_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    address = "pkg://some_package/weights/mlp.safetensors"
    with pytest.raises(WeightsNotFoundError, match=r"mlp\.safetensors \(not there\).*Install some_package again"):
        build("mlp", checkpoint=address)
    with pytest.raises(WeightsNotFoundError, match="Install no_such_package again"):
        build("mlp", checkpoint="pkg://no_such_package/mlp.safetensors")
    source = build("mlp", num_classes=3)
    save_file(source.state_dict(), folder / "mlp.safetensors")
    with pytest.raises(WeightsNotFoundError, match=r"mlp\.json \(not there\)"):
        build("mlp", checkpoint=address)
    content = (folder / "mlp.safetensors").read_bytes()
    (folder / "mlp.json").write_text(json.dumps({"sha256": hashlib.sha256(content).hexdigest()}))
    assert build("mlp", checkpoint=address).fingerprint() == source.fingerprint()
    (folder / "mlp.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"is damaged: its sha256 is .* Install some_package again"):
        build("mlp", checkpoint=address)


@every_backbone
def test_the_fingerprint_follows_the_weights_and_nothing_else(name: str) -> None:
    first, second = build(name, num_classes=3), build(name, num_classes=3, frozen=True)
    mark = first.fingerprint()
    assert re.fullmatch(r"[0-9a-f]{64}", mark)
    assert second.fingerprint() == mark
    assert copy.deepcopy(first).train().fingerprint() == mark
    with torch.no_grad():
        next(second.parameters()).view(-1)[0] += 1e-3
    assert second.fingerprint() != mark
    assert build(name, num_classes=4).fingerprint() != mark


def test_the_fingerprint_sees_what_the_weights_do_not_show() -> None:
    marks = set()
    for options in ({}, {"pooling": "cls"}, {"heads": 4}):
        torch.manual_seed(0)
        sizes = {"heads": 2, "width": 8, "depth": 1, "max_length": 30} | options
        marks.add(GenomicsBERT(**sizes).fingerprint())
    for size in (16, 32):
        marks.add(build("wrn", image_size=size).fingerprint())
    assert len(marks) == 5
    assert build("mlp").bfloat16().fingerprint() != build("mlp").fingerprint()


def test_a_backbone_survives_pickling_with_its_transforms() -> None:
    backbone = build("wrn", num_classes=3)
    assert pickle.loads(pickle.dumps(backbone)).fingerprint() == backbone.fingerprint()


def test_a_new_head_follows_the_encoders_type() -> None:
    backbone = build("mlp").double()
    backbone.reset_head(2)
    assert backbone(torch.rand(1, 64, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ValueError, match="num_classes must be at least 1"):
        backbone.reset_head(0)


def test_the_identity_learns_its_size_and_refuses_what_is_not_features() -> None:
    backbone = Identity()
    with pytest.raises(RuntimeError, match="pass in_features"):
        _ = backbone.feature_dim
    x = torch.rand(3, 6)
    assert torch.equal(backbone.encoder(x), x)
    assert backbone.feature_dim == 6
    with pytest.raises(ValueError, match=r"\(B, 6\), got \(3, 7\)"):
        backbone.encoder(torch.rand(3, 7))
    with pytest.raises(ValueError, match="need a backbone that encodes"):
        Identity().encoder(torch.rand(3, 1, 8, 8))
    with pytest.raises(RuntimeError, match="pass in_features"):
        Identity(num_classes=3)


class PlainNet(nn.Module):
    """What a user's own network may look like."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Flatten()
        self.head = nn.Linear(64, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def test_a_plain_module_with_encoder_and_head_serves_as_a_backbone() -> None:
    net = PlainNet()
    net.test_transform = str.upper
    backbone = as_backbone(net)
    assert (backbone.encoder, backbone.head) == (net.encoder, net.head)
    assert (backbone.feature_dim, backbone.num_classes, backbone.head_loaded, backbone.frozen) == (64, 6, True, False)
    assert backbone.test_transform is str.upper
    assert backbone.train_transform is None
    own = Identity()
    assert as_backbone(own) is own
    del net.head
    assert as_backbone(net).head is None
    with pytest.raises(
        ValueError, match=r"Linear cannot serve as a backbone: its \.encoder must be a module, got NoneType"
    ):
        as_backbone(nn.Linear(2, 2))
    net.head = nn.Sequential()
    with pytest.raises(ValueError, match=r"nn\.Linear or None, got Sequential.*Backbone"):
        as_backbone(net)


def test_the_package_lists_its_names_and_resolves_each() -> None:
    assert {"WideResNet", "MaskedTokenPretraining"} <= set(dir(backbones))
    for name in backbones.__all__:
        assert getattr(backbones, name).__name__ == name
    with pytest.raises(AttributeError, match=r"no attribute 'ResNext'\. Public names: .*WideResNet"):
        _ = backbones.ResNext


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: WideResNet(27), "6n . 4"),
        (lambda: ResNet((1, 1), (4,)), "same groups"),
        (lambda: ResNet((1,), (4,), shortcut="skip"), "'conv' or 'pad'"),
        (lambda: MLP(4, ()), "backbone=identity"),
        (lambda: MLP(4, (4,), activation="sin"), "relu, gelu"),
        (lambda: SmallCNN(1, ()), "at least one"),
        (lambda: GenomicsBERT(kmer=9), "1..8"),
        (lambda: GenomicsBERT(kmer=2, stride=3), "no base is skipped"),
        (lambda: GenomicsBERT(width=10, heads=4), "multiple of heads"),
        (lambda: GenomicsBERT(pooling="max"), "'mean' or 'cls'"),
    ],
)
def test_impossible_sizes_are_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()
