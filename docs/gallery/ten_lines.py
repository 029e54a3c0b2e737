# %% [markdown]
# # A detector in ten lines
#
# Features of a network and their labels are all that RMD needs. Here the features are scikit-learn's handwritten digits
# themselves, 64 pixels each: 0 to 5 are known, 6 to 9 are not.

# %%
import torch
from sklearn.datasets import load_digits

from rmd_plugin import RMD

z, y = (torch.from_numpy(array).float() for array in load_digits(return_X_y=True))
known, y = y < 6, y.long()
train, test = torch.arange(len(z)) % 2 == 0, torch.arange(len(z)) % 2 == 1

detector = RMD(shrinkage="oas").fit_features(z[known & train], y[known & train])
scores = detector.predict_features(z[test])  # higher = more OOD
print(f"mean score of known digits {scores[known[test]].mean():.0f}, of new ones {scores[~known[test]].mean():.0f}")

# %% [markdown]
# How well the scores part the two, as the framework measures it (`OODScores` is a torchmetrics metric):

# %%
from rmd_plugin import OODScores

metric = OODScores()
metric.update(scores, torch.where(known[test], y[test], -1))
for name, value in metric.compute().items():
    if name.startswith("ood/"):  # the mean over several OOD sets is there, too
        print(f"{name:13} {float(value):.3f}")

# %% [markdown]
# A fitted detector says more than one number, and is a file like any model:

# %%
detector.save("rmd.safetensors")
detector = RMD.load("rmd.safetensors")
print("relative distance to each class:", *(f"{value:.1f}" for value in detector.class_scores(z[test][:1])[0]))
print("nearest class:", detector.nearest_class(z[test][:1]).tolist())

# %% [markdown]
# ## What this does not show
#
# Pixels of digits are easy: no network, 64 dimensions, classes that look alike to nobody. Real near-OOD data is harder by far
# (the page Results has it), and a high AUROC is no decision yet: that takes a threshold, and data to set it.
