"""DNA reads of the Genomics OOD benchmark's own files: TFRecord or text tables, and the labels of the genera."""

from pathlib import Path

import numpy as np

from ..errors import DataFormatError, DataNotFoundError
from .fasta import OTHER, encode_bases
from .text import read_json, read_table
from .tfrecord import read_examples

NUM_ID = 10
_COLUMNS = ["seq", "label", "seq_info", "domain"]


def read_labels(folder: Path, train: str) -> dict[str, int]:
    """Genus -> label of ``label_dict.json``; without it, the genera of the table ``TRAIN.txt`` in sorted order."""
    path = folder / "label_dict.json"
    if path.is_file():
        content = read_json(path, max_bytes=1 << 20)
        if not isinstance(content, dict) or not all(type(label) is int and label >= 0 for label in content.values()):
            raise DataFormatError(path, "must be an object of genus: label with labels >= 0")
        if not set(range(NUM_ID)) <= set(content.values()) or len(set(content.values())) < len(content):
            raise DataFormatError(path, f"must give the labels 0..{NUM_ID - 1} to one genus each")
        return content
    table = folder / f"{train}.txt"
    if not table.is_file():
        raise DataNotFoundError(f"label_dict.json, which names the genera, is not there: looked for {path}.")
    genera = sorted({cells[1].decode("utf-8", "replace") for _, cells in read_table(table, _COLUMNS)})
    if len(genera) != NUM_ID:
        raise DataFormatError(table, f"has {len(genera)} genera, {NUM_ID} are expected")
    return {genus: label for label, genus in enumerate(genera)}


def read_tfrecord_reads(path: str | Path, read_length: int = 250) -> tuple[np.ndarray, np.ndarray]:
    """Reads and labels of a TFRecord file: feature ``x`` is the read as digits separated by blanks, ``y`` its label.

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


def read_table_reads(path: str | Path, labels: dict[str, int], read_length: int = 250) -> tuple[np.ndarray, np.ndarray]:
    """Reads and labels of a text table of the benchmark, columns seq, label, seq_info, domain.

    Args:
        path: the file.
        labels: genus -> label; a genus that is not in it is OOD and gets a label after those.
        read_length: bases per read, L.

    Returns:
        Base ids of shape (N, L), uint8, and labels of shape (N,), int64.

    Raises:
        DataFormatError: the file is not of that form; with the offset of the line.
    """
    rows = list(read_table(path, _COLUMNS))
    for offset, cells in rows:
        if len(cells[0]) != read_length:
            raise DataFormatError(path, f"a read of {len(cells[0])} letters, {read_length} are expected", offset)
    reads = encode_bases(b"".join(cells[0] for _, cells in rows)).reshape(len(rows), read_length)
    bad = np.flatnonzero((reads > OTHER).any(axis=1))
    if len(bad):
        raise DataFormatError(path, "a read with letters that are no bases", rows[bad[0]][0])
    genera = [cells[1].decode("utf-8", "replace") for _, cells in rows]
    first_free = max([NUM_ID, *(label + 1 for label in labels.values())])
    extra = sorted(set(genera) - set(labels))
    label_of = {**labels, **{genus: first_free + number for number, genus in enumerate(extra)}}
    return reads, np.array([label_of[genus] for genus in genera], dtype=np.int64)
