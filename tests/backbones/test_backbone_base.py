"""What every backbone promises: encoder and head, freezing, checkpoints, fingerprints."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rmd_plugin.backbones import MLP, CheckpointError, GenomicsBERT, GenomicsCNN, Identity, ResNet, SmallCNN, WideResNet
from rmd_plugin.backbones.base import as_backbone, find_checkpoint

# name -> (constructor at a tiny size, batch)
TINY = {
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
}
every_backbone = pytest.mark.parametrize("name", TINY)


def build(name, **options):
    torch.manual_seed(0)
    return TINY[name][0](**options)


@every_backbone
def test_logits_are_the_head_on_the_encoders_pooled_features(name):
    backbone = build(name).eval()
    x = TINY[name][1]
    with pytest.raises(RuntimeError, match="no head"):
        backbone(x)
    backbone.reset_head(3)
    features = backbone.encoder(x)
    assert features.shape == (4, backbone.feature_dim)
    assert isinstance(backbone.head, nn.Linear)
    assert backbone.num_classes == 3
    torch.testing.assert_close(backbone(x), features @ backbone.head.weight.T + backbone.head.bias)


@every_backbone
def test_a_frozen_encoder_does_not_move_while_the_head_learns(name):
    backbone = build(name, num_classes=3, frozen=True)
    model = nn.Sequential(backbone).train()
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


@every_backbone
def test_a_checkpoint_comes_back_under_any_prefix(name, tmp_path):
    source = build(name, num_classes=3).train()
    source(TINY[name][1])  # moves the batch statistics away from their start
    weights = {f"module.net._orig_mod.{key}": value for key, value in source.eval().state_dict().items()}
    content = {"state_dict": {**weights, "loss.scale": torch.ones(3)}, "epoch": 3, "optimizer_states": [{}]}
    torch.save(content, tmp_path / "lightning.ckpt")
    save_file(source.state_dict(), tmp_path / "plain.safetensors")
    for file in ("lightning.ckpt", "plain.safetensors"):
        torch.manual_seed(1)
        loaded = TINY[name][0](checkpoint=tmp_path / file).eval()
        assert (loaded.num_classes, loaded.head_loaded) == (3, True)
        assert torch.equal(loaded(TINY[name][1]), source(TINY[name][1]))
        assert loaded.fingerprint() == source.fingerprint()


def test_a_checkpoint_of_another_network_is_refused_with_examples(tmp_path):
    path = tmp_path / "wrn.pt"
    torch.save(WideResNet(16, 1, num_classes=3).state_dict(), path)
    # a shallower network finds all its weights in the file: the left-over layers must give it away
    with pytest.raises(CheckpointError, match=r"Unexpected.*encoder\.block1\.1\."):
        WideResNet(10, 1, checkpoint=path)
    with pytest.raises(CheckpointError, match="size mismatch"):
        WideResNet(16, 2, checkpoint=path)
    with pytest.raises(CheckpointError, match="Missing") as caught:
        ResNet((1, 1), (4, 8), checkpoint=path)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_a_head_for_other_classes_is_refused_unless_a_new_one_is_asked_for(tmp_path):
    source = build("mlp", num_classes=3)
    torch.save(source.state_dict(), tmp_path / "mlp.pt")
    with pytest.raises(CheckpointError, match=r"backbone\.load_head=false"):
        MLP(64, (16,), num_classes=5, checkpoint=tmp_path / "mlp.pt")
    loaded = MLP(64, (16,), num_classes=5, checkpoint=tmp_path / "mlp.pt", load_head=False)
    assert (loaded.num_classes, loaded.head_loaded) == (5, False)
    assert torch.equal(loaded.encoder.get_parameter("1.weight"), source.encoder.get_parameter("1.weight"))
    torch.save(source.encoder.state_dict(), tmp_path / "encoder.pt")
    assert MLP(64, (16,), checkpoint=tmp_path / "encoder.pt").head is None
    assert not MLP(64, (16,), num_classes=5, checkpoint=tmp_path / "encoder.pt").head_loaded


class _Trap:
    """Pickles into a call that leaves a trace when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_a_file_with_python_objects_is_refused_and_never_run(tmp_path):
    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": build("mlp").state_dict(), "extra": _Trap(tmp_path / "ran")}, path)
    with pytest.raises(CheckpointError, match=r"evil\.ckpt.*refused") as caught:
        MLP(64, (16,), checkpoint=path)
    assert not (tmp_path / "ran").exists()
    # torch's own message advises to turn the protection off
    assert "weights_only" not in str(caught.value)


def test_a_damaged_file_is_refused_by_name(tmp_path):
    torch.save(build("mlp").state_dict(), tmp_path / "good.pt")
    torch.save({"epoch": 3}, tmp_path / "other.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    good, *others = ((tmp_path / name).read_bytes() for name in ("good.pt", "other.pt", "list.pt"))
    for content in (b"", b"garbage", pickle.dumps([1, 2], 2), b"PK\x03\x04broken", good[: len(good) // 2], *others):
        for name in ("damaged.pt", "damaged.safetensors"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(CheckpointError, match="damaged"):
                MLP(64, (16,), checkpoint=tmp_path / name)


def test_a_checkpoint_is_found_by_its_path_below_the_data_folder_and_in_a_package(tmp_path, monkeypatch):
    monkeypatch.setenv("RMD_DATA_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError, match="RMD_DATA_DIR") as caught:
        build("mlp", checkpoint="weights/mlp.pt")
    assert str(tmp_path / "weights/mlp.pt") in str(caught.value)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "__init__.py").touch()
    source = build("mlp", num_classes=3)
    torch.save(source.state_dict(), tmp_path / "weights/mlp.pt")
    for place in ("weights/mlp.pt", "pkg://weights/mlp.pt", tmp_path / "weights/mlp.pt"):
        assert find_checkpoint(place) == tmp_path / "weights/mlp.pt"
    assert build("mlp", checkpoint="weights/mlp.pt").fingerprint() == source.fingerprint()


def test_the_fingerprint_follows_the_weights_and_what_they_do_not_show():
    sizes = {"heads": 2, "width": 8, "depth": 1, "max_length": 30}
    torch.manual_seed(0)
    bert = GenomicsBERT(**sizes)
    other = GenomicsBERT(**sizes, pooling="cls")
    other.load_state_dict(bert.state_dict())
    assert other.fingerprint() != bert.fingerprint()
    wrn = build("wrn", num_classes=3)
    others = [build("wrn", num_classes=3, image_size=16), build("wrn", num_classes=3).bfloat16()]
    assert len({backbone.fingerprint() for backbone in (wrn, *others)}) == 3
    assert build("wrn", num_classes=3, frozen=True).fingerprint() == wrn.fingerprint()
    mark = pickle.loads(pickle.dumps(wrn)).fingerprint()
    assert mark == wrn.fingerprint()
    with torch.no_grad():
        next(wrn.parameters()).view(-1)[0] += 1e-3
    assert wrn.fingerprint() != mark


def test_the_identity_learns_its_size_and_refuses_what_is_not_features():
    backbone = Identity()
    with pytest.raises(RuntimeError, match="in_features"):
        _ = backbone.feature_dim
    x = torch.rand(3, 6)
    assert torch.equal(backbone.encoder(x), x)
    assert backbone.feature_dim == 6
    for wrong in (torch.rand(3, 7), torch.rand(3, 1, 8, 8)):
        with pytest.raises(ValueError, match="shape"):
            backbone.encoder(wrong)


class PlainNet(nn.Module):
    """What a user's own network may look like."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Flatten()
        self.head = nn.Linear(64, 6)


def test_a_plain_module_with_encoder_and_head_serves_as_a_backbone():
    net = PlainNet()
    net.test_transform = str.upper
    backbone = as_backbone(net)
    assert (backbone.encoder, backbone.head, backbone.test_transform) == (net.encoder, net.head, str.upper)
    assert (backbone.feature_dim, backbone.num_classes, backbone.head_loaded, backbone.frozen) == (64, 6, True, False)
    assert as_backbone(backbone) is backbone
    net.head = nn.Sequential()
    for wrong in (nn.Linear(2, 2), net):
        with pytest.raises(ValueError, match="encoder"):
            as_backbone(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: WideResNet(27), "depth"),
        (lambda: ResNet((1, 1), (4,)), "blocks"),
        (lambda: ResNet((1,), (4,), shortcut="skip"), "shortcut"),
        (lambda: MLP(4, (4,), activation="sin"), "activation"),
        (lambda: GenomicsBERT(kmer=2, stride=3), "stride"),
        (lambda: GenomicsBERT(pooling="max"), "pooling"),
    ],
)
def test_impossible_sizes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
