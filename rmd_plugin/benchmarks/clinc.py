"""CLINC150: user queries of 150 intents, out-of-scope queries as near-OOD."""

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pytorch_ood.api import BenchmarkInfo, Paper, Task

from .base import OOD_LABEL, Modality, OODBenchmark, OODPool, Pool, Split, Transform
from .download import Remote, fetch
from .errors import DataFormatError, DataNotFoundError
from .files import read_json, resolve_data_dir
from .sources import Texts

Variant = Literal["full", "small", "imbalanced", "oos_plus"]

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


class CLINC150(OODBenchmark):
    """Intent classification with out-of-scope queries (Larson et al., 2019).

    Raw items are strings. To run the framework's ``evaluate`` or any default ``DataLoader``, give transforms that
    turn a string into a tensor of fixed size, as the text backbones do. Labels follow the sorted intent names, so
    they are the same for all variants. The splits are the published ones as they are: a handful of queries occur
    in two of them.

    Reads ``clinc150/data_VARIANT.json`` in the data folder.

    Args:
        data_dir: folder that holds ``clinc150``; None reads ``RMD_DATA_DIR``.
        train_transform: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        test_transform: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        limit_train: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        limit_test: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        seed: seed of the subsets that the limits draw.
        variant: ``full`` (100 training queries per intent), ``small`` (50), ``imbalanced`` (25 to 100) or
            ``oos_plus`` (250 out-of-scope training queries).
        download: fetch the file if it is absent; its sha256 is checked.

    Attributes:
        oos_train: the published out-of-scope training queries, label -1. Never part of a fit here.
        oos_val: the published out-of-scope validation queries, label -1. Never part of a fit here.
    """

    name = "clinc150"
    modality: ClassVar[Modality] = "text"
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

    def __init__(
        self,
        *,
        data_dir: str | Path | None = None,
        train_transform: Transform | None = None,
        test_transform: Transform | None = None,
        limit_train: int | None = None,
        limit_test: int | None = None,
        seed: int = 0,
        variant: Variant = "full",
        download: bool = False,
    ) -> None:
        super().__init__(
            data_dir=data_dir,
            train_transform=train_transform,
            test_transform=test_transform,
            limit_train=limit_train,
            limit_test=limit_test,
            seed=seed,
        )
        if variant not in _SHA256:
            raise ValueError(f"variant must be one of {', '.join(_SHA256)}; got {variant!r}")
        self.variant = variant
        path = resolve_data_dir(data_dir, f"{_FOLDER}/data_{variant}.json") / _FOLDER / f"data_{variant}.json"
        if not path.is_file():
            if not download:
                raise DataNotFoundError(
                    f"CLINC150 ({variant}) is not there: looked for {path}. Set download=True "
                    f"(benchmark.download=true on the command line) to fetch it from {_URL}, "
                    f"or put data_{variant}.json of github.com/clinc/oos-eval there."
                )
            fetch(Remote(f"{_URL}/{path.name}", _SHA256[variant], size=1 << 24), path)
        parts = read_clinc(path)

        intents = sorted({intent for _, intent in parts["train"]})
        label_of = {intent: label for label, intent in enumerate(intents)}
        pools = {}
        for split, pairs in parts.items():
            unknown = {intent for _, intent in pairs} - {*intents, _OOS}
            if unknown:
                raise DataFormatError(
                    path, f"split {split!r} has intents that are not in 'train': {sorted(unknown)[:5]}"
                )
            labels = np.array([label_of.get(intent, OOD_LABEL) for _, intent in pairs], dtype=np.int64)
            pools[split] = Pool(Texts([text for text, _ in pairs]), labels)
        self.oos_train, self.oos_val = (
            Split(pools[split].source, pools[split].labels, None, self.test_transform)
            for split in ("oos_train", "oos_val")
        )
        self._assemble(
            class_names=intents,
            train=pools["train"],
            val=pools["val"],
            test=pools["test"],
            oods=[OODPool("oos_test", "near", pools["oos_test"])],
        )


def read_clinc(path: str | Path) -> dict[str, list[tuple[str, str]]]:
    """The six splits of a CLINC150 file as lists of (query, intent).

    Raises:
        DataFormatError: the file is not JSON of that form.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not set(_SPLITS) <= set(content):
        have = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise DataFormatError(path, f"must be an object with the splits {', '.join(_SPLITS)}; it is {have}")
    parts: dict[str, list[tuple[str, str]]] = {}
    for split in _SPLITS:
        pairs = content[split]
        if not isinstance(pairs, list) or not pairs:
            raise DataFormatError(path, f"split {split!r} must be a non-empty list of [query, intent]")
        for row, pair in enumerate(pairs):
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(word, str) for word in pair)):
                raise DataFormatError(
                    path, f"split {split!r}, row {row}: expected [query, intent], got {str(pair)[:80]}"
                )
            if split.startswith(_OOS) != (pair[1] == _OOS):
                raise DataFormatError(path, f"split {split!r}, row {row}: intent {pair[1]!r} does not belong there")
        parts[split] = [(text, intent) for text, intent in pairs]
    return parts
