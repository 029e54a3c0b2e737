# %% [markdown]
# # A detector in ten lines
#
# Features of a network and their labels are all that RMD needs. Here they are sentence embeddings of requests to an assistant, which
# come with the package: 150 kinds of requests are known; the OOD samples are other requests.

# %%
from torch.utils.data import DataLoader

from rmd_plugin import RMD
from rmd_plugin.benchmarks import Intents

benchmark = Intents()
z, y = next(iter(DataLoader(benchmark.fit_set(), batch_size=5000)))  # (3000, 384) and (3000,)
z_test, y_test = next(iter(DataLoader(benchmark.test_sets()[0], batch_size=5000)))  # OOD samples have the label -1

detector = RMD(shrinkage="oas").fit_features(z, y)
scores = detector.predict_features(z_test)  # higher = more OOD
print(f"mean score of known requests {scores[y_test >= 0].mean():.0f}, of others {scores[y_test < 0].mean():.0f}")

# %% [markdown]
# How well the scores separate the two, as the framework measures it (`OODScores` is a torchmetrics metric):

# %%
from rmd_plugin import OODScores

metric = OODScores()
metric.update(scores, y_test)
for name, value in metric.compute().items():
    if name.startswith("ood/"):  # there is also the mean over several OOD sets
        print(f"{name:13} {float(value):.3f}")

# %% [markdown]
# A fitted detector also scores each class, and is saved to a file like a model:

# %%
detector.save("rmd.safetensors")
detector = RMD.load("rmd.safetensors")
distances = detector.class_scores(z_test[:1])[0]  # one for each class
for label in distances.argsort()[:3]:
    print(f"{benchmark.class_names[label]:20} {float(distances[label]):7.1f}")
print("it was:", benchmark.class_names[y_test[0]])

# %% [markdown]
# ## What this does not show
#
# One draw of one data set, embedded by one network that was not trained on it. On other data RMD gains more, less or nothing (page
# "Choose a detector"). And a high AUROC is not yet a decision: that takes a threshold, and data to set it.
