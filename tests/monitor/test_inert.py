"""Detectors from anybody's checkpoint: what else is pickled in it is neither needed nor run."""

import contextlib
import copyreg
import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path

import pytest
import torch
from callback_kit import OOD, QUIET, TRAIN, VAL, loader, trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmd_plugin import RMD, OODMonitor
from rmd_plugin.monitor.inert import Checkpoint, CheckpointError, StandIn
from rmd_plugin.monitor.snapshot import HEADER, monitor_states

pytestmark = [
    pytest.mark.filterwarnings(*QUIET),
    pytest.mark.filterwarnings("ignore:.*is an instance of `nn.Module` and is already saved.*"),
]

TEMPLATE = """
import enum
import pytorch_lightning as pl
import torch
from torch import nn

class Size(enum.Enum):
    SMALL = 4

class Attributes(dict):
    pass

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Linear(8, width), nn.ReLU()), nn.Linear(width, 4)
        self.options, self.sizes = Attributes(width=width), [Size.SMALL]

    def forward(self, x):
        return self.fc(self.body(x))

class Module(pl.LightningModule):
    def __init__(self, net, optimizer, scheduler, compile, paths, cfg):
        super().__init__()
        self.save_hyperparameters()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self(batch[0])

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())
"""


def test_a_checkpoint_in_the_style_of_lightning_hydra_template_needs_no_training_code(tmp_path, monkeypatch):
    omegaconf = pytest.importorskip("omegaconf")
    (tmp_path / "template_parts.py").write_text(TEMPLATE)
    monkeypatch.syspath_prepend(tmp_path)
    import template_parts

    cfg = omegaconf.OmegaConf.create({"paths": {"data": "/data"}, "sizes": [1, 2], "copy": "${paths.data}"})
    module = template_parts.Module(
        net=template_parts.Net(16),
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        scheduler=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1),
        compile=False,
        paths={"root": Path("/data"), "seen": {1, 2}},
        cfg=cfg,
    )
    monitor = OODMonitor({"rmd": RMD()}, head="net.fc", ood={"near": loader(OOD)})
    run = trainer(tmp_path, monitor)
    run.fit(module, loader(TRAIN), loader(VAL))
    run.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "last.ckpt", weights_only=True)

    monkeypatch.undo()
    del sys.modules["template_parts"]
    with pytest.raises(ModuleNotFoundError):
        torch.load(tmp_path / "last.ckpt", weights_only=False)
    loaded = OODMonitor.load_detectors(tmp_path / "last.ckpt")
    z = torch.randn(7, 16)
    assert torch.equal(loaded["rmd"].predict_features(z), monitor.detectors["rmd"].predict_features(z))
    assert "template_parts" not in sys.modules


# -- the format ------------------------------------------------------------------------------------------------------


def state(**values):
    return {"callbacks": {"key": HEADER | values}}


def read(path):
    return monitor_states(path, "cpu")["key"]


def test_plain_data_are_those_that_torch_reads(tmp_path):
    wide = torch.arange(24).reshape(4, 6)
    kinds = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
    tensors = {kind: torch.tensor([[0, 1, 2]]).to(getattr(torch, kind)) for kind in (*kinds, "complex64", "complex128")}
    tensors |= {"uint16": torch.tensor([1, 2]).to(torch.uint16), "float8": torch.ones(3).to(torch.float8_e5m2)}
    tensors |= {"view": wide[1:3, ::2], "transposed": wide.T, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    rest = {"size": torch.Size([2, 3]), "dtype": torch.float64, "big": 2**80, "text": "é", "nested": [(1, {2: None})]}
    torch.save(state(**tensors, **rest), tmp_path / "a.ckpt")
    expected, found = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["key"], read(tmp_path / "a.ckpt")
    assert found.keys() == expected.keys()
    for name in tensors:
        assert found[name].dtype == expected[name].dtype
        assert found[name].shape == expected[name].shape
        assert torch.equal(found[name].to(torch.complex128), expected[name].to(torch.complex128)), name
    assert {name: found[name] for name in rest} == rest


def test_what_is_not_plain_in_the_monitors_own_part_is_named(tmp_path):
    torch.save(state(x=Path("a")), tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"holds a pathlib.*Path where plain data"):
        read(tmp_path / "a.ckpt")


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_told_in_one_sentence(tmp_path, kept):
    path = tmp_path / "cut.ckpt"
    torch.save(state(x=torch.randn(1000)), path)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(ValueError, match=r"cut\.ckpt' is damaged, cut off"):
        OODMonitor.load_detectors(path)


def test_other_files_are_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        Checkpoint(tmp_path / "none.ckpt")
    torch.save({}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="another kind of file"):
        Checkpoint(tmp_path / "old.ckpt")
    torch.save([1], tmp_path / "list.ckpt")
    assert monitor_states(tmp_path / "list.ckpt", "cpu") == {}


def nested(levels=60):
    value = [1]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "detectors",
    [
        None,
        [1],
        {"a": None},
        {"a": {}},
        {"a": {"detector": "RMD"}},
        {"a": {"detector": "RMD", "state": 3}},
        {"a": {"detector": nested(), "state": {}}},
        {"a": {"detector": "KNN", "attributes": {}}},
        {"a": {"detector": "KNN", "attributes": {"__class__": 1}, "networks": []}},
        {"a": {"detector": "KNN", "attributes": {}, "networks": ["__dict__"]}},
        {"a": {"detector": "KNN", "attributes": {"inner": {"__detector__": {}}}, "networks": []}},
    ],
)
def test_detectors_in_another_form_are_told_as_damaged(tmp_path, detectors):
    torch.save(state(detectors=detectors), tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="damaged"):
        OODMonitor.load_detectors(tmp_path / "a.ckpt")


def test_what_stands_in_many_places_of_a_detector_is_restored_once(tmp_path):
    snapshot = {"detector": "KNN", "attributes": {"x": nested()}, "networks": []}
    torch.save(state(detectors={"a": snapshot}), tmp_path / "a.ckpt")
    assert len(OODMonitor.load_detectors(tmp_path / "a.ckpt")["a"].x) == 2


# -- what must never run ---------------------------------------------------------------------------------------------

RAN = []


def ran(*args):
    RAN.append(args)
    return dict


class Reduced:
    def __reduce__(self):
        return ran, ("reduce",)


class WithState:
    def __getstate__(self):
        return {"a": 1}

    def __setstate__(self, state):
        ran("setstate")


class Items(OrderedDict):
    def __setitem__(self, key, value):
        if key == "live":
            super().__setitem__("live", value)
        ran("setitem")


class Appended(list):
    def extend(self, items):
        ran("extend")

    append = extend


class Called:
    act = staticmethod(ran)

    def __reduce__(self):
        return eval, ("__import__('test_inert').ran('eval')",)


class Chained:
    """getattr(module, name) first, then a call of what it gave."""

    def __reduce__(self):
        return partial(ran, "partial"), ()


def written(pickled, path, **records):
    """A file as torch.save makes it, around any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **records}.items():
            file.writestr(f"a/{name}", content)
    return path


HERE = b"test_inert"
RAW = {
    "global": b"c" + HERE + b"\nran\n(S'x'\ntR.",
    "inst": b"(S'x'\ni" + HERE + b"\nran\n.",
    "obj": b"(c" + HERE + b"\nran\nS'x'\no.",
    "stack_global": b"\x80\x04\x8c\x0atest_inert\x8c\x03ran\x93(\x8c\x01xtR.",
    "dotted": b"\x80\x04\x8c\x0atest_inert\x8c\x0aCalled.act\x93)R.",
    "extension": b"\x80\x02\x82\xf0(U\x01xtR.",
}


@pytest.fixture(autouse=True)
def _nothing_has_run():
    RAN.clear()
    copyreg.add_extension("test_inert", "ran", 0xF0)
    yield
    copyreg.remove_extension("test_inert", "ran", 0xF0)
    copyreg._extension_cache.pop(0xF0, None)


@pytest.mark.parametrize("kind", [Reduced, WithState, Items, Appended, Called, Chained])
@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_that_act_when_they_are_unpickled_stay_inert(tmp_path, kind, protocol):
    thing = kind()
    if isinstance(thing, list):
        list.extend(thing, [1, 2])
    if isinstance(thing, dict):
        thing["live"] = 1
    torch.save(state(ok=1) | {"hyper_parameters": {"x": thing}}, tmp_path / "a.ckpt", pickle_protocol=protocol)
    RAN.clear()
    torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert RAN  # the payload is live
    RAN.clear()
    assert read(tmp_path / "a.ckpt")["ok"] == 1
    assert not RAN


@pytest.mark.parametrize("name", RAW)
def test_no_opcode_reaches_a_real_object(tmp_path, name):
    pickle.loads(RAW[name])  # also fills the cache of extensions
    assert RAN
    RAN.clear()
    assert isinstance(Checkpoint(written(RAW[name], tmp_path / "a.ckpt")).content, StandIn)
    assert not RAN


@pytest.mark.parametrize("target", ["_rebuild_tensor_v2", "Size"])
def test_a_state_cannot_be_given_to_the_few_real_things(tmp_path, target):
    module = b"torch" if target == "Size" else b"torch._utils"
    poison = b"\x80\x02c" + module + b"\n" + target.encode() + b"\n(N}U\x08__init__U\x01xstb."
    Checkpoint(written(poison, tmp_path / "poison.ckpt"))
    torch.save(state(x=torch.ones(2)), tmp_path / "good.ckpt")
    assert torch.equal(read(tmp_path / "good.ckpt")["x"], torch.ones(2))


class Pickler(pickle.Pickler):
    """Persistent ids and tensors of any nonsense."""

    def persistent_id(self, thing):
        return thing.pid if isinstance(thing, Stored) else None


class Stored:
    def __init__(self, *pid):
        self.pid = pid


class Forged:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.arguments


def forged(value, path, **records):
    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(state(x=value))
    return written(buffer.getvalue(), path, **records)


GOOD = Stored("storage", torch.FloatStorage, "0", "cpu", 4)


@pytest.mark.parametrize(
    "value",
    [
        Forged(GOOD, 0, (10**12,), (0,), False, None),
        Forged(GOOD, 0, (10**6, 10**6), (10**6, 1), False, None),
        Forged(GOOD, 3, (2,), (1,), False, None),
        Forged(GOOD, -1, (2,), (1,), False, None),
        Forged(Stored("storage", torch.FloatStorage, "../../0", "cpu", 4), 0, (4,), (1,), False, None),
        Forged(Stored("storage", torch.FloatStorage, "1", "cpu", 2**62), 0, (4,), (1,), False, None),
        Forged("storage", 0, (4,), (1,), False, None),
        Forged(GOOD, 0, "size", None, False, None),
        Stored("module", "x", "0", "cpu", 4),
        Stored("storage", "x", "0", "cpu", 4),
        Stored(1),
    ],
)
def test_tensors_that_lie_about_their_place_are_refused(tmp_path, value):
    good = forged(Forged(GOOD, 0, (4,), (1,), False, None), tmp_path / "good.ckpt", **{"data/0": bytes(16)})
    assert torch.equal(read(good)["x"], torch.zeros(4))
    bad = forged(value, tmp_path / "bad.ckpt", **{"data/0": bytes(16)})
    with pytest.raises(CheckpointError):
        read(bad)


def test_what_stands_in_many_places_is_read_once_and_cycles_are_refused(tmp_path):
    assert read(forged(nested(), tmp_path / "a.ckpt"))["x"][0] is not None
    cycle = []
    cycle.append(cycle)
    with pytest.raises(CheckpointError, match="RecursionError"):
        read(forged(cycle, tmp_path / "b.ckpt"))


def test_views_of_one_storage_take_its_memory_once(tmp_path):
    whole = torch.arange(1000.0)
    torch.save(state(views=[whole[first:] for first in range(50)]), tmp_path / "a.ckpt")
    views = read(tmp_path / "a.ckpt")["views"]
    assert all(torch.equal(view, whole[first:]) for first, view in enumerate(views))
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1  # else a small file fills any memory


def test_compressed_files_are_refused_since_they_may_grow_without_end(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", pickle.dumps({}))
    with pytest.raises(CheckpointError, match="compressed"):
        Checkpoint(tmp_path / "a.ckpt")


@pytest.mark.slow
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzzed_pickles_are_read_or_refused(tmp_path, data):
    torch.save(state(x=torch.ones(2), y=[1, "a"]) | {"z": Path("a")}, tmp_path / "good.ckpt")
    with zipfile.ZipFile(tmp_path / "good.ckpt") as file:
        pickled, storage = bytearray(file.read("good/data.pkl")), file.read("good/data/0")
    for _ in range(data.draw(st.integers(1, 4))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CheckpointError):
        monitor_states(written(bytes(pickled), tmp_path / "bad.ckpt", **{"data/0": storage}), "cpu")
