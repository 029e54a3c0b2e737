# %% [markdown]
# # Features of any timm model, and several layers
#
# The encoder of a detector is any network that returns features. For several layers, torchvision's `create_feature_extractor`
# returns all of them in one pass, and each layer gets its own detector. The weights here are random, so that nothing has to be
# downloaded; use `pretrained=True`.

# %%
import timm
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.feature_extraction import create_feature_extractor

from rmd_plugin import RMD, OODScores

torch.manual_seed(0)
network = timm.create_model("resnet10t", pretrained=False, num_classes=0, in_chans=1).eval()
x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x = torch.nn.functional.interpolate(x.float().reshape(-1, 1, 8, 8) / 16, size=32)
known = y < 6
train = DataLoader(TensorDataset(x[known][:400], y[known][:400]), batch_size=100)
test, labels = torch.cat([x[known][400:600], x[~known][:200]]), torch.cat([torch.zeros(200), -torch.ones(200)])


def auroc(scores) -> float:
    metric = OODScores()
    metric.update(scores, labels)
    return float(metric.compute()["ood/AUROC"])


# %%
last = RMD(network, shrinkage="oas").fit(train)
print(f"last layer: AUROC {auroc(torch.cat([last.predict(part) for part in test.split(100)])):.3f}")

# %% [markdown]
# One detector for each stage. Detectors average feature maps (B, C, H, W) over space, so the output of the extractor can be passed
# on unchanged. Scores of layers differ in scale: standardise them by the scores of the training samples, then add.

# %%
stages = ["layer1", "layer2", "layer3", "layer4"]
extract = create_feature_extractor(network, stages)
with torch.no_grad():
    batches = [(extract(part), part_labels) for part, part_labels in train]
    tested = [extract(part) for part in test.split(100)]
train_labels = torch.cat([part for _, part in batches])
detectors, scaled = {}, {}
for name in stages:
    known_maps, test_maps = torch.cat([maps[name] for maps, _ in batches]), torch.cat([maps[name] for maps in tested])
    detectors[name] = RMD(shrinkage="oas").fit_features(known_maps, train_labels)
    reference = detectors[name].predict_features(known_maps)
    scaled[name] = (detectors[name].predict_features(test_maps) - reference.mean()) / reference.std()
print(f"sum of {', '.join(stages)}: AUROC {auroc(sum(scaled.values())):.3f}")

# %%
from matplotlib.figure import Figure

figure = Figure(figsize=(9, 2.8), layout="constrained")
for axes, (name, scores) in zip(figure.subplots(1, len(scaled)), scaled.items()):
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
# The network is untrained, so its layers say little about the digits. With trained networks the last layer alone was better in our
# measurements (page "The detectors", section "Inner layers"): use several only if you have a reason.
