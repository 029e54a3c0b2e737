# %% [markdown]
# # Update and forget
#
# A Gaussian detector needs only sums of its data, so data can be added and removed after the fit: with the result of a new fit, in
# a fraction of its time, and without the old data.

# %%
import time

import torch

from rmd_plugin import RMD

torch.manual_seed(0)
means = 3 * torch.randn(11, 64, dtype=torch.float64)
y = torch.arange(200_000) % 10
z = means[y] + torch.randn(200_000, 64, dtype=torch.float64)
test = means[torch.arange(500) % 10] + torch.randn(500, 64, dtype=torch.float64)

detector = RMD(keep_moments=True).fit_features(z[:-1000], y[:-1000])
started = time.perf_counter()
detector.update(z[-1000:], y[-1000:])
updated = time.perf_counter() - started
started = time.perf_counter()
new_fit = RMD().fit_features(z, y)
refitted = time.perf_counter() - started
difference = (detector.predict_features(test) - new_fit.predict_features(test)).abs().max()
print(f"update and new fit differ by {difference:.1e} at most; the update took {updated / refitted:.2f} of the time")

# %% [markdown]
# Forget data: the detector is then the same as if it had never been fitted on them.

# %%
detector.forget(z[:500], y[:500])
without = RMD().fit_features(z[500:], y[500:])
print(
    f"differs from a fit without them by {(detector.predict_features(test) - without.predict_features(test)).abs().max():.1e}"
)

# %% [markdown]
# Add a class that was OOD before:

# %%
new = means[10] + torch.randn(300, 64, dtype=torch.float64)
before = detector.predict_features(new).mean()
label = detector.add_class(new[:200], "eleven")
print(
    f"class {label}; its other samples scored {before:.0f} before and {detector.predict_features(new[200:]).mean():.0f} now"
)

# %% [markdown]
# ## What this does not show
#
# The network stays as it is: features of a class that it never learned may not be worth a class of their own. What the moments
# forget, the network's weights may still know. And thresholds belong to a fit: a `Calibrated` detector has to be calibrated again.
