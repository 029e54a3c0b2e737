import functools
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from rmd_plugin.compare.fingerprint import (
    FingerprintError,
    dataset_fingerprint,
    encoder_fingerprint,
    fingerprint,
    hash_items,
)


@dataclass
class Scale:
    factor: float
    offset: object = None

    def __call__(self, x):
        return x * self.factor


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def make(step):
    return lambda x: x + step


def backbone(width=4, stride=1, seed=0):
    torch.manual_seed(seed)
    module = nn.Module()
    module.encoder = nn.Sequential(nn.Conv2d(1, width, 3, stride=stride), nn.Flatten())
    module.head = nn.Linear(width, 2)
    return module


DIFFERENT = [
    None,
    0,
    False,
    0.0,
    -0.0,
    "0",
    b"0",
    [],
    (),
    {},
    set(),
    [0],
    [[0]],
    torch.zeros(2),
    torch.zeros(2, dtype=torch.float64),
    torch.zeros(1, 2),
    np.zeros(2),
    np.float32(0),
    torch.float32,
    max,
    min,
    Scale,
    Scale(1.0),
    Scale(2.0),
    Scale(1.0, offset=torch.ones(3)),
    Scale(1.0).__call__,
    functools.partial(make, 1),
    functools.partial(make, 2),
    make,
    make(1),
    make(2),
    lambda x: x * 2,
    lambda x: x * 3,
    lambda x: abs(x),
    lambda x: len(x),
    Slotted(1),
    Slotted(2),
    nn.ReLU(),
    nn.LeakyReLU(0.1),
    nn.LeakyReLU(0.2),
]


def test_things_that_differ_have_different_hashes():
    hashes = [fingerprint(thing) for thing in DIFFERENT]
    assert len(set(hashes)) == len(hashes)


def test_things_made_alike_have_the_same_hash():
    assert fingerprint(make(1)) == fingerprint(make(1))
    assert fingerprint(Scale(1.0, offset=np.ones(2))) == fingerprint(Scale(1.0, offset=np.ones(2)))
    assert fingerprint({"a", "b", "c"}) == fingerprint({"c", "b", "a"})
    assert fingerprint(nn.LeakyReLU(0.1)) == fingerprint(nn.LeakyReLU(0.1))


def test_an_own_fingerprint_wins():
    class Own:
        def __init__(self, name, junk):
            self.name, self.junk = name, junk

        def fingerprint(self):
            return self.name

    assert fingerprint(Own("a", 1)) == fingerprint(Own("a", 2)) != fingerprint(Own("b", 1))


def test_a_circle_ends():
    ring = [1]
    ring.append(ring)
    assert fingerprint(ring) == fingerprint(ring)


def test_what_has_no_content_is_refused_with_its_kind(tmp_path):
    with pytest.raises(FingerprintError, match="Generator"):
        fingerprint(Scale(1.0, offset=torch.Generator()))
    with open(tmp_path / "file", "w") as file, pytest.raises(FingerprintError, match="TextIOWrapper"):
        fingerprint(make(file))


@pytest.mark.slow
def test_hashes_are_the_same_in_another_process():
    code = (
        "import sys; sys.path[:0] = ['tests/compare']; import test_fingerprint as t;"
        "print(t.fingerprint([t.Scale(1.5, {'a', 'b', 'c'}), t.make(3), t.torch.ones(2)]),"
        " t.encoder_fingerprint(t.backbone()))"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    here = fingerprint([Scale(1.5, {"a", "b", "c"}), make(3), torch.ones(2)])
    # this module has another name there, and a class's name is part of what it is
    assert len(other) == 2
    assert other[1] == encoder_fingerprint(backbone())
    assert (other[0] == here) == (__name__ == "test_fingerprint")


@pytest.mark.parametrize("change", [{"seed": 1}, {"stride": 2}, {"width": 5}])
def test_weights_and_structure_of_the_encoder_count(change):
    assert encoder_fingerprint(backbone()) != encoder_fingerprint(backbone(**change))


def test_the_head_does_not_count():
    one, other = backbone(), backbone()
    nn.init.zeros_(other.head.weight)
    assert encoder_fingerprint(one) == encoder_fingerprint(other)


def test_a_buffer_that_is_not_saved_counts():
    one, other = backbone(), backbone()
    one.encoder.register_buffer("scale", torch.ones(1), persistent=False)
    other.encoder.register_buffer("scale", torch.zeros(1), persistent=False)
    assert encoder_fingerprint(one) != encoder_fingerprint(other)


def test_half_precision_weights_are_hashed_too():
    assert encoder_fingerprint(backbone().to(torch.bfloat16)) != encoder_fingerprint(backbone())


class WithDigest(TensorDataset):
    def digest(self):
        return fingerprint(list(self.tensors))


def test_parts_of_data_sets_with_a_digest_have_one():
    data = WithDigest(torch.arange(6.0), torch.zeros(6))
    other = WithDigest(torch.arange(6.0) + 1, torch.zeros(6))
    found = [
        dataset_fingerprint(part)
        for part in (data, other, ConcatDataset([data, other]), ConcatDataset([other, data]), Subset(data, [0, 1]))
    ]
    assert len(set(found)) == 5
    assert None not in found
    assert dataset_fingerprint(Subset(data, [0, 1])) == dataset_fingerprint(Subset(data, [0, 1]))


def test_a_data_set_without_a_digest_is_hashed_by_its_items():
    data = TensorDataset(torch.arange(6.0), torch.zeros(6))
    assert dataset_fingerprint(data) is None
    assert dataset_fingerprint(Subset(data, [0])) is None
    changed = TensorDataset(torch.arange(6.0) * 2, torch.zeros(6))
    assert hash_items(DataLoader(data, 2)) == hash_items(DataLoader(data, 2)) != hash_items(DataLoader(changed, 2))
