# %% [markdown]
# # Features of any timm model, and several layers
#
# Any network that gives features can stand in front of a detector. `MultiLayer` listens to several of its layers in one pass.
# The weights here are random, because nothing is downloaded: `pretrained=True` is what you would write.

# %%
import timm
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, MultiLayer, OODScores

torch.manual_seed(0)
network = timm.create_model("resnet10t", pretrained=False, num_classes=0, in_chans=1).eval()
x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x = torch.nn.functional.interpolate(x.float().reshape(-1, 1, 8, 8) / 16, size=32)
known = y < 6
train = DataLoader(TensorDataset(x[known][:400], y[known][:400]), batch_size=100)
test, labels = torch.cat([x[known][400:600], x[~known][:200]]), torch.cat([torch.zeros(200), -torch.ones(200)])


def auroc(detector) -> float:
    metric = OODScores()
    metric.update(torch.cat([detector.predict(part) for part in test.split(100)]), labels)
    return float(metric.compute()["ood/AUROC"])


# %%
last = RMD(network, shrinkage="oas").fit(train)
print(f"last layer: AUROC {auroc(last):.3f}")

several = MultiLayer(RMD(shrinkage="oas"), network, layers="auto").fit(train)
print(f"{', '.join(several.detectors)}: AUROC {auroc(several):.3f}")

# %% [markdown]
# `layers="auto"` found the stages; names and patterns (`["layer3", "layer4"]`, `"blocks.*"`) work too. Each layer has its own
# detector, whose scores are added on the scale of training samples that were left out:

# %%
from matplotlib.figure import Figure

from rmd_plugin.encoding.layer_encoder import LayerEncoder

encode = LayerEncoder(network, list(several.detectors))
with torch.no_grad():
    features = [encode(part) for part in test.split(100)]
figure = Figure(figsize=(9, 2.8), layout="constrained")
for axes, (name, detector) in zip(figure.subplots(1, len(several.detectors)), several.detectors.items()):
    scores = torch.cat([detector.predict_features(part[name]) for part in features])
    span = (float(scores.quantile(0.01)), float(scores.quantile(0.99)))
    axes.hist(scores[:200], bins=25, range=span, color="#0072B2", alpha=0.5, label="known")
    axes.hist(scores[200:], bins=25, range=span, histtype="step", linewidth=2, color="#D55E00", label="new")
    axes.set(title=name, yticks=[], xlabel="score")
axes.legend(frameon=False)
# alt: Histograms of the scores of known and new digits in each of the four stages of the network
figure.savefig("layers.png", dpi=120)

# %% [markdown]
# ## What this does not show
#
# The network is untrained, so its layers know little of the digits. With trained networks the last layer alone was better in our
# measurements (the page Detectors, MultiLayer): take several where you have a reason to.
