"""Bacteria genomics: 250-base reads of 10 ID genera, reads of other genera as OOD."""

import gzip
import itertools
import json
import os
import re
import shutil
import struct
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from pytorch_ood.api import BenchmarkInfo, Paper, Task
from torch import Tensor

from rmd_plugin.files import DataFormatError, require

from .base import ArrayRows, Distance, OODBenchmark, OODSet, Parts, Split, Transform, stream
from .dataset_files import DataNotFoundError, fetch, naming, resolve_data_dir

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
# the features x and y of a serialised tf.train.Example: a text of digits; a whole number, packed or not
_READ = re.compile(rb"(?:[0-4] ){249}[0-4]")
_LABEL = re.compile(rb"\n\x01y\x12.\x1a.(?:\n.|\x08)([\x80-\xff]*[\0-\x7f])", re.DOTALL)


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
        folder = Path(_FOLDERS[self.source] if self.folder is None else self.folder).expanduser()
        # an absolute folder needs no data_dir
        if not folder.is_absolute():
            folder = resolve_data_dir(self.data_dir, str(folder)) / folder
        return self._load_published(folder) if self.source == "published" else self._cut_genomes(folder)

    def default_transform(self) -> Transform | None:
        """The encoding asked for."""
        return one_hot if self.encoding == "one_hot" else None

    def _load_published(self, folder: Path) -> Parts:
        if not folder.is_dir():
            kind = f"Genomics OOD benchmark in {folder} (for FASTA genomes set benchmark.source=genomes)"
            archive = fetch(_URL, _SHA256, folder.parent / "genomics_ood.zip", download=self.download, kind=kind)
            aside = tempfile.mkdtemp(dir=folder.parent)  # a kill leaves nothing that looks complete
            shutil.unpack_archive(archive, aside)
            os.replace(aside, folder)
        with naming(folder / "label_dict.json"):
            labels = json.loads((folder / "label_dict.json").read_text(encoding="utf-8"))
            names = sorted((genus for genus, label in labels.items() if label < _NUM_ID), key=labels.__getitem__)
        complete = (folder / _TEST).is_dir()
        needed = [_TRAIN, _VAL, _TEST, _OOD_TEST] if complete else [_TRAIN, _VAL, _OOD_VAL]
        train, *val, test, outside = (_read_split(folder / split) for split in needed)
        ood = OODSet("ood_test" if complete else "ood_val", "near", outside)
        return Parts(names, train, test, [ood], val=val[0] if val else None, val_fraction=self.val_fraction)

    def _cut_genomes(self, folder: Path) -> Parts:
        genomes = _Genomes(folder, self.val_fraction, self.seed)
        inside, outside = (genomes.classes[genomes.classes["role"] == role] for role in ("id", "ood"))
        names = sorted(inside["genus"].unique())
        train = genomes.cut(names, self.n_train, "train")
        reads: np.ndarray = train.source.items
        # val and test avoid the training reads of every genus; A-T and C-G are codes that sum to 3
        seen = {read.tobytes() for strand in (reads, 3 - reads[:, ::-1]) for read in strand}
        val, test = genomes.cut(names, self.n_val, "val", seen), genomes.cut(names, self.n_test, "test", seen)
        oods = []
        for kingdom, group in outside.groupby("kingdom"):
            distance: Distance = "near" if kingdom in set(inside["kingdom"]) else "far"
            split = genomes.cut(sorted(group["genus"].unique()), self.n_test, "ood")
            oods.append(OODSet(f"ood_{kingdom}", distance, split))
        oods.sort(key=lambda ood: ood.distance == "far")
        return Parts(names, train, test, oods, val=val)


# -- the published files ----------------------------------------------------------------------------------------------


def _read_split(folder: Path) -> Split:
    """The reads of a folder of TFRecord files."""
    files = sorted(folder.glob("*.tfrecord*"))
    if not files:
        raise DataNotFoundError(f"the Genomics OOD benchmark is incomplete: there is no TFRecord file in {folder}.")
    arrays_of_files = [read_tfrecord(file) for file in files]
    reads, labels = (np.concatenate(arrays) for arrays in zip(*arrays_of_files, strict=True))
    if len(reads) == 0 or ((labels >= _NUM_ID) != ("_ood_" in folder.name)).any():
        raise DataFormatError(folder, f"has no reads, or classes of another split: {np.unique(labels)}")
    return Split(Reads(reads), labels)


def read_tfrecord(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads (N, L), uint8, and labels (N,) of a TFRecord file: feature ``x`` is digits and blanks, ``y`` a label."""
    with naming(path):
        records = list(_read_records(path))
        reads = [match[0] for match in map(_READ.search, records) if match]
        labels = [match[1] for match in map(_LABEL.search, records) if match]
        if not len(reads) == len(labels) == len(records):
            raise ValueError("a record has no 'x' of 250 digits 0..4 separated by blanks, or no label 'y'")
        digits = np.frombuffer(b"".join(reads), dtype=np.uint8).reshape(-1, 2 * _READ_LENGTH - 1)[:, ::2]
        # a label has seven bits a byte, the lowest first
        numbers = [sum((byte & 127) << 7 * position for position, byte in enumerate(label)) for label in labels]
        return digits - np.uint8(ord("0")), np.array(numbers, dtype=np.int64)


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


# -- reads cut from genomes -------------------------------------------------------------------------------------------

#: codes of a sequence, and the first and last base plus one between which reads may lie
_Region = tuple[np.ndarray, int, int]


class _Genomes:
    """A folder of FASTA genomes with ``classes.tsv`` (columns file, genus, role, kingdom), from which reads are cut."""

    def __init__(self, folder: Path, val_fraction: float, seed: int) -> None:
        self.folder, self.seed = folder, seed
        with naming(folder / "classes.tsv"):
            classes = pd.read_csv(folder / "classes.tsv", sep="\t", dtype=str, keep_default_na=False)
            self.classes = classes[["file", "genus", "role", "kingdom"]]
        #: where reads of a genus for train, val, test or ood may be cut
        self.regions: defaultdict[tuple[str, str], list[_Region]] = defaultdict(list)
        for (genus, role), files in self.classes.groupby(["genus", "role"])["file"]:
            shares = {"val": val_fraction} if len(files) > 1 else {"val": val_fraction, "test": _TEST_FRACTION}
            for file in files:
                sequences = read_fasta(folder / file)
                blocks = [block for codes in sequences for block in _blocks(codes)]
                if role == "ood":
                    self.regions[genus, "ood"] += [(codes, 0, len(codes)) for codes in sequences]
                elif "test" not in shares and file == files.iloc[-1]:
                    self.regions[genus, "test"] += blocks
                else:
                    order = stream(seed, "blocks", file).permutation(len(blocks))
                    ends = np.cumsum([max(1, round(share * len(blocks))) for share in shares.values()])
                    for part, chosen in zip([*shares, "train"], np.split(order, ends), strict=True):
                        self.regions[genus, part] += [blocks[index] for index in np.sort(chosen)]

    def cut(self, genera: list[str], count: int, role: str, avoid: Set[bytes] = frozenset()) -> Split:
        """So many distinct reads of each genus for train, val, test or ood, none of them in ``avoid``."""
        reads = [read for genus in genera for read in self._cut(genus, count, role, avoid)]
        codes = np.frombuffer(b"".join(reads), dtype=np.uint8).reshape(-1, _READ_LENGTH)
        return Split(Reads(codes), np.repeat(np.arange(len(genera)), count))

    def _cut(self, genus: str, count: int, role: str, avoid: Set[bytes]) -> list[bytes]:
        rng = stream(self.seed, "reads", f"{genus} {role}")
        regions = [region for region in self.regions[genus, role] if region[2] - region[1] >= _READ_LENGTH]
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


def _blocks(codes: np.ndarray) -> Iterator[_Region]:
    """Nearly equal blocks of a sequence, trimmed by half the gap at borders shared with another block."""
    edges = np.linspace(0, len(codes), max(1, round(len(codes) / _BLOCK)) + 1).astype(int)
    for start, stop in itertools.pairwise(edges.tolist()):
        yield codes, start + (_GAP // 2 if start else 0), stop - (_GAP // 2 if stop < len(codes) else 0)


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
