"""The user's own texts: CSV or JSONL files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import DataFormatError
from .own import OOD, TRAIN, OwnData, Rows, find_path, rows_by_split, split_files, split_name
from .readers.records import ENDINGS, read_records
from .sources import Texts


@dataclass(kw_only=True, eq=False, repr=False)
class TextFile(OwnData):
    r"""Texts that the user brings; items are strings, and the backbone's tokenizer makes tensors of them.

    ``path`` is a ``.csv`` file with a line of column names, or a ``.jsonl`` file with an object on each line; both in
    UTF-8. It is one of

    1. one file, in which a column may name the split of each row (train, val, test, ood or ood:NAME); else the ID rows
       are split by seed, and rows of a label < 0 are the OOD set ``ood``;
    2. a folder with a file for each split: ``train.csv``, if there are any ``val.csv``, ``test.csv``, ``ood/NAME.csv``.

    Args:
        text: column or key of the text.
        label: column or key of the class, a text or a whole number; OOD rows need none.
        split: column or key of the split.

    The other options are those of :class:`~rmd_plugin.benchmarks.own.OwnData` and
    :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from rmd_plugin.benchmarks import TextFile
        >>> path = Path(tempfile.mkdtemp(), "tickets.csv")
        >>> lines = ["no light,power,train", "page is slow,network,train", "a joke,,ood:fun"] * 10
        >>> _ = path.write_text("\n".join(["text,label,split", *lines]))
        >>> benchmark = TextFile(path=path)
        >>> benchmark, benchmark.class_names
        (TextFile(train=14, val=2, test=4, fun=10), ['network', 'power'])
    """

    name = "text_file"

    text: str = "text"
    label: str = "label"
    split: str | None = "split"

    def read(self) -> Mapping[str, Rows]:
        """Read all texts."""
        self.path = path = find_path(self.path, self.data_dir, "file or folder of texts", ".csv or .jsonl")
        if path.is_dir():
            files = split_files(path, ENDINGS)
            if TRAIN not in files:
                raise DataFormatError(path, "has no train.csv or train.jsonl; there may be test, val and ood/NAME too")
            return {key: self._one_split(file, key) for key, file in files.items()}
        texts, labels, splits, lines = self._columns(path, None)
        source, classes = Texts(texts), np.array(labels, dtype=object)
        return {
            key: Rows(source, classes[places], path, places)
            for key, places in rows_by_split(splits, path, lines).items()
        }

    def _one_split(self, file: Path, key: str) -> Rows:
        texts, labels, _, _ = self._columns(file, key)
        return Rows(Texts(texts), np.array(labels, dtype=object), file)

    def _columns(self, file: Path, key: str | None) -> tuple[list[str], list[str], list[str], list[int]]:
        """Texts, labels, splits and lines of a file, which may be of one split."""
        texts, labels, splits, lines = [], [], [], []
        wanted = [self.label, self.split] if key is None and self.split else [self.label]
        for line, (text, label, *split) in read_records(file, [self.text], wanted):
            if not isinstance(text, str) or not text.strip():
                raise DataFormatError(file, f"line {line}: {self.text!r} is {_shown(text)}; a text is expected")
            word = key if key is not None else TRAIN if not split or split[0] is None else split[0]
            if self.split not in (None, "split") and key is None and split[0] is None:
                raise DataFormatError(file, f"line {line}: there is no {self.split!r} for the split")
            is_ood = (split_name(str(word)) or "").startswith(OOD)
            if not is_ood and (label in (None, "") or isinstance(label, bool) or not isinstance(label, str | int)):
                raise DataFormatError(
                    file, f"line {line}: {self.label!r} is {_shown(label)}; a text or a whole number is expected"
                )
            texts.append(text)
            labels.append(str(label))
            splits.append(str(word))
            lines.append(line)
        if not texts:
            raise DataFormatError(file, "has no rows")
        return texts, labels, splits, lines


def _shown(value: object) -> str:
    return "missing" if value is None else "empty" if value == "" else repr(value)[:60]
