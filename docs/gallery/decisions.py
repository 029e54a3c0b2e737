# %% [markdown]
# # Decisions with a guarantee
#
# A score ranks; a decision needs a threshold. `Calibrated` sets one with held-out ID data alone, so that at most a stated share
# of ID samples is flagged.

# %%
import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils.data import DataLoader

from rmd_plugin import RMD, Calibrated
from rmd_plugin.benchmarks import Intents

benchmark = Intents()  # embeddings of requests to an assistant: 150 known kinds, and others
splits = (benchmark.fit_set(), benchmark.val_set(), benchmark.test_in, benchmark.test_oods[0])
(z, y), (held_out, _), (known, _), (new, _) = (next(iter(DataLoader(split, batch_size=5000))) for split in splits)

detector = Calibrated(RMD(shrinkage="oas"), alpha=0.05)
detector.fit_features(z, y).calibrate_features(held_out)
flagged_known, flagged_new = detector.is_ood_features(known), detector.is_ood_features(new)
print(f"false alarms {100 * flagged_known.float().mean():.1f} % of {len(known)} known requests (asked for 5 %)")
print(f"detected {100 * flagged_new.float().mean():.1f} % of {len(new)} others")

# %% [markdown]
# The guarantee is about the average over draws of the calibration data. A hundred draws show the average, and how much single ones vary:

# %%
both, rates = torch.cat([held_out, known]), []
for seed in range(100):
    mixed = torch.from_numpy(np.random.default_rng(seed).permutation(len(both)))
    again = Calibrated(detector.detector, alpha=0.05).calibrate_features(both[mixed[:750]])
    rates.append(100 * float(again.is_ood_features(both[mixed[750:]]).float().mean()))
figure = Figure(figsize=(6.4, 3.2), layout="constrained")
axes = figure.subplots()
axes.hist(rates, bins=15, color="#0072B2", alpha=0.6)
axes.axvline(5, color="black", linestyle="--", label="asked for")
axes.axvline(float(np.mean(rates)), color="#D55E00", label="mean over 100 draws")
axes.set(xlabel="false alarms (%)", ylabel="draws")
axes.legend(frameon=False)
# alt: Histogram of the share of false alarms over 100 draws of the calibration data, centred at the five percent asked for
figure.savefig("alarms.png", dpi=120)

# %% [markdown]
# For a guarantee on this one threshold, with a stated probability, set `confidence`:

# %%
print(f"threshold {detector.threshold():.1f}, with 95 % confidence {detector.threshold(confidence=0.95):.1f}")
print("p-values of three others:", *(f"{value:.3f}" for value in detector.p_value_features(new[:3])))

# %% [markdown]
# ## What this does not show
#
# Nothing is guaranteed about OOD data: how many are detected can only be measured. And the guarantee holds only while the ID data do not
# change: with other users or other topics the 5 % may be exceeded.
