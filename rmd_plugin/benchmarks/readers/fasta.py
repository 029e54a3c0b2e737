"""DNA as base ids: genomes from FASTA files, plain or gzip-compressed, and the letters of reads."""

import gzip
import zlib
from pathlib import Path

import numpy as np

from rmd_plugin.untrusted import allowed_bytes, check_size

from ..errors import DataFormatError

BASES = "ACGT"
OTHER = len(BASES)  # any IUPAC letter that is not one of the four bases
READ_LENGTH = 250  # bases per read of the Genomics OOD benchmark
_BAD, _BREAK = 255, 254
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 1 << 20


_CODES = np.full(256, _BAD, dtype=np.uint8)
_CODES[list(b"RYSWKMBDHVNX-ryswkmbdhvnx")] = OTHER
_CODES[list(b"ACGTUacgtu")] = [0, 1, 2, 3, 3] * 2  # RNA spells thymine's place as uracil
_CODES[list(b"\n\r")] = _BREAK


def encode_bases(letters: bytes | bytearray) -> np.ndarray:
    """Base ids of DNA letters, shape (len(letters),), uint8: ACGT = 0..3, other IUPAC letters 4, all else above."""
    return _CODES[np.frombuffer(letters, dtype=np.uint8)]


def read_fasta(path: str | Path, *, max_bytes: int = 1 << 30) -> dict[str, np.ndarray]:
    """Sequences of a FASTA file: first word of each header -> base ids of shape (L,), uint8, values 0..4.

    Gzip is recognised by the content, not by the name. Offsets of errors count bytes of the unpacked text, of which
    there may be ``max_bytes`` (``RMD_MAX_GIB`` raises it).
    """
    text = _unpack(Path(path), max_bytes)
    if not text.startswith(b">"):
        raise DataFormatError(path, f"is not FASTA: it starts with {bytes(text[:12])!r}, '>' is expected", 0)
    found: dict[str, np.ndarray] = {}
    start = 0
    while start < len(text):
        line_end = text.find(b"\n", start)
        if line_end < 0:
            raise DataFormatError(path, "truncated: a header without a sequence", start)
        words = text[start + 1 : line_end].split(maxsplit=1)
        name = words[0].decode("utf-8", "replace") if words else ""
        next_record = text.find(b"\n>", line_end)
        stop = len(text) if next_record < 0 else next_record + 1
        codes = encode_bases(text[line_end + 1 : stop])
        bad = np.flatnonzero(codes == _BAD)
        if len(bad):
            place = line_end + 1 + int(bad[0])
            raise DataFormatError(
                path, f"{bytes(text[place : place + 1])!r} is no base letter (sequence {name!r})", place
            )
        sequence = codes[codes != _BREAK]
        if not name or len(sequence) == 0 or name in found:
            why = "has no name" if not name else "occurs twice" if name in found else "is empty"
            raise DataFormatError(path, f"the sequence {name!r} {why}", start)
        found[name] = sequence
        start = stop
    return found


def _unpack(path: Path, max_bytes: int) -> bytearray:
    with open(path, "rb") as stream:
        packed = stream.read(2) == _GZIP_MAGIC
    size = path.stat().st_size if packed else None
    limit, text = allowed_bytes(max_bytes, size), bytearray()
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as source:
            while len(text) <= limit and (chunk := source.read(_CHUNK)):
                text += chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataFormatError(path, f"the gzip stream is truncated or damaged: {error}", len(text)) from None
    check_size(path, len(text), max_bytes, packed=size)
    return text
