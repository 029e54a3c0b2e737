"""Makes the packaged embeddings of ``benchmark=intents`` from CLINC150 and MiniLM: ``python tests/make_intents.py``.

Needs the extra ``text`` and RMD_DATA_DIR. tests/benchmarks/test_intents.py holds the packaged file against it.
"""

from pathlib import Path

import numpy as np
import torch

import rmd_plugin
from rmd_plugin.backbones import BERT
from rmd_plugin.benchmarks import CLINC150

FILE = Path(rmd_plugin.__file__).parent / "benchmarks" / "data" / "intents.npz"
PER_INTENT = {"train": 20, "val": 5, "test": 10}
OUT_OF_SCOPE = 500


def chosen(clinc):
    """Queries and labels of each part: so many of each intent, drawn at random."""
    generator = np.random.default_rng(0)
    splits = {"train": clinc.fit_set(), "val": clinc.val_set(), "test": clinc.test_in}
    parts = {}
    for name, split in splits.items():
        labels = np.asarray(split.labels)
        of_intents = [np.flatnonzero(labels == label) for label in range(clinc.num_classes)]
        places = np.concatenate([generator.permutation(rows)[: PER_INTENT[name]] for rows in of_intents])
        parts[name] = [split[place][0] for place in places], labels[places]
    outside = clinc.test_oods[0]
    places = generator.permutation(len(outside))[:OUT_OF_SCOPE]
    parts["out_of_scope"] = [outside[place][0] for place in places], np.full(OUT_OF_SCOPE, -1)
    return parts


def embeddings(queries):
    backbone = BERT().eval()
    tokens = torch.stack([backbone.test_transform(query) for query in queries])
    with torch.no_grad():
        return torch.cat([backbone.encoder(batch) for batch in tokens.split(256)]).numpy()


def main():
    clinc = CLINC150()
    parts = {name: (embeddings(queries), labels) for name, (queries, labels) in chosen(clinc).items()}
    step = np.float32(max(np.abs(rows).max() for rows, _ in parts.values()) / 127)
    arrays = {name: np.round(rows / step).astype(np.int8) for name, (rows, _) in parts.items()}
    labels = {f"{name}_labels": parts[name][1].astype(np.uint8) for name in PER_INTENT}
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **arrays, **labels, step=step, names=np.array(clinc.class_names))


if __name__ == "__main__":
    main()
