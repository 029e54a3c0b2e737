"""Our detectors beside the framework's own in pytorch-ood's own benchmark loop, on scikit-learn's digits.

python examples/framework_benchmark.py
"""

import torch
from pytorch_ood.detector import KNN
from torch import nn
from torch.utils.data import DataLoader

from rmd_plugin import RMD, Mahalanobis
from rmd_plugin.benchmarks import Digits

benchmark = Digits()  # a pytorch_ood.benchmark.Benchmark
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, benchmark.num_classes))
loader = DataLoader(benchmark.train_set(), batch_size=64, shuffle=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

encoder = model[:-1].eval()
detectors = [RMD(encoder), Mahalanobis(encoder), KNN(encoder)]
for detector in detectors:
    detector.fit(DataLoader(benchmark.fit_set(), batch_size=256))
for row in benchmark.evaluate(detectors, loader_kwargs={"batch_size": 256}):
    print(f"{row['Detector']:12} {row['Dataset']:12} AUROC {row['AUROC']:.3f}")
