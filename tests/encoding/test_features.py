"""What becomes of feature maps of few digits."""

import pytest
import torch

from rmd_plugin.encoding.batch_encoder import BatchEncoder
from rmd_plugin.encoding.features import pool_features
from rmd_plugin.encoding.loop import PairEncoder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_maps_are_widened_before_they_are_averaged(dtype):
    maps = (torch.randn(6, 5, 7, 7) + 100).to(dtype)
    expected = maps.double().mean((2, 3)).float()
    labels = torch.zeros(6, dtype=torch.long)
    net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Flatten(), torch.nn.Linear(245, 2).to(dtype))
    found = {
        "function": pool_features(maps),
        "loop": PairEncoder(lambda x: x)((maps, labels)).features,
        "hook": BatchEncoder(net, encoder="0")((maps, labels)).features,
    }
    for features in found.values():
        assert features.dtype == torch.float32
        torch.testing.assert_close(features, expected, rtol=3e-7, atol=0)
    assert torch.equal(pool_features(maps, torch.float64), maps.double().mean((2, 3)))


def test_a_long_batch_of_maps_is_widened_in_parts(monkeypatch):
    maps = (torch.randn(50, 3, 4, 4) + 100).bfloat16()
    whole = pool_features(maps, torch.float64)
    monkeypatch.setattr("rmd_plugin.encoding.features._WIDENED_NUMBERS", 100)
    assert torch.equal(pool_features(maps, torch.float64), whole)
    assert pool_features(maps[:0]).shape == (0, 3)
