"""Reads cut from whole genomes, with no overlap between training and testing.

Every genome is cut into blocks; a block belongs to one role (train, val or test) and reads never cross its borders,
from which half the gap is trimmed on either side. Where a genus has several genomes, the last one listed is kept
for testing and the blocks of the others are shared by train and val; otherwise the blocks of its only genome are
shared by all three roles. On top of that no read of val or test occurs in the training reads, on either strand: repeats
and genes that two genomes have in common would otherwise leak.
"""

from collections.abc import Iterable, Set
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from ..errors import DataFormatError, DataNotFoundError
from ..splits import stream
from .fasta import OTHER, READ_LENGTH, read_fasta
from .text import read_table

_COLUMNS = ["file", "genus", "role", "kingdom"]
_TEST_FRACTION = 0.2  # of the blocks, where a genus has one genome only
_MAX_DRAWS = 50

Origin = tuple[str, str, int]  # file, sequence, start


class Genome(NamedTuple):
    """One line of ``classes.tsv``; the role is ``id`` or ``ood``."""

    file: str
    genus: str
    role: str
    kingdom: str


class Region(NamedTuple):
    """A stretch of one sequence in which reads may lie entirely."""

    file: str
    sequence: str
    start: int
    stop: int


class Cut(NamedTuple):
    """Reads, shape (N, L), uint8; the number of each one's genus, shape (N,); and where they come from."""

    reads: np.ndarray
    genera: np.ndarray
    origins: list[Origin]


def read_classes(path: str | Path) -> list[Genome]:
    """Genomes listed in a ``classes.tsv``, none of them outside its folder."""
    genomes: list[Genome] = []
    roles: dict[str, str] = {}
    for offset, cells in read_table(path, _COLUMNS):
        genome = Genome(*(cell.decode("utf-8", "replace") for cell in cells))
        if not all(cells):
            raise DataFormatError(path, "an empty cell", offset)
        if genome.role not in ("id", "ood") or roles.setdefault(genome.genus, genome.role) != genome.role:
            raise DataFormatError(path, f"role {genome.role!r}; id or ood, the same within {genome.genus}", offset)
        if any(listed.file == genome.file for listed in genomes):
            raise DataFormatError(path, f"{genome.file!r} is listed twice", offset)
        if genome.file in (".", "..") or any(mark in genome.file for mark in ("/", "\\", ":", "\0")):
            raise DataFormatError(
                path, f"lists {genome.file!r}; a plain name inside the same folder is expected", offset
            )
        genomes.append(genome)
    if not {"id", "ood"} <= set(roles.values()):
        raise DataFormatError(path, "lists no in-distribution or no OOD genome")
    return genomes


class GenomeFolder:
    """A folder of FASTA genomes with a ``classes.tsv``, from which reads are cut by seed.

    Args:
        folder: the folder.
        block: bases per block of the train/val/test partition.
        gap: bases between the reads of neighbouring blocks.
        val_fraction: share of the blocks of a genome for validation.
        seed: seed of the partition and of the reads.
    """

    def __init__(
        self,
        folder: Path,
        *,
        block: int = 20_000,
        gap: int = 500,
        val_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        if block < READ_LENGTH + gap:
            raise ValueError(f"block must be at least {READ_LENGTH} + gap; got block={block}, gap={gap}")
        if not 0 < val_fraction < 1 - _TEST_FRACTION:
            raise ValueError(f"val_fraction must be above 0 and below {1 - _TEST_FRACTION}, got {val_fraction}")
        self.folder, self.block, self.gap, self.val_fraction, self.seed = folder, block, gap, val_fraction, seed
        self.genomes = read_classes(folder / "classes.tsv")
        missing = [genome.file for genome in self.genomes if not (folder / genome.file).is_file()]
        if missing:
            raise DataNotFoundError(
                f"{len(missing)} genomes listed in {folder / 'classes.tsv'} are not in that folder, such as "
                f"{missing[0]!r}. Add them or remove their lines."
            )
        self._sequences = {
            genome.file: read_fasta(folder / genome.file)
            for genome in tqdm(self.genomes, desc="genomes", unit="file", leave=False, disable=None)
        }

    def genera(self, role: str) -> list[str]:
        """Sorted genera of a role, ``id`` or ``ood``."""
        return sorted({genome.genus for genome in self.genomes if genome.role == role})

    def regions(self, genus: str) -> dict[str, list[Region]]:
        """Regions of an ID genus for each of train, val and test."""
        files = self._files(genus)
        kept = files[-1:] if len(files) > 1 else []
        parts: dict[str, list[Region]] = {"train": [], "val": [], "test": []}
        parts["test"] += [region for file in kept for region in self._blocks(file)]
        shares = {"val": self.val_fraction} if kept else {"val": self.val_fraction, "test": _TEST_FRACTION}
        for file in files[: len(files) - len(kept)]:
            blocks = self._blocks(file)
            order = stream(self.seed, "blocks", file).permutation(len(blocks))
            ends = np.cumsum([max(1, round(share * len(blocks))) for share in shares.values()])
            for role, chosen in zip([*shares, "train"], np.split(order, ends), strict=True):
                parts[role] += [blocks[index] for index in np.sort(chosen)]
        for role, found in parts.items():
            if not found:
                raise DataFormatError(
                    self.folder / files[0],
                    f"too short: no block of {self.block} bases is left for {role} of {genus}. Add a genome of it.",
                )
        return parts

    def _files(self, genus: str) -> list[str]:
        return [genome.file for genome in self.genomes if genome.genus == genus]

    def _blocks(self, file: str) -> list[Region]:
        """Blocks of all sequences of a genome, trimmed by half the gap at borders shared with another block."""
        regions = []
        for name, codes in self._sequences[file].items():
            # nearly equal blocks instead of a short last one
            count = max(1, round(len(codes) / self.block))
            edges = np.linspace(0, len(codes), count + 1).astype(int)
            for number in range(count):
                start = int(edges[number]) + (0 if number == 0 else self.gap - self.gap // 2)
                stop = int(edges[number + 1]) - (0 if number == count - 1 else self.gap // 2)
                if stop - start >= READ_LENGTH:
                    regions.append(Region(file, name, start, stop))
        return regions

    def cut_id(self, counts: dict[str, int]) -> dict[str, Cut]:
        """So many reads of each ID genus, in the order of ``genera("id")``, for each of train, val and test."""
        parts = {genus: self.regions(genus) for genus in self.genera("id")}
        cuts: dict[str, Cut] = {}
        seen: set[bytes] = set()
        # train first: val and test must avoid the training reads of every genus
        for role in ("train", "val", "test"):
            regions = {genus: found[role] for genus, found in parts.items()}
            cuts[role] = self._cut_each(regions, counts[role], role, seen)
            if role == "train":
                seen = _both_strands(cuts[role].reads)
        return cuts

    def cut_ood(self, genera: Iterable[str], count: int) -> Cut:
        """``count`` reads of each OOD genus, from the whole of its genomes."""
        regions = {}
        for genus in genera:
            regions[genus] = [
                Region(file, name, 0, len(codes))
                for file in self._files(genus)
                for name, codes in self._sequences[file].items()
                if len(codes) >= READ_LENGTH
            ]
            if not regions[genus]:
                raise DataFormatError(
                    self.folder / self._files(genus)[0], f"too short for a read of {READ_LENGTH} bases"
                )
        return self._cut_each(regions, count, "ood", set())

    def _cut_each(self, regions: dict[str, list[Region]], count: int, role: str, avoid: Set[bytes]) -> Cut:
        cuts = [self._cut(found, count, f"{genus} {role}", avoid) for genus, found in regions.items()]
        reads = np.frombuffer(b"".join(letters for cut in cuts for letters in cut), dtype=np.uint8)
        origins = [origin for cut in cuts for origin in cut.values()]
        return Cut(reads.reshape(-1, READ_LENGTH), np.repeat(np.arange(len(cuts)), count), origins)

    def _cut(self, regions: list[Region], count: int, purpose: str, avoid: Set[bytes]) -> dict[bytes, Origin]:
        """Distinct reads of A, C, G, T from the regions, none of them in ``avoid``."""
        rng = stream(self.seed, "reads", purpose)
        windows = np.array([region.stop - region.start - READ_LENGTH + 1 for region in regions])
        ends = np.cumsum(windows)
        kept: dict[bytes, Origin] = {}
        used: set[int] = set()
        for _ in range(_MAX_DRAWS):
            for flat in rng.integers(int(ends[-1]), size=count - len(kept)).tolist():
                if flat in used:
                    continue
                used.add(flat)
                which = int(np.searchsorted(ends, flat, side="right"))
                region = regions[which]
                start = region.start + flat - int(ends[which] - windows[which])
                read = self._sequences[region.file][region.sequence][start : start + READ_LENGTH]
                letters = read.tobytes()
                if int(read.max()) < OTHER and letters not in avoid and letters not in kept:
                    kept[letters] = (region.file, region.sequence, start)
            if len(kept) == count:
                return kept
        raise DataFormatError(
            self.folder / regions[0].file,
            f"{purpose}: only {len(kept)} of {count} distinct reads of A, C, G, T could be cut. Ask for fewer.",
        )


def _both_strands(reads: np.ndarray) -> set[bytes]:
    """Reads and their reverse complements (A-T and C-G are codes that sum to 3)."""
    return {read.tobytes() for strand in (reads, 3 - reads[:, ::-1]) for read in strand}
