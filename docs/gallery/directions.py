# %% [markdown]
# # RMD against MD, and why a sample was flagged
#
# A Mahalanobis distance is a sum over directions in feature space, and along many of them the classes do not differ. The relative
# distance cancels those exactly: of 384 directions it keeps one less than there are classes. The features are sentence embeddings of
# requests to an assistant: of 150 known kinds, and of others.

# %%
import numpy as np
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from rmd_plugin import RMD, Mahalanobis, OODScores
from rmd_plugin.benchmarks import Intents

benchmark = Intents()
z, y = next(iter(DataLoader(benchmark.fit_set(), batch_size=5000)))
z_test, y_test = next(iter(DataLoader(benchmark.test_sets()[0], batch_size=5000)))  # OOD samples have the label -1
detectors = {"MD": Mahalanobis(shrinkage="oas"), "RMD": RMD(shrinkage="oas")}


def auroc(scores) -> float:
    metric = OODScores()
    metric.update(scores, y_test)
    return 100 * float(metric.compute()["ood/AUROC"])


for name, detector in detectors.items():
    print(f"{name:4} AUROC {auroc(detector.fit_features(z, y).predict_features(z_test)):.1f} %")

# %% [markdown]
# `contributions` are the terms of a score, direction by direction; they add up to it. Left: what each direction adds on average. Right:
# the AUROC when only the first directions count. MD orders them by their variance, which has little to do with the classes: it needs about
# 300 directions to reach what RMD reaches with about twenty. RMD leaves out those in which the classes do not differ.

# %%
figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
for (name, detector), colour in zip(detectors.items(), ("#D55E00", "#0072B2")):
    terms = detector.contributions(z_test)
    directions = range(1, terms.shape[1] + 1)
    gap = terms[y_test < 0].mean(0) - terms[y_test >= 0].mean(0)
    left.plot(directions, gap, color=colour, label=f"{name}, {len(directions)} directions")
    counts = np.unique(np.geomspace(1, len(directions), 30).astype(int))
    right.plot(counts, [auroc(terms[:, :count].sum(1)) for count in counts], color=colour, label=name)
left.set(xscale="log", xlabel="direction", ylabel="mean of OOD minus mean of ID")
right.set(xscale="log", xlabel="number of leading directions", ylabel="AUROC (%)")
for axes in (left, right):
    axes.set_xticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
    axes.minorticks_off()
    axes.legend(frameon=False)
# alt: Two panels over the directions of MD and RMD: what each adds on average to OOD samples beyond ID samples, and the AUROC of the first directions, in which MD stays below RMD
figure.savefig("directions.png", dpi=120)

# %% [markdown]
# The same terms show why a sample was flagged: which directions contribute most to its score, and which class is nearest.

# %%
detector = detectors["RMD"]
scores = detector.predict_features(z_test)
index = scores.argmax()
sample, terms = z_test[index, None], detector.contributions(z_test[index, None])[0]
nearest = benchmark.class_names[int(detector.nearest_class(sample))]
print(f"score {float(scores[index]):.0f}, nearest class {nearest}, {'OOD' if y_test[index] < 0 else 'ID'}")
for direction in terms.abs().argsort(descending=True)[:5]:
    print(f"direction {int(direction):3}: {float(terms[direction]):+6.1f}")
print(f"the other {len(terms) - 5}: {float(terms.sum() - terms[terms.abs().argsort(descending=True)[:5]].sum()):+6.1f}")

# %% [markdown]
# ## What this does not show
#
# A direction is a combination of features without a name: to interpret it, look at samples that it separates. Where OOD
# samples differ from the ID data in directions that the classes share, MD is the better of the two.
