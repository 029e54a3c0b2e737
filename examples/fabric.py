"""Add RMD to a Fabric loop of your own, on any number of processes: the lines marked with (*).

python examples/fabric.py       one process
python examples/fabric.py 2     two, each with its share of the data; every sample counts once
"""

import sys

import torch
from lightning_fabric import Fabric  # or: from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from rmd_plugin import RMD, ClassMoments, OODScores  # (*)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()), nn.Linear(64, 6)

    def forward(self, x):
        return self.fc(self.body(x))


def main(devices: int) -> None:
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x, is_id = x.float() / 16, y < 6
    y = torch.where(is_id, y, -1)  # a label below zero means OOD
    x_id, y_id = x[is_id], y[is_id]
    train = TensorDataset(x_id[:801], y_id[:801])
    test = TensorDataset(torch.cat([x_id[801:], x[~is_id]]), torch.cat([y_id[801:], y[~is_id]]))

    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(train, batch_size=64, shuffle=True))
    for _ in range(5):
        for images, labels in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()

    def share(data):  # (*) every n-th sample; Fabric's own sampler would repeat some until all shares are equal
        mine = Subset(data, range(fabric.global_rank, len(data), fabric.world_size))
        return fabric.setup_dataloaders(DataLoader(mine, batch_size=64), use_distributed_sampler=False)

    for buffer in net.buffers():  # (*) BatchNorm's statistics are each process's own
        buffer.copy_(fabric.broadcast(buffer))
    net.eval()  # (*) the network itself: DDP's wrapper would wait for the others, whose shares may have more batches
    moments, scores = ClassMoments().to(fabric.device), OODScores(["6-9"]).to(fabric.device)  # (*)
    with torch.no_grad():
        for images, labels in share(train):
            moments.update(net.body(images), labels)  # (*)
        of_all = moments.compute()  # (*) the sums over all processes, the same on each
        rmd = RMD().fit_moments(of_all)  # (*)
        for images, labels in share(test):
            scores.update(rmd.predict_features(net.body(images)), labels)  # (*)
    auroc = scores.compute()["6-9/AUROC"]  # (*) of all processes together

    if fabric.is_global_zero:
        rmd.save("rmd.safetensors")
        print(f"fitted on {of_all.num_samples} samples, AUROC {float(auroc):.4f}")
    fabric.save("net.pt", {"net": model})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
