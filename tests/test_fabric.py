"""Fabric: the example, on one process and on two, and networks in Fabric's wrapper."""

import importlib.util
import re

import config_kit
import oracle
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from rmd_plugin import RMD
from rmd_plugin.monitor.features import BatchEncoder

EXAMPLE = config_kit.ROOT / "examples/fabric.py"


@pytest.mark.slow
@pytest.mark.ddp
@pytest.mark.parametrize("processes", [1, 2])
def test_the_example_counts_every_sample_once_on_any_number_of_processes(tmp_path, processes):
    done = config_kit.python(str(EXAMPLE), str(processes), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    samples, auroc = re.search(r"fitted on (\d+) samples, AUROC ([\d.]+)", done.stdout).groups()

    spec = importlib.util.spec_from_file_location("fabric_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    net = example.Net().eval()
    net.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True)["net"])
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    with torch.no_grad():
        z = net.body(x.float() / 16)
    z_id, y_id, z_ood = z[y < 6], y[y < 6], z[y >= 6]
    assert int(samples) == 801
    id_scores, ood_scores = (oracle.rmd(z_id[:801], y_id[:801], part) for part in (z_id[801:], z_ood))
    assert float(auroc) == pytest.approx(oracle.auroc(id_scores, ood_scores), abs=1e-3)
    saved = RMD.load(tmp_path / "rmd.safetensors").predict_features(z_ood)
    torch.testing.assert_close(saved.double(), torch.as_tensor(ood_scores).double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("root", ["lightning_fabric", "lightning.fabric"])
@pytest.mark.parametrize("head", ["fc", None])
def test_a_network_in_fabrics_wrapper_is_encoded_as_without_it(root, head):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)

        def forward(self, x):
            return self.fc(self.body(x))

    net = Net()
    wrapped = pytest.importorskip(root).Fabric(accelerator="cpu", devices=1).setup(net)
    batch = torch.randn(5, 8), torch.arange(5) % 3
    encoded = BatchEncoder(wrapped, head)(batch)
    with torch.no_grad():
        assert torch.equal(encoded.features, net.body(batch[0]))
        assert torch.equal(encoded.logits, net(batch[0]))
