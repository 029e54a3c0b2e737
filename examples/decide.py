"""From a checkpoint to yes or no: the detectors that OODMonitor saved are calibrated on the ID validation data.

python examples/decide.py
"""

from pathlib import Path
from tempfile import mkdtemp

from lightning_script import Digits, trainer, val, x, y  # trains with the monitor

from rmd_plugin import OODMonitor

path = Path(mkdtemp(), "digits.ckpt")
trainer.save_checkpoint(path)

model = Digits.load_from_checkpoint(path)
rmd = OODMonitor.load_detectors(path, model)["rmd"]

inlier, outlier = val.dataset.tensors[0], x[y >= 6]
print(f"OOD above a score of {rmd.threshold():.1f} at alpha = {rmd.alpha:g}")
# of the inliers that is no surprise: they are the ones that it was calibrated on
print(f"flagged: {rmd.is_ood(inlier).float().mean():.1%} of 0-5, {rmd.is_ood(outlier).float().mean():.1%} of 6-9")
print(f"at 1 %: {rmd.is_ood(outlier, alpha=0.01).float().mean():.1%} of 6-9")
print(f"p-values of a 0-5 and an 8: {float(rmd.p_value(inlier[:1])):.3f}, {float(rmd.p_value(x[y == 8][:1])):.3f}")
print(f"selected at a false discovery rate of 10 %: {int(rmd.select(outlier, fdr=0.1).sum())} of {len(outlier)}")
