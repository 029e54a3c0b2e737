# %% [markdown]
# # Own images
#
# From folders of images to a guard that decides about new ones. Here the images are drawn; put yours into
# `photos/train/CLASS/*.png`. The same on the command line: `rmd-train`, `rmd-fit`, `rmd-score`.

# %%
import os
import subprocess
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw


def paint(shape: str, seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    picture = Image.fromarray(rng.integers(0, 90, (32, 32, 3), dtype=np.uint8))
    draw, size = ImageDraw.Draw(picture), int(rng.integers(7, 11))
    x, y = rng.integers(11, 21, 2)
    box, fill = [x - size, y - size, x + size, y + size], tuple(int(value) for value in rng.integers(140, 255, 3))
    if shape == "disc":
        draw.ellipse(box, fill=fill)
    elif shape == "square":
        draw.rectangle(box, fill=fill)
    elif shape == "triangle":
        draw.polygon([(x, y - size), (x - size, y + size), (x + size, y + size)], fill=fill)
    else:  # a cross: not in the training data
        draw.line([(x - size, y - size), (x + size, y + size)], fill=fill, width=4)
        draw.line([(x - size, y + size), (x + size, y - size)], fill=fill, width=4)
    return picture


for root, shapes, count in (
    ("photos/train", ("disc", "square", "triangle"), 100),
    ("photos_new", ("disc", "cross"), 20),
):
    for number, shape in enumerate(shapes):
        folder = Path(root, shape) if "train" in root else Path(root)
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            paint(shape, 1000 * number + index + (7777 if root == "photos_new" else 0)).save(
                folder / f"{shape}_{index:03}.png"
            )

# %%
data = "benchmark=image_folder benchmark.path=photos backbone=small_cnn"
for command in (
    f"rmd-train {data} trainer.max_epochs=8 hydra.run.dir=run detector=[fused] figures=false",
    f"rmd-fit {data} checkpoint=run/checkpoints/best.ckpt detector=fused out=guard onnx=false",
):
    subprocess.run(command.split(), check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
print(*sorted(path.name for path in Path("guard").iterdir()))

# %% [markdown]
# The guard takes paths, images or arrays, and returns a verdict:

# %%
import rmd_plugin

guard = rmd_plugin.Guard.load("guard")
paths = sorted(Path("photos_new").iterdir())
verdicts = {path: guard(path) for path in paths}
for shape in ("disc", "cross"):
    flags = [bool(verdict.is_ood) for path, verdict in verdicts.items() if path.name.startswith(shape)]
    print(f"{shape}: {sum(flags)} of {len(flags)} flagged")

# %%
ranked = sorted(paths, key=lambda path: float(verdicts[path].score))
figure = Figure(figsize=(9, 2.6), layout="constrained")
for axes, path in zip(figure.subplots(1, 8), [*ranked[:4], *ranked[-4:]]):
    axes.imshow(Image.open(path))
    axes.set(xticks=[], yticks=[], title=f"{float(verdicts[path].score):.1f}")
# alt: The four most ordinary of the new pictures and the four most unknown, each with its score
figure.savefig("pictures.png", dpi=120)

# %% [markdown]
# ## What this does not show
#
# Shapes on noise are a toy example, and the network was trained on them in seconds. For photographs use a pre-trained network
# (`backbone=timm backbone.name=resnet18`) and some hundred images per class, and look at the report of `rmd-score` before you
# trust a number.
