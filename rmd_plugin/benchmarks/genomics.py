"""Bacteria genomics: 250-base reads of 10 ID genera, reads of other genera as OOD."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pytorch_ood.api import BenchmarkInfo, Paper, Task
from torch import Tensor
from tqdm import tqdm

from .base import OODBenchmark
from .errors import DataFormatError, DataNotFoundError
from .readers.downloads import fetch, resolve_data_dir, unzip
from .readers.fasta import BASES, OTHER, READ_LENGTH, encode_bases
from .readers.genomes import GenomeFolder
from .readers.text import read_json, read_table
from .readers.tfrecord import read_examples
from .sources import Reads
from .splits import Distance, OODSet, Parts, Split, Transform

_FOLDERS = {"published": "genomics_ood", "genomes": "genomes"}
_TRAIN, _VAL, _TEST = "before_2011_in_tr", "between_2011-2016_in_val", "after_2016_in_test"
_OOD_VAL, _OOD_TEST = "between_2011-2016_ood_val", "after_2016_ood_test"
_NUM_ID = 10
_COLUMNS = ["seq", "label", "seq_info", "domain"]
_URL = "https://storage.googleapis.com/tfds-data/downloads/genomics_ood/genomics_ood.zip"
_SHA256 = "4260cfaf5c919b55bb6d0e78d1a498990b7b7331f7daa6ac7e0af9dfb415e004"


def one_hot(read: Tensor) -> Tensor:
    """Base ids (L,) as floats (4, L); a base that is none of A, C, G, T is a column of zeros."""
    return (read[None] == torch.arange(len(BASES))[:, None]).float()


@dataclass(kw_only=True, eq=False, repr=False)
class Genomics(OODBenchmark):
    r"""Genus classification of short DNA reads with unseen genera as OOD (Ren et al., 2019).

    Raw items are int64 tensors of shape (250,) of base ids: A, C, G, T = 0..3, anything else 4.

    ``source="published"`` reads the benchmark's own files in ``genomics_ood``: for each split a folder of TFRecord
    files (with ``label_dict.json``; needs the extra ``genomics``) or the text table ``SPLIT.txt``. With the complete
    data, validation is 2011-2016 and the test is after 2016, in-distribution and OOD. With the published sample, which
    ends in 2016, the 2011-2016 reads are the test and validation reads are held out from the training reads.

    ``source="genomes"`` cuts reads from a folder of FASTA genomes with ``classes.tsv`` (columns file, genus, role,
    kingdom); how train and test are kept apart is told in :mod:`rmd_plugin.benchmarks.readers.genomes`. OOD genera of
    a kingdom that occurs in-distribution are near-OOD, those of another kingdom far-OOD.

    Args:
        source: ``published`` or ``genomes``.
        folder: the folder itself, if it is not ``genomics_ood`` or ``genomes``; relative to ``data_dir``.
        encoding: default transform: ``one_hot`` gives floats of shape (4, 250), ``tokens`` the base ids.
        val_fraction: share of training reads held out for the published sample, or of blocks of a genome.
        n_train: reads per genus cut for training (``genomes`` only).
        n_val: reads per genus cut for validation (``genomes`` only).
        n_test: reads per genus cut for testing, also per OOD genus (``genomes`` only).
        download: fetch the complete published data (253 MB, sha256 checked) if it is absent.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> import random, tempfile
        >>> from pathlib import Path
        >>> from rmd_plugin.benchmarks import Genomics
        >>> folder, rows = Path(tempfile.mkdtemp()), ["file\tgenus\trole\tkingdom"]
        >>> (folder / "genomes").mkdir()
        >>> for genus, role in (("vibrio", "id"), ("listeria", "id"), ("neisseria", "ood")):
        ...     bases = "".join(random.Random(genus).choices("ACGT", k=60_000))
        ...     _ = (folder / "genomes" / f"{genus}.fna").write_text(f">{genus}\n{bases}\n")
        ...     rows.append(f"{genus}.fna\t{genus}\t{role}\tbacteria")
        >>> _ = (folder / "genomes" / "classes.tsv").write_text("\n".join(rows) + "\n")
        >>> Genomics(source="genomes", data_dir=folder, n_train=20, n_val=5, n_test=5)
        Genomics(train=40, val=10, test=10, ood_bacteria=5)
    """

    name = "genomics"
    info = BenchmarkInfo(
        paper=Paper(
            title="Likelihood Ratios for Out-of-Distribution Detection",
            venue="NeurIPS",
            year=2019,
            url="https://arxiv.org/abs/1906.02845",
            code="https://github.com/google-research/google-research/tree/master/genomics_ood",
        ),
        tasks=frozenset({Task.CLASSIFICATION}),
    )

    source: Literal["published", "genomes"] = "published"
    folder: str | Path | None = None
    encoding: Literal["one_hot", "tokens"] = "one_hot"
    val_fraction: float = 0.1
    n_train: int = 10_000
    n_val: int = 1_000
    n_test: int = 1_000
    download: bool = False

    def load(self) -> Parts:
        """Read the published files, or cut reads from genomes."""
        if self.source not in _FOLDERS:
            raise ValueError(f"source must be published or genomes, got {self.source!r}")
        folder = Path(_FOLDERS[self.source] if self.folder is None else self.folder).expanduser()
        # an absolute folder needs no data_dir
        if not folder.is_absolute():
            folder = resolve_data_dir(self.data_dir, str(folder)) / folder
        return self._load_published(folder) if self.source == "published" else self._cut_genomes(folder)

    def default_transform(self) -> Transform | None:
        """The encoding asked for."""
        if self.encoding not in ("one_hot", "tokens"):
            raise ValueError(f"encoding must be one_hot or tokens, got {self.encoding!r}")
        return one_hot if self.encoding == "one_hot" else None

    def _load_published(self, folder: Path) -> Parts:
        if not _present(folder, _TRAIN):
            if not self.download:
                raise DataNotFoundError(
                    f"the Genomics OOD benchmark is not there: looked for {folder / _TRAIN}/*.tfrecord and "
                    f"{folder / _TRAIN}.txt. Set download=True (benchmark.download=true on the command line) to "
                    f"fetch {_URL}, or source='genomes' (benchmark.source=genomes) for a folder of FASTA genomes."
                )
            unzip(fetch(_URL, _SHA256, folder.parent / "genomics_ood.zip"), folder)
        complete = _present(folder, _TEST) and _present(folder, _OOD_TEST)
        wanted = [_VAL, _TEST, _OOD_TEST] if complete else [_VAL, _OOD_VAL]
        absent = [split for split in wanted if not _present(folder, split)]
        if absent:
            raise DataNotFoundError(
                f"the Genomics OOD benchmark is incomplete: {absent[0]} is missing in {folder}. "
                "Expected are the training split and the 2011-2016 splits, or all splits up to after 2016."
            )
        labels = _read_labels(folder)
        names = sorted((genus for genus, label in labels.items() if label < _NUM_ID), key=lambda genus: labels[genus])
        splits = {split: self._read(folder, split, labels) for split in [_TRAIN, *wanted]}
        ood = OODSet("ood_test" if complete else "ood_val", "near", splits[wanted[-1]])
        if complete:
            return Parts(names, splits[_TRAIN], splits[_TEST], [ood], val=splits[_VAL])
        return Parts(names, splits[_TRAIN], splits[_VAL], [ood], val_fraction=self.val_fraction)

    def _read(self, folder: Path, split: str, labels: dict[str, int]) -> Split:
        ood = split in (_OOD_VAL, _OOD_TEST)
        table = folder / f"{split}.txt"
        files = sorted((folder / split).glob("*.tfrecord*")) or [table]
        parts = []
        for file in tqdm(files, desc=split, unit="file", leave=False, disable=None):
            if file == table:
                reads, classes = read_table_reads(file, labels)
            else:
                reads, classes = read_tfrecord_reads(file)
            wrong = np.flatnonzero((classes >= _NUM_ID) != ood)
            if len(wrong):
                kind = "an OOD" if ood else "an in-distribution"
                raise DataFormatError(file, f"example {wrong[0]} has class {classes[wrong[0]]}, not {kind} one")
            parts.append((reads, classes))
        reads, classes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if len(reads) == 0:
            raise DataFormatError(files[0], "holds no reads")
        return Split(Reads(reads), classes)

    def _cut_genomes(self, folder: Path) -> Parts:
        if not (folder / "classes.tsv").is_file():
            raise DataNotFoundError(
                f"no genomes: looked for {folder / 'classes.tsv'}. Put FASTA files (.fna, .fa, also .gz) in that "
                "folder with a classes.tsv of the columns file, genus, role (id or ood), kingdom."
            )
        counts = {"train": self.n_train, "val": self.n_val, "test": self.n_test}
        if min(counts.values()) < 1:
            raise ValueError(f"n_train, n_val and n_test must be at least 1, got {counts}")
        genomes = GenomeFolder(folder, val_fraction=self.val_fraction, seed=self.seed)
        cuts = {role: Split(Reads(cut.reads), cut.genera) for role, cut in genomes.cut_id(counts).items()}
        kingdom = {genome.genus: genome.kingdom for genome in genomes.genomes}
        id_kingdoms = {kingdom[genus] for genus in genomes.genera("id")}
        oods = []
        for group in sorted({kingdom[genus] for genus in genomes.genera("ood")}):
            cut = genomes.cut_ood([genus for genus in genomes.genera("ood") if kingdom[genus] == group], self.n_test)
            distance: Distance = "near" if group in id_kingdoms else "far"
            oods.append(OODSet(f"ood_{group}", distance, Split(Reads(cut.reads), cut.genera)))
        oods.sort(key=lambda ood: ood.distance == "far")
        return Parts(genomes.genera("id"), cuts["train"], cuts["test"], oods, val=cuts["val"])


def _present(folder: Path, split: str) -> bool:
    return any((folder / split).glob("*.tfrecord*")) or (folder / f"{split}.txt").is_file()


def _read_labels(folder: Path) -> dict[str, int]:
    """Genus -> label of ``label_dict.json``; without it, the genera of the table of training reads in sorted order."""
    path = folder / "label_dict.json"
    if path.is_file():
        content = read_json(path, max_bytes=1 << 20)
        if not isinstance(content, dict) or not all(type(label) is int and label >= 0 for label in content.values()):
            raise DataFormatError(path, "must be an object of genus: label with labels >= 0")
        if not set(range(_NUM_ID)) <= set(content.values()) or len(set(content.values())) < len(content):
            raise DataFormatError(path, f"must give the labels 0..{_NUM_ID - 1} to one genus each")
        return content
    table = folder / f"{_TRAIN}.txt"
    if not table.is_file():
        raise DataNotFoundError(f"label_dict.json, which names the genera, is not there: looked for {path}.")
    genera = sorted({cells[1].decode("utf-8", "replace") for _, cells in read_table(table, _COLUMNS)})
    if len(genera) != _NUM_ID:
        raise DataFormatError(table, f"has {len(genera)} genera, {_NUM_ID} are expected")
    return {genus: label for label, genus in enumerate(genera)}


def read_tfrecord_reads(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads (N, L), uint8, and labels (N,) of a TFRecord file: feature ``x`` is digits and blanks, ``y`` a label."""
    width = 2 * READ_LENGTH - 1
    texts: list[bytes] = []
    labels: list[int] = []
    offsets: list[int] = []
    for offset, (x, y) in read_examples(path, ["x", "y"]):
        if len(x) != 1 or not isinstance(x[0], bytes) or len(x[0]) != width:
            raise DataFormatError(path, f"feature 'x' must be one string of {width} bytes", offset)
        if len(y) != 1 or not isinstance(y[0], int) or not 0 <= y[0] < 1 << 31:
            raise DataFormatError(path, f"feature 'y' must be one label >= 0, got {y!r:.80}", offset)
        texts.append(x[0])
        labels.append(y[0])
        offsets.append(offset)
    grid = np.frombuffer(b"".join(texts), dtype=np.uint8).reshape(len(texts), width)
    # unsigned: whatever is below '0' wraps around to a large number
    reads = grid[:, ::2] - np.uint8(ord("0"))
    bad = np.flatnonzero((reads > OTHER).any(axis=1) | (grid[:, 1::2] != ord(" ")).any(axis=1))
    if len(bad):
        raise DataFormatError(path, f"feature 'x' must be digits 0..{OTHER} separated by blanks", offsets[bad[0]])
    return reads, np.array(labels, dtype=np.int64)


def read_table_reads(path: Path, labels: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Reads (N, L), uint8, and labels (N,) of a text table; a genus without a label is OOD and gets one after those."""
    rows = list(read_table(path, _COLUMNS))
    for offset, cells in rows:
        if len(cells[0]) != READ_LENGTH:
            raise DataFormatError(path, f"a read of {len(cells[0])} letters, {READ_LENGTH} are expected", offset)
    reads = encode_bases(b"".join(cells[0] for _, cells in rows)).reshape(len(rows), READ_LENGTH)
    bad = np.flatnonzero((reads > OTHER).any(axis=1))
    if len(bad):
        raise DataFormatError(path, "a read with letters that are no bases", rows[bad[0]][0])
    genera = [cells[1].decode("utf-8", "replace") for _, cells in rows]
    first_free = max([_NUM_ID, *(label + 1 for label in labels.values())])
    extra = sorted(set(genera) - set(labels))
    label_of = {**labels, **{genus: first_free + number for number, genus in enumerate(extra)}}
    return reads, np.array([label_of[genus] for genus in genera], dtype=np.int64)
