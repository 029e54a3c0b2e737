"""Requests to an assistant as packaged embeddings: real text features, no download, no extra, seconds on a laptop."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rmd_plugin.npz import read_npz

from .base import OOD_LABEL, OODBenchmark
from .clinc import CLINC150
from .sources import TensorRows
from .splits import OODSet, Parts, Split

_FILE = Path(__file__).parent / "data" / "intents.npz"


@dataclass(kw_only=True, eq=False, repr=False)
class Intents(OODBenchmark):
    """A part of CLINC150, each query as a sentence embedding: 150 intents, out-of-scope queries near-OOD.

    Of each intent 20 training, 5 validation and 10 test queries, and 500 out-of-scope test queries, drawn at random
    from the published splits (Larson et al., 2019, CC BY 3.0). Raw items are float tensors of shape (384,): the mean
    token of MiniLM (all-MiniLM-L6-v2), rounded to 8 bits. The data comes with the package, ``data_dir`` is ignored.
    All queries, as texts: :class:`~rmd_plugin.benchmarks.CLINC150`.

    The options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> from rmd_plugin.benchmarks import Intents
        >>> benchmark = Intents()
        >>> benchmark
        Intents(train=3000, val=750, test=1500, out_of_scope=500)
        >>> benchmark.class_names[:2]
        ['accept_reservations', 'account_blocked']
    """

    name = "intents"
    info = CLINC150.info

    def load(self) -> Parts:
        """Read the packaged file."""
        arrays = read_npz(_FILE)

        def part(split: str, labels: np.ndarray) -> Split:
            return Split(TensorRows(arrays[split] * arrays["step"]), labels)

        train, val, test = (
            part(split, arrays[f"{split}_labels"].astype(np.int64)) for split in ("train", "val", "test")
        )
        outside = part("out_of_scope", np.full(len(arrays["out_of_scope"]), OOD_LABEL))
        return Parts(arrays["names"].tolist(), train, test, [OODSet("out_of_scope", "near", outside)], val=val)
