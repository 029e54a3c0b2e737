import sys

import pytest
import torch
from torch import nn

from rmd_plugin.encoding.batch_encoder import BatchEncoder
from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.encoding.loop import PairEncoder, encode_batches


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))


BATCHES = [
    (torch.randn(3, 4), torch.tensor([0, -1, 2])),
    (torch.randn(2, 4), torch.tensor([-1, -2])),
    (torch.randn(1, 4), torch.tensor([1])),
]


def test_an_encoder_of_inputs_and_one_of_batches_pass_the_same_loop(net):
    by_head = [batch.features for batch in encode_batches(BatchEncoder(net, "2"), BATCHES)]
    by_encoder = [batch.features for batch in encode_batches(PairEncoder(net[:2]), BATCHES)]
    assert all(map(torch.equal, by_head, by_encoder))


def test_the_module_is_in_evaluation_mode_for_the_loop_alone(net):
    modes = [net.training for _ in encode_batches(PairEncoder(net), BATCHES)]
    assert modes == [False] * 3
    assert all(module.training for module in net.modules())


def test_features_have_no_gradients_and_the_callers_grad_mode_is_left_alone(net):
    for batch in encode_batches(PairEncoder(net), BATCHES):
        assert not batch.features.requires_grad
        assert torch.is_grad_enabled()


def test_ood_samples_are_left_out_on_request_and_so_are_batches_of_nothing_else(net):
    found = list(encode_batches(PairEncoder(net), BATCHES, id_only=True))
    assert [batch.labels.tolist() for batch in found] == [[0, 2], [1]]
    assert torch.equal(found[0].features, net.eval()(BATCHES[0][0])[[0, 2]])
    assert len(list(encode_batches(PairEncoder(net), BATCHES))) == 3


def test_the_batch_goes_with_what_became_of_it_as_long_as_it_is_whole(net):
    (first, *_), (part, *_) = (list(encode_batches(PairEncoder(net), BATCHES, id_only=only)) for only in (False, True))
    assert first.inputs is BATCHES[0][0]
    assert part.batch is None


def test_half_precision_is_widened_before_maps_are_averaged():
    maps = torch.randn(2, 3, 5, 5, dtype=torch.bfloat16)
    (found,) = encode_batches(PairEncoder(nn.Identity()), [(maps, torch.zeros(2).long())])
    assert found.features.dtype == torch.float32
    assert torch.equal(found.features, maps.float().mean((2, 3)))
    double = torch.randn(2, 3, dtype=torch.float64)
    (found,) = encode_batches(PairEncoder(nn.Identity()), [(double, [0, 1])], device="cpu")
    assert found.features.dtype == torch.float64


def test_what_is_no_pair_is_refused(net):
    with pytest.raises(EncodingError, match=r"pairs \(x, y\), got a list of length 1"):
        list(encode_batches(PairEncoder(net), [[torch.zeros(2, 4)]]))


def test_a_bar_shows_its_title_on_a_terminal(net, capsys, monkeypatch):
    list(encode_batches(PairEncoder(net), BATCHES, title="encode train"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    list(encode_batches(PairEncoder(net), BATCHES, title="encode train"))
    assert "encode train" in capsys.readouterr().err
    list(encode_batches(PairEncoder(net), BATCHES))
    assert capsys.readouterr().err == ""
