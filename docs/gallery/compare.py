# %% [markdown]
# # Compare detectors
#
# Which detector is best on these features? One command fits nine common detectors on the same features and writes a report. The data
# here are sentence embeddings that come with the package; for your own: `benchmark=embeddings benchmark.path=table.parquet`.

# %%
import subprocess
from pathlib import Path

command = "rmd-compare benchmark=intents detector=common hydra.run.dir=run figures=false"
subprocess.run(command.split(), check=True, capture_output=True)
print(*sorted(path.name for path in Path("run").iterdir() if path.suffix in (".html", ".csv", ".md", ".tex")))

# %% [markdown]
# `report.html` is for reading; `rows.csv` has one number per line:

# %%
import pandas as pd

rows = pd.read_csv("run/rows.csv")
table = rows[rows["metric"].isin(["AUROC", "FPR95TPR"]) & (rows["ood"] == "out_of_scope")]
table = table.pivot_table(index="detector", columns="metric", values="value").mul(100).round(1)
print(table.sort_values("AUROC", ascending=False).to_string())

# %% [markdown]
# Every detector is saved, fitted and calibrated, and ready to be used on new features:

# %%
from torch.utils.data import DataLoader

from rmd_plugin import Calibrated
from rmd_plugin.benchmarks import Intents

benchmark = Intents()
detector = Calibrated.load("run/detectors/fused.safetensors")
for name, split in (("known", benchmark.test_in), ("unknown", benchmark.test_oods[0])):
    z, _ = next(iter(DataLoader(split, batch_size=5000)))
    print(f"{float(detector.is_ood_features(z).float().mean()):.0%} of the {name} requests are flagged")

# %%
from matplotlib.figure import Figure

ordered = table.sort_values("AUROC")
figure = Figure(figsize=(7, 3.4), layout="constrained")
axes = figure.subplots()
colours = ["#0072B2" if name in ("fused", "rmd") else "#9FB8C8" for name in ordered.index]
axes.barh(ordered.index, ordered["AUROC"], color=colours)
axes.set(xlabel="AUROC (%)", xlim=(30, 100))
# alt: Bars of the AUROC of nine detectors on requests of unknown kinds, FusedRMD and RMD highlighted
figure.savefig("auroc.png", dpi=120)

# %% [markdown]
# ## What this does not show
#
# One data set and one draw of it: run several seeds before you call one detector better, and look at the intervals in the report. The
# best detector here was chosen by the OOD data at hand; unknown inputs of another kind may be ordered differently.
