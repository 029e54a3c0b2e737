"""Bacteria genomics: 250-base reads of 10 known genera, reads of other genera as OOD."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pytorch_ood.api import BenchmarkInfo, Paper, Task
from torch import Tensor
from tqdm import tqdm

from .archives import extract
from .base import Distance, Modality, OODBenchmark, OODPool, Pool, Transform
from .download import Remote, fetch
from .errors import DataFormatError, DataNotFoundError
from .fasta import BASES, OTHER, encode_bases
from .files import read_json, resolve_data_dir
from .genomes import GenomeFolder
from .sources import Reads
from .tfrecord import read_examples

Encoding = Literal["one_hot", "tokens"]
GenomicsSource = Literal["published", "genomes"]

NUM_ID = 10
_FOLDERS = {"published": "genomics_ood", "genomes": "genomes"}
_TRAIN, _VAL, _TEST = "before_2011_in_tr", "between_2011-2016_in_val", "after_2016_in_test"
_OOD_VAL, _OOD_TEST = "between_2011-2016_ood_val", "after_2016_ood_test"
_COLUMNS = [b"seq", b"label", b"seq_info", b"domain"]
_ZIP = Remote(
    "https://storage.googleapis.com/tfds-data/downloads/genomics_ood/genomics_ood.zip",
    "4260cfaf5c919b55bb6d0e78d1a498990b7b7331f7daa6ac7e0af9dfb415e004",
    size=253_223_783,
)


def one_hot(read: Tensor) -> Tensor:
    """One-hot form of a read; a base that is none of A, C, G, T is a column of zeros.

    Args:
        read: base ids of shape (L,).

    Returns:
        Float tensor of shape (4, L).
    """
    return (read[None] == torch.arange(len(BASES))[:, None]).float()


def tokens(read: Tensor) -> Tensor:
    """The base ids themselves, shape (L,), int64: A, C, G, T = 0..3, other = 4."""
    return read


_ENCODINGS: dict[str, Callable[[Tensor], Tensor]] = {"one_hot": one_hot, "tokens": tokens}


class Genomics(OODBenchmark):
    """Genus classification of short DNA reads with unseen genera as OOD (Ren et al., 2019).

    Raw items are int64 tensors of shape (250,) of base ids: A, C, G, T = 0..3, anything else 4.

    ``source="published"`` reads the benchmark's own files in ``genomics_ood``: for each split a folder of TFRecord
    files (with ``label_dict.json``) or the text table ``SPLIT.txt``. With the complete data, validation is
    2011-2016 and the test is after 2016, in-distribution and OOD. With the published sample, which ends in 2016,
    the 2011-2016 reads are the test and validation reads are held out from the training reads.

    ``source="genomes"`` cuts reads from a folder of FASTA genomes with ``classes.tsv`` (columns file, genus, role,
    kingdom); how train and test are kept apart is told in :mod:`rmd_plugin.benchmarks.genomes`. OOD genera of a
    kingdom that occurs in-distribution are near-OOD, those of another kingdom far-OOD.

    Args:
        data_dir: folder that holds ``genomics_ood`` or ``genomes``; None reads ``RMD_DATA_DIR``.
        train_transform: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`; replaces ``encoding``.
        test_transform: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`; replaces ``encoding``.
        limit_train: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        limit_test: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        seed: seed of held-out reads, of the cuts and of the subsets.
        source: ``published`` or ``genomes``.
        folder: the folder itself, if it is not ``genomics_ood`` or ``genomes``; relative to ``data_dir``.
        encoding: default transform: ``one_hot`` gives floats of shape (4, 250), ``tokens`` the base ids.
        val_fraction: share of training reads held out for the published sample, or of blocks of a genome.
        n_train: reads per genus cut for training (``genomes`` only).
        n_val: reads per genus cut for validation (``genomes`` only).
        n_test: reads per genus cut for testing, also per OOD genus (``genomes`` only).
        download: fetch the complete published data (253 MB, sha256 checked) if it is absent.
    """

    name = "genomics"
    modality: ClassVar[Modality] = "genomics"
    read_length: ClassVar[int] = 250
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

    def __init__(
        self,
        *,
        data_dir: str | Path | None = None,
        train_transform: Transform | None = None,
        test_transform: Transform | None = None,
        limit_train: int | None = None,
        limit_test: int | None = None,
        seed: int = 0,
        source: GenomicsSource = "published",
        folder: str | Path | None = None,
        encoding: Encoding = "one_hot",
        val_fraction: float = 0.1,
        n_train: int = 10_000,
        n_val: int = 1_000,
        n_test: int = 1_000,
        download: bool = False,
    ) -> None:
        if encoding not in _ENCODINGS:
            raise ValueError(f"encoding must be one_hot or tokens, got {encoding!r}")
        if source not in _FOLDERS:
            raise ValueError(f"source must be published or genomes, got {source!r}")
        self.encoding = encoding
        super().__init__(
            data_dir=data_dir,
            train_transform=train_transform,
            test_transform=test_transform,
            limit_train=limit_train,
            limit_test=limit_test,
            seed=seed,
        )
        place = Path(_FOLDERS[source] if folder is None else folder).expanduser()
        # an absolute folder needs no data_dir
        self.folder = place if place.is_absolute() else resolve_data_dir(data_dir, str(place)) / place
        if source == "published":
            self._load_published(val_fraction, download)
        else:
            self._cut_genomes(val_fraction, {"train": n_train, "val": n_val, "test": n_test})

    def default_transform(self) -> Transform:
        """The encoding asked for."""
        return _ENCODINGS[self.encoding]

    def _load_published(self, val_fraction: float, download: bool) -> None:
        if not _present(self.folder, _TRAIN):
            if not download:
                raise DataNotFoundError(
                    f"the Genomics OOD benchmark is not there: looked for {self.folder / _TRAIN}/*.tfrecord and "
                    f"{self.folder / _TRAIN}.txt. Set download=True (benchmark.download=true on the command line) to "
                    f"fetch {_ZIP.url}, or source='genomes' (benchmark.source=genomes) for a folder of FASTA genomes."
                )
            archive = fetch(_ZIP, self.folder.parent / "genomics_ood.zip")
            extract(archive, self.folder)
        complete = _present(self.folder, _TEST) and _present(self.folder, _OOD_TEST)
        wanted = [_VAL, _TEST, _OOD_TEST] if complete else [_VAL, _OOD_VAL]
        absent = [split for split in wanted if not _present(self.folder, split)]
        if absent:
            raise DataNotFoundError(
                f"the Genomics OOD benchmark is incomplete: {absent[0]} is missing in {self.folder}. "
                "Expected are the training split and the 2011-2016 splits, or all splits up to after 2016."
            )
        labels = _read_label_dict(self.folder)
        names = sorted((genus for genus, label in labels.items() if label < NUM_ID), key=lambda genus: labels[genus])
        known = [_TRAIN, _VAL, _TEST] if complete else [_TRAIN, _VAL]
        pools = {split: self._read(split, labels, ood=split not in known) for split in [_TRAIN, *wanted]}
        ood = _OOD_TEST if complete else _OOD_VAL
        self._assemble(
            class_names=names,
            train=pools[_TRAIN],
            val=pools[_VAL] if complete else None,
            test=pools[_TEST if complete else _VAL],
            oods=[OODPool("ood_test" if complete else "ood_val", "near", pools[ood])],
            val_fraction=val_fraction,
        )

    def _read(self, split: str, labels: dict[str, int], *, ood: bool) -> Pool:
        files = sorted((self.folder / split).glob("*.tfrecord*"))
        table = self.folder / f"{split}.txt"
        parts = []
        for file in tqdm(files or [table], desc=split, unit="file", leave=False, disable=None):
            if file == table:
                reads, classes = read_table(file, labels, self.read_length)
            else:
                reads, classes = read_tfrecord_reads(file, self.read_length)
            wrong = np.flatnonzero((classes >= NUM_ID) != ood)
            if len(wrong):
                kind = "an OOD" if ood else "an in-distribution"
                raise DataFormatError(file, f"example {wrong[0]} has class {classes[wrong[0]]}, not {kind} one")
            parts.append((reads, classes))
        reads = np.concatenate([part[0] for part in parts])
        classes = np.concatenate([part[1] for part in parts])
        if len(reads) == 0:
            raise DataFormatError((files or [table])[0], "holds no reads")
        return Pool(Reads(reads), classes)

    def _cut_genomes(self, val_fraction: float, counts: dict[str, int]) -> None:
        if not (self.folder / "classes.tsv").is_file():
            raise DataNotFoundError(
                f"no genomes: looked for {self.folder / 'classes.tsv'}. Put FASTA files (.fna, .fa, also .gz) in that "
                "folder with a classes.tsv of the columns file, genus, role (id or ood), kingdom."
            )
        if min(counts.values()) < 1:
            raise ValueError(f"n_train, n_val and n_test must be at least 1, got {counts}")
        genomes = GenomeFolder(self.folder, read_length=self.read_length, val_fraction=val_fraction, seed=self.seed)
        cuts = genomes.cut_known(counts)
        kingdom = {genome.genus: genome.kingdom for genome in genomes.genomes}
        near = {kingdom[genus] for genus in genomes.genera("id")}
        oods = []
        groups = sorted(
            {kingdom[genus] for genus in genomes.genera("ood")}, key=lambda group: (group not in near, group)
        )
        for group in groups:
            genera = [genus for genus in genomes.genera("ood") if kingdom[genus] == group]
            cut = genomes.cut_ood(genera, counts["test"])
            distance: Distance = "near" if group in near else "far"
            oods.append(OODPool(f"ood_{group}", distance, Pool(Reads(cut.reads), cut.genera)))
        self._assemble(
            class_names=genomes.genera("id"),
            train=Pool(Reads(cuts["train"].reads), cuts["train"].genera),
            val=Pool(Reads(cuts["val"].reads), cuts["val"].genera),
            test=Pool(Reads(cuts["test"].reads), cuts["test"].genera),
            oods=oods,
        )


def _present(folder: Path, split: str) -> bool:
    return any((folder / split).glob("*.tfrecord*")) or (folder / f"{split}.txt").is_file()


def _read_label_dict(folder: Path) -> dict[str, int]:
    """Genus -> label of ``label_dict.json``; without it, the training table's genera in sorted order."""
    path = folder / "label_dict.json"
    if path.is_file():
        content = read_json(path, max_bytes=1 << 20)
        if not isinstance(content, dict) or not all(type(label) is int and label >= 0 for label in content.values()):
            raise DataFormatError(path, "must be an object of genus: label with labels >= 0")
        labels = {str(genus): int(label) for genus, label in content.items()}
        if not set(range(NUM_ID)) <= set(labels.values()) or len(set(labels.values())) < len(labels):
            raise DataFormatError(path, f"must give the labels 0..{NUM_ID - 1} to one genus each")
        return labels
    table = folder / f"{_TRAIN}.txt"
    if not table.is_file():
        raise DataNotFoundError(f"label_dict.json, which names the genera, is not there: looked for {path}.")
    genera = sorted({genus for _, _, genus in _table_rows(table)})
    if len(genera) != NUM_ID:
        raise DataFormatError(table, f"has {len(genera)} genera, {NUM_ID} are expected")
    return {genus: label for label, genus in enumerate(genera)}


def read_tfrecord_reads(path: str | Path, read_length: int = 250) -> tuple[np.ndarray, np.ndarray]:
    """Reads and labels of a TFRecord file of the benchmark.

    Feature ``x`` is the read as digits 0..3 separated by blanks, ``y`` its label.

    Args:
        path: the file.
        read_length: bases per read, L.

    Returns:
        Base ids of shape (N, L), uint8, and labels of shape (N,), int64.

    Raises:
        DataFormatError: the file is damaged or not of that form; with the offset of the record.
    """
    width = 2 * read_length - 1
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


def _table_rows(path: str | Path) -> list[tuple[int, bytes, str]]:
    """Rows of a text table as (offset, sequence, genus)."""
    rows = []
    offset = 0
    with open(path, "rb") as stream:
        for number, line in enumerate(stream):
            cells = line.rstrip(b"\r\n").split(b"\t")
            if number == 0 and cells != _COLUMNS:
                raise DataFormatError(path, "the first line must be the columns seq, label, seq_info, domain", 0)
            if len(cells) != len(_COLUMNS):
                raise DataFormatError(path, f"line {number + 1} has {len(cells)} cells, 4 are expected", offset)
            if number:
                rows.append((offset, cells[0], cells[1].decode("utf-8", "replace")))
            offset += len(line)
    return rows


def read_table(path: str | Path, labels: dict[str, int], read_length: int = 250) -> tuple[np.ndarray, np.ndarray]:
    """Reads and labels of a text table of the benchmark, columns seq, label, seq_info, domain.

    Args:
        path: the file.
        labels: genus -> label; a genus that is not in it is OOD and gets the labels after the known ones.
        read_length: bases per read, L.

    Returns:
        Base ids of shape (N, L), uint8, and labels of shape (N,), int64.

    Raises:
        DataFormatError: the file is not of that form; with the offset of the line.
    """
    rows = _table_rows(path)
    for offset, sequence, _ in rows:
        if len(sequence) != read_length:
            raise DataFormatError(path, f"a read of {len(sequence)} letters, {read_length} are expected", offset)
    reads = encode_bases(b"".join(sequence for _, sequence, _ in rows)).reshape(len(rows), read_length)
    bad = np.flatnonzero((reads > OTHER).any(axis=1))
    if len(bad):
        raise DataFormatError(path, "a read with letters that are no bases", rows[bad[0]][0])
    first_free = max([NUM_ID, *(label + 1 for label in labels.values())])
    extra = sorted({genus for _, _, genus in rows} - set(labels))
    known = {**labels, **{genus: first_free + number for number, genus in enumerate(extra)}}
    return reads, np.array([known[genus] for _, _, genus in rows], dtype=np.int64)
