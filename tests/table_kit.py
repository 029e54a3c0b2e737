"""Tables of features in files, for tests."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def to_table(z, y=None, kind=None):
    """Features (N, D) and labels (N,) as an Arrow table; the column of features has the type ``kind``."""
    columns = {"embedding": pa.array(list(np.asarray(z)), type=kind)}
    if y is not None:
        columns["label"] = pa.array(np.asarray(y))
    return pa.table(columns)


def write_parts(folder, z, y=None, cuts=(), names="abcdefgh", **options):
    """Write rows into Parquet files, cut at the given places; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for (start, stop), name in zip(itertools.pairwise([0, *cuts, len(z)]), names, strict=False):
        paths.append(folder / f"{name}.parquet")
        pq.write_table(to_table(z[start:stop], None if y is None else y[start:stop]), paths[-1], **options)
    return paths


def truncate(path):
    """Cut a file in the middle, as a copy that was broken off."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip(path, *, at):
    """Flip one bit of a byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)
