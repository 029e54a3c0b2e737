"""Bacteria genomics: 250-base reads of 10 ID genera, reads of other genera as OOD."""

import gzip
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from pytorch_ood.api import BenchmarkInfo, Paper, Task
from torch import Tensor

from rmd_plugin.files import DataFormatError, require

from .base import ArrayRows, Distance, OODBenchmark, OODSet, Parts, Split, Transform, stream
from .dataset_files import DOWNLOAD, DataNotFoundError, fetch, naming, resolve_data_dir

BASES = "ACGT"
_OTHER = len(BASES)  # any letter that is not one of the four bases
_READ_LENGTH = 250
_FOLDERS = {"published": "genomics_ood", "genomes": "genomes"}
_TRAIN, _VAL, _TEST = "before_2011_in_tr", "between_2011-2016_in_val", "after_2016_in_test"
_OOD_VAL, _OOD_TEST = "between_2011-2016_ood_val", "after_2016_ood_test"
_NUM_ID = 10
_URL = "https://storage.googleapis.com/tfds-data/downloads/genomics_ood/genomics_ood.zip"
_SHA256 = "4260cfaf5c919b55bb6d0e78d1a498990b7b7331f7daa6ac7e0af9dfb415e004"
# of the blocks that reads are cut from
_BLOCK, _GAP = 20_000, 500
_TEST_FRACTION = 0.2  # of the blocks, where a genus has one genome only
_MAX_DRAWS = 50


class Reads(ArrayRows):
    """DNA reads as int64 tensors of base ids, from a uint8 array of shape (N, L)."""

    kind = "read"

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.items[index].astype(np.int64))


def one_hot(read: Tensor) -> Tensor:
    """Base ids (L,) as floats (4, L); a base that is none of A, C, G, T is a column of zeros."""
    return (read[None] == torch.arange(len(BASES))[:, None]).float()


@dataclass(kw_only=True, eq=False, repr=False)
class Genomics(OODBenchmark):
    r"""Genus classification of short DNA reads with unseen genera as OOD (Ren et al., 2019).

    Raw items are int64 tensors of shape (250,) of base ids: A, C, G, T = 0..3, anything else 4.

    ``source="published"`` reads the benchmark's own files in ``genomics_ood``: ``label_dict.json`` and for each split
    a folder of TFRecord files (needs the extra ``genomics``). With the complete data, validation is 2011-2016 and the
    test is after 2016, in-distribution and OOD. With the published sample, which ends in 2016, the 2011-2016 reads are
    the test and validation reads are held out from the training reads.

    ``source="genomes"`` cuts reads from a folder of FASTA genomes with ``classes.tsv`` (columns file, genus, role,
    kingdom). Every genome is cut into blocks of 20,000 bases; a block belongs to one of train, val and test, and reads
    keep 250 bases from its borders with others. Where a genus has several genomes, the last one is kept for testing.
    No read of val or test occurs in the training reads, on either strand: repeats and shared genes would leak. OOD
    genera of a kingdom that occurs in-distribution are near-OOD, those of another kingdom far-OOD.

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
        if not folder.is_dir():
            if not self.download:
                raise DataNotFoundError(
                    f"the Genomics OOD benchmark is not there: looked for {folder}. Set {DOWNLOAD} to fetch {_URL}, or "
                    "source='genomes' (benchmark.source=genomes) for a folder of FASTA genomes."
                )
            archive = fetch(_URL, _SHA256, folder.parent / "genomics_ood.zip")
            aside = tempfile.mkdtemp(dir=folder.parent)  # a kill leaves nothing that looks complete
            shutil.unpack_archive(archive, aside)
            os.replace(aside, folder)
        with naming(folder / "label_dict.json"):
            labels = json.loads((folder / "label_dict.json").read_text(encoding="utf-8"))
            names = sorted((genus for genus, label in labels.items() if label < _NUM_ID), key=labels.__getitem__)
        complete = (folder / _TEST).is_dir()
        needed = [_TRAIN, _VAL, _TEST, _OOD_TEST] if complete else [_TRAIN, _VAL, _OOD_VAL]
        splits = {split: _read_split(folder / split) for split in needed}
        ood = OODSet("ood_test" if complete else "ood_val", "near", splits[needed[-1]])
        if complete:
            return Parts(names, splits[_TRAIN], splits[_TEST], [ood], val=splits[_VAL])
        return Parts(names, splits[_TRAIN], splits[_VAL], [ood], val_fraction=self.val_fraction)

    def _cut_genomes(self, folder: Path) -> Parts:
        counts = {"train": self.n_train, "val": self.n_val, "test": self.n_test}
        if min(counts.values()) < 1 or not 0 < self.val_fraction < 1 - _TEST_FRACTION:
            raise ValueError(
                f"n_train, n_val and n_test must be at least 1 and val_fraction above 0 and below "
                f"{1 - _TEST_FRACTION}, got {counts} and {self.val_fraction}"
            )
        genomes = _Genomes(folder, self.val_fraction, self.seed)
        splits: dict[str, Split] = {}
        seen: set[bytes] = set()
        for role, count in counts.items():  # train first: val and test must avoid the training reads of every genus
            splits[role] = genomes.cut(genomes.genera("id"), count, role, seen)
            if role == "train":
                reads: np.ndarray = splits[role].source.items
                # A-T and C-G are codes that sum to 3
                seen = {read.tobytes() for strand in (reads, 3 - reads[:, ::-1]) for read in strand}
        kingdoms = dict(zip(genomes.classes["genus"], genomes.classes["kingdom"], strict=True))
        near = {kingdoms[genus] for genus in genomes.genera("id")}
        oods = []
        for group in sorted({kingdoms[genus] for genus in genomes.genera("ood")}):
            genera = [genus for genus in genomes.genera("ood") if kingdoms[genus] == group]
            distance: Distance = "near" if group in near else "far"
            oods.append(OODSet(f"ood_{group}", distance, genomes.cut(genera, self.n_test, "ood", set())))
        oods.sort(key=lambda ood: ood.distance == "far")
        return Parts(genomes.genera("id"), splits["train"], splits["test"], oods, val=splits["val"])


# -- the published files ----------------------------------------------------------------------------------------------


def _read_split(folder: Path) -> Split:
    """The reads of a folder of TFRecord files."""
    files = sorted(folder.glob("*.tfrecord*"))
    if not files:
        raise DataNotFoundError(f"the Genomics OOD benchmark is incomplete: there is no TFRecord file in {folder}.")
    parts = [read_tfrecord(file) for file in files]
    reads, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if len(reads) == 0 or ((labels >= _NUM_ID) != ("_ood_" in folder.name)).any():
        raise DataFormatError(folder, f"has no reads, or classes of another split: {np.unique(labels)}")
    return Split(Reads(reads), labels)


def read_tfrecord(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads (N, L), uint8, and labels (N,) of a TFRecord file: feature ``x`` is digits and blanks, ``y`` a label."""
    with naming(path):
        examples = [_parse_example(record) for record in _read_records(path)]
        grid = np.frombuffer(b"".join(example[b"x"] for example in examples), dtype=np.uint8)
        reads = grid.reshape(len(examples), 2 * _READ_LENGTH - 1)[:, ::2] - np.uint8(ord("0"))
        if (reads > _OTHER).any():  # whatever is below '0' wraps around to a large number
            raise ValueError(f"feature 'x' must be digits 0..{_OTHER} separated by blanks")
        return reads, np.array([example[b"y"] for example in examples], dtype=np.int64)


def _read_records(path: Path) -> Iterator[bytes]:
    """Records of an uncompressed TFRecord file; both checksums of every record are verified.

    A record is ``uint64 length | uint32 crc(length) | data | uint32 crc(data)``, little-endian, with masked CRC-32C.
    """
    crc32c = require("google_crc32c", "genomics", needed_by="reading TFRecord files").value

    def check(content: bytes, expected: bytes) -> bytes:
        crc = crc32c(content)
        if struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF) != expected:
            raise ValueError("the checksum of a record is wrong: damaged data")
        return content

    with open(path, "rb") as file:
        while length := file.read(8):
            (size,) = struct.unpack("<Q", check(length, file.read(4)))
            yield check(file.read(size), file.read(4))


def _parse_example(data: bytes) -> dict[bytes, Any]:
    """The first value of each feature of a serialised ``tf.train.Example``, texts and whole numbers.

    In the wire format of protobuf an Example is field 1, a list of entries (1: name, 2: value); a value is a list of
    bytes (field 1) or of whole numbers (field 3, packed), each again as field 1.
    """
    values: dict[bytes, Any] = {}
    for _, features in _fields(data):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            ((kind, items),) = _fields(parts[2])
            ((_, value),) = _fields(items)
            values[parts[1]] = value if kind == 1 else _varint(value, 0)[0]
    return values


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and contents of the fields of a message, all of which have a length."""
    offset = 0
    while offset < len(data):
        tag, offset = _varint(data, offset)
        if tag & 7 == 0:  # a whole number that is not packed
            start = offset
            _, offset = _varint(data, offset)
        else:
            length, start = _varint(data, offset)
            offset = start + length
        yield tag >> 3, data[start:offset]


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """A whole number of seven bits a byte, and where the next field begins."""
    value = shift = 0
    while True:
        byte, offset = data[offset], offset + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, offset
        shift += 7


# -- reads cut from genomes -------------------------------------------------------------------------------------------

#: codes of a sequence, and the first and last base plus one between which reads may lie
_Region = tuple[np.ndarray, int, int]


class _Genomes:
    """A folder of FASTA genomes with ``classes.tsv`` (columns file, genus, role, kingdom), from which reads are cut."""

    def __init__(self, folder: Path, val_fraction: float, seed: int) -> None:
        self.folder, self.val_fraction, self.seed = folder, val_fraction, seed
        with naming(folder / "classes.tsv"):
            classes = pd.read_csv(folder / "classes.tsv", sep="\t", dtype=str, keep_default_na=False)
            self.classes = classes[["file", "genus", "role", "kingdom"]]
        self.sequences = {name: read_fasta(folder / name) for name in self.classes["file"]}

    def genera(self, role: str) -> list[str]:
        """Sorted genera of a role, ``id`` or ``ood``."""
        return sorted(set(self.classes["genus"][self.classes["role"] == role]))

    def cut(self, genera: list[str], count: int, role: str, avoid: Set[bytes]) -> Split:
        """So many distinct reads of each genus for train, val, test or ood, none of them in ``avoid``."""
        reads = [read for genus in genera for read in self._cut(genus, count, role, avoid)]
        codes = np.frombuffer(b"".join(reads), dtype=np.uint8).reshape(-1, _READ_LENGTH)
        return Split(Reads(codes), np.repeat(np.arange(len(genera)), count))

    def _regions(self, genus: str, role: str) -> list[_Region]:
        """Where reads of a genus for a role may be cut."""
        files = list(self.classes["file"][self.classes["genus"] == genus])
        if role == "ood":
            return [(codes, 0, len(codes)) for file in files for codes in self.sequences[file]]
        test_files = files[-1:] if len(files) > 1 else []
        regions = [region for file in test_files for region in self._blocks(file)] if role == "test" else []
        shares = {"val": self.val_fraction} if test_files else {"val": self.val_fraction, "test": _TEST_FRACTION}
        for file in files[: len(files) - len(test_files)]:
            blocks = self._blocks(file)
            order = stream(self.seed, "blocks", file).permutation(len(blocks))
            ends = np.cumsum([max(1, round(share * len(blocks))) for share in shares.values()])
            chosen = dict(zip([*shares, "train"], np.split(order, ends), strict=True))
            regions += [blocks[index] for index in np.sort(chosen.get(role, order[:0]))]
        return regions

    def _blocks(self, file: str) -> list[_Region]:
        """Blocks of all sequences of a genome, trimmed by half the gap at borders shared with another block."""
        regions = []
        for codes in self.sequences[file]:
            # nearly equal blocks instead of a short last one
            count = max(1, round(len(codes) / _BLOCK))
            edges = np.linspace(0, len(codes), count + 1).astype(int)
            for number in range(count):
                start = int(edges[number]) + (0 if number == 0 else _GAP - _GAP // 2)
                stop = int(edges[number + 1]) - (0 if number == count - 1 else _GAP // 2)
                regions.append((codes, start, stop))
        return regions

    def _cut(self, genus: str, count: int, role: str, avoid: Set[bytes]) -> list[bytes]:
        rng = stream(self.seed, "reads", f"{genus} {role}")
        regions = [region for region in self._regions(genus, role) if region[2] - region[1] >= _READ_LENGTH]
        windows = np.array([stop - start - _READ_LENGTH + 1 for _, start, stop in regions], dtype=np.int64)
        ends = np.cumsum(windows)
        reads: dict[bytes, None] = {}  # in the order of their drawing
        for _ in range(_MAX_DRAWS if regions else 0):
            for position in rng.integers(int(ends[-1]), size=count - len(reads)).tolist():
                number = int(np.searchsorted(ends, position, side="right"))
                codes, start, _ = regions[number]
                start += position - int(ends[number] - windows[number])
                read = codes[start : start + _READ_LENGTH]
                if int(read.max()) < _OTHER and read.tobytes() not in avoid:
                    reads[read.tobytes()] = None
            if len(reads) == count:
                return list(reads)
        raise DataFormatError(
            self.folder, f"{genus}: only {len(reads)} of {count} distinct reads of A, C, G, T could be cut for {role}"
        )


def read_fasta(path: Path) -> list[np.ndarray]:
    """Sequences of a FASTA file, plain or gzip: base ids of shape (L,), uint8, values 0..4."""
    with naming(path):
        content = path.read_bytes()
        records = (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).split(b">")
        if records[0].strip() or len(records) < 2:
            raise ValueError("it is not FASTA, which begins with '>'")
    codes = np.full(256, _OTHER, dtype=np.uint8)
    codes[list(b"ACGTUacgtu")] = [0, 1, 2, 3, 3] * 2  # RNA spells thymine's place as uracil
    letters = (b"".join(record.partition(b"\n")[2].split()) for record in records[1:])
    return [codes[np.frombuffer(sequence, dtype=np.uint8)] for sequence in letters]
