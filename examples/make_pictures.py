"""Pictures to try the commands on: scikit-learn's handwritten digits as PNG files in folders.

python examples/make_pictures.py

photos/train and photos/test hold the digits 0-5, a folder for each; photos/ood/other the digits 6-9.
photos_new holds further ones of both, and a broken file, as new data do.
"""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def folder(label: int, number: int) -> str:
    """Where the number-th picture of a digit goes; the first twelve are the new ones."""
    if number < 12:
        return "photos_new"
    if label > 5:
        return "photos/ood/other"
    return f"photos/test/{NAMES[label]}" if number < 40 else f"photos/train/{NAMES[label]}"


if __name__ == "__main__":
    digits, counts = load_digits(), dict.fromkeys(range(10), 0)
    for place in np.random.default_rng(0).permutation(len(digits.target)):  # its first and last are of other writers
        pixels, label = digits.images[place], digits.target[place]
        picture = Image.fromarray(np.uint8(255 / 16 * pixels)).resize((32, 32), Image.Resampling.BICUBIC)
        path = Path(folder(label, counts[label]), f"{NAMES[label]}_{counts[label]:03}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
        counts[label] += 1
    Path("photos_new", "broken.png").write_bytes(b"not a picture")
    print(f"{sum(counts.values())} pictures in photos/ and photos_new/")
