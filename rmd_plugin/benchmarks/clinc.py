"""CLINC150: user queries of 150 intents, out-of-scope queries as near-OOD."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from pytorch_ood.api import BenchmarkInfo, Paper, Task

from .base import OOD_LABEL, OODBenchmark
from .errors import DataFormatError, DataNotFoundError
from .readers.downloads import fetch, resolve_data_dir
from .readers.text import read_json
from .sources import Texts
from .splits import OODSet, Parts, Split

_FOLDER = "clinc150"
_SPLITS = ("train", "val", "test", "oos_train", "oos_val", "oos_test")
_OOS = "oos"
_URL = "https://raw.githubusercontent.com/clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/data"
_SHA256 = {
    "full": "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
    "small": "050e17476e6b4fa88f8518edaf09921c8f5e3a86dc8b63615361102a20b2ac01",
    "imbalanced": "4886730b20c51eece26aa392ecae2717bfe9908680419e96255351c6148eb4cc",
    "oos_plus": "bfcca9ae515623541dc1983c94c4ed7cae9d26b42ae47d74b972e51bb6f7a21f",
}


@dataclass(kw_only=True, eq=False, repr=False)
class CLINC150(OODBenchmark):
    """Intent classification with out-of-scope queries (Larson et al., 2019).

    Raw items are strings. To run the framework's ``evaluate`` or any default ``DataLoader``, give transforms that
    turn a string into a tensor of fixed size, as the text backbones do. Labels follow the sorted intent names, so
    they are the same for all variants. The splits are the published ones as they are: a handful of queries occur
    in two of them. Reads ``clinc150/data_VARIANT.json`` in the data folder.

    Args:
        variant: ``full`` (100 training queries per intent), ``small`` (50), ``imbalanced`` (25 to 100) or
            ``oos_plus`` (250 out-of-scope training queries).
        download: fetch the file if it is absent; its sha256 is checked.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from rmd_plugin.benchmarks import CLINC150
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "clinc150").mkdir()
        >>> known = [["what is my balance", "balance"], ["wire 5 euros to ann", "transfer"]]
        >>> queries = {part: known for part in ("train", "val", "test")}
        >>> queries |= {f"oos_{part}": [["how tall is a giraffe", "oos"]] for part in queries}
        >>> _ = (folder / "clinc150" / "data_full.json").write_text(json.dumps(queries))
        >>> benchmark = CLINC150(data_dir=folder)
        >>> benchmark, benchmark.class_names
        (CLINC150(train=2, val=2, test=2, oos_test=1), ['balance', 'transfer'])

    Attributes:
        oos_train: the published out-of-scope training queries, label -1. Never part of a fit here.
        oos_val: the published out-of-scope validation queries, label -1. Never part of a fit here.
    """

    name = "clinc150"
    info = BenchmarkInfo(
        paper=Paper(
            title="An Evaluation Dataset for Intent Classification and Out-of-Scope Prediction",
            venue="EMNLP",
            year=2019,
            url="https://aclanthology.org/D19-1131",
            code="https://github.com/clinc/oos-eval",
        ),
        tasks=frozenset({Task.CLASSIFICATION}),
    )

    variant: Literal["full", "small", "imbalanced", "oos_plus"] = "full"
    download: bool = False
    oos_train: Split = field(init=False)
    oos_val: Split = field(init=False)

    def load(self) -> Parts:
        """Read the file of the variant, downloaded first if that is asked for."""
        if self.variant not in _SHA256:
            raise ValueError(f"variant must be one of {', '.join(_SHA256)}; got {self.variant!r}")
        file = f"data_{self.variant}.json"
        path = resolve_data_dir(self.data_dir, f"{_FOLDER}/{file}") / _FOLDER / file
        if not path.is_file():
            if not self.download:
                raise DataNotFoundError(
                    f"CLINC150 ({self.variant}) is not there: looked for {path}. Set download=True "
                    f"(benchmark.download=true on the command line) to fetch it from {_URL}, "
                    f"or put {file} of github.com/clinc/oos-eval there."
                )
            fetch(f"{_URL}/{file}", _SHA256[self.variant], path)
        queries = read_clinc(path)
        intents = sorted({intent for _, intent in queries["train"]})
        label_of = {_OOS: OOD_LABEL, **{intent: label for label, intent in enumerate(intents)}}
        splits = {}
        for split, pairs in queries.items():
            new = {intent for _, intent in pairs} - set(label_of)
            if new:
                raise DataFormatError(path, f"split {split!r} has intents that are not in 'train': {sorted(new)[:5]}")
            labels = np.array([label_of[intent] for _, intent in pairs])
            splits[split] = Split(Texts([text for text, _ in pairs]), labels, transform=self.test_transform)
        self.oos_train, self.oos_val = splits["oos_train"], splits["oos_val"]
        oods = [OODSet("oos_test", "near", splits["oos_test"])]
        return Parts(intents, splits["train"], splits["test"], oods, val=splits["val"])


def read_clinc(path: str | Path) -> dict[str, list[tuple[str, str]]]:
    """The six splits of a CLINC150 file as lists of (query, intent)."""
    content = read_json(path)
    if not isinstance(content, dict) or not set(_SPLITS) <= set(content):
        have = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise DataFormatError(path, f"must be an object with the splits {', '.join(_SPLITS)}; it is {have}")
    for split in _SPLITS:
        if not isinstance(content[split], list) or not content[split]:
            raise DataFormatError(path, f"split {split!r} must be a non-empty list of [query, intent]")
        for row, pair in enumerate(content[split]):
            place = f"split {split!r}, row {row}"
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(word, str) for word in pair)):
                raise DataFormatError(path, f"{place}: expected [query, intent], got {str(pair)[:80]}")
            if split.startswith(_OOS) != (pair[1] == _OOS):
                raise DataFormatError(path, f"{place}: intent {pair[1]!r} does not belong there")
    return {split: [(text, intent) for text, intent in content[split]] for split in _SPLITS}
