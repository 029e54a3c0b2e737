"""TFRecord files and ``tf.train.Example`` messages, read without tensorflow.

A record is ``uint64 length | uint32 crc(length) | data | uint32 crc(data)``, all little-endian, with masked CRC-32C
checksums. Both checksums of every record are verified. The CRC runs over many records at once: lane ``i`` is
record ``i``, step ``j`` is its byte ``j``, so numpy does the work that a loop over bytes would do in Python.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .errors import DataFormatError

Feature = list[bytes] | list[int] | list[float]

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected
_MASK_DELTA = 0xA282EAD8
_LANES = 4096
_HEADER, _FOOTER = 12, 4


def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


_TABLE = _crc_table()
# two bytes per step: entry w is the effect of its low byte, then of its high byte
_TABLE2 = _TABLE[(_TABLE[np.arange(1 << 16) & 0xFF] ^ (np.arange(1 << 16) >> 8)) & 0xFF] ^ (
    _TABLE[np.arange(1 << 16) & 0xFF] >> 8
)


def crc32c(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """CRC-32C of many pieces of one buffer at once.

    Args:
        data: the buffer, uint8, shape (B,).
        starts: offset of each piece, shape (N,).
        lengths: bytes in each piece, shape (N,).

    Returns:
        Checksums of shape (N,), uint32.

    Example:
        >>> import numpy as np
        >>> crc = crc32c(np.frombuffer(b"123456789", np.uint8), np.array([0]), np.array([9]))
        >>> hex(int(crc[0]))
        '0xe3069283'
    """
    result = np.empty(len(starts), dtype=np.uint32)
    # longest first: the lanes still running are then always a prefix
    order = np.argsort(-lengths, kind="stable")
    for first in range(0, len(order), _LANES):
        lanes = order[first : first + _LANES]
        result[lanes] = _crc_lanes(data, starts[lanes], lengths[lanes])
    return result


def _crc_lanes(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Checksums of pieces sorted by falling length."""
    longest = int(lengths[0])
    padded = np.zeros((len(starts), longest + longest % 2), dtype=np.uint8)
    for row, start, length in zip(padded, starts.tolist(), lengths.tolist(), strict=True):
        row[:length] = data[start : start + length]
    # words[j] = bytes 2j and 2j + 1 of every lane
    words = np.ascontiguousarray(padded.view("<u2").T)
    crc = np.full(len(starts), 0xFFFFFFFF, dtype=np.uint32)
    running = np.searchsorted(-lengths, -2 * np.arange(1, len(words) + 1), side="right")
    for word, count in zip(words, running.tolist(), strict=True):
        live = crc[:count]
        index = live.astype(np.uint16) ^ word[:count]
        live >>= 16
        live ^= _TABLE2[index]
    odd = np.flatnonzero(lengths % 2)
    last = data[starts[odd] + lengths[odd] - 1]
    crc[odd] = _TABLE[(crc[odd] ^ last) & 0xFF] ^ (crc[odd] >> 8)
    return crc ^ np.uint32(0xFFFFFFFF)


def mask_crc(crc: np.ndarray) -> np.ndarray:
    """TFRecord's masked form of CRC-32C values, shape (N,): rotated by 15 bits plus a constant."""
    crc = crc.astype(np.uint32)
    return ((crc >> 15) | (crc << 17)) + np.uint32(_MASK_DELTA)


def read_records(path: str | Path, *, max_record: int = 1 << 16) -> list[tuple[int, bytes]]:
    """Records of a TFRecord file, every checksum verified.

    Args:
        path: the file, uncompressed.
        max_record: longest record to accept, in bytes.

    Returns:
        Pairs (offset of the record's data in the file, data).

    Raises:
        DataFormatError: the file is truncated, a checksum is wrong, or a record is implausibly long.
    """
    content = Path(path).read_bytes()
    data = np.frombuffer(content, dtype=np.uint8)
    heads, sizes, fault = _scan(content, max_record)
    head = np.array(heads, dtype=np.int64)

    # a damaged length leads the scan astray, so the lengths' checksums come first
    checked = head[head + _HEADER <= len(content)]
    _check(path, data, checked, np.full(len(checked), 8, dtype=np.int64), "length")
    if fault is not None:
        raise DataFormatError(path, fault[1], fault[0])
    _check(path, data, head + _HEADER, np.array(sizes, dtype=np.int64), "data")
    starts = [at + _HEADER for at in heads]
    return [(start, content[start : start + length]) for start, length in zip(starts, sizes, strict=True)]


def _scan(content: bytes, max_record: int) -> tuple[list[int], list[int], tuple[int, str] | None]:
    """Offsets and lengths of all records, and the fault (offset, reason) that ended the scan, if any.

    The record with the fault has an offset but no length.
    """
    heads: list[int] = []
    sizes: list[int] = []
    at, end = 0, len(content)
    while at < end:
        heads.append(at)
        if at + _HEADER > end:
            return heads, sizes, (at, f"truncated: {end - at} of {_HEADER} header bytes of a record")
        (length,) = struct.unpack_from("<Q", content, at)
        if length > max_record:
            return heads, sizes, (at, f"a record of {length} bytes; at most {max_record} are expected here")
        after = at + _HEADER + length + _FOOTER
        if after > end:
            return heads, sizes, (at, f"truncated: a record needs {after - at} bytes, {end - at} are left")
        sizes.append(length)
        at = after
    return heads, sizes, None


def _check(path: str | Path, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, what: str) -> None:
    if len(starts) == 0:
        return
    places = (starts + lengths)[:, None] + np.arange(4)
    stored = np.ascontiguousarray(data[places]).view("<u4")[:, 0]
    wrong = np.flatnonzero(stored != mask_crc(crc32c(data, starts, lengths)))
    if len(wrong):
        raise DataFormatError(path, f"the checksum of a record's {what} is wrong: damaged data", int(starts[wrong[0]]))


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        if byte < 0x80:
            value |= byte << shift
            if value >> 64:
                raise _WireError(at, "a varint of more than 64 bits")
            return value, at
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > 63:
            raise _WireError(at, "a varint of more than ten bytes")
    raise _WireError(at, "truncated inside a varint")


class _WireError(Exception):
    def __init__(self, at: int, reason: str) -> None:
        super().__init__(reason)
        self.at, self.reason = at, reason


def _fields(data: bytes, at: int, end: int) -> list[tuple[int, int, int, int]]:
    """Fields of a message as (number, wire type, start, end); a varint field spans its own bytes."""
    found = []
    while at < end:
        key = data[at]
        at += 1
        if key >= 0x80:  # nearly all keys and lengths are one byte
            key, at = _varint(data, at - 1, end)
        wire = key & 7
        start = at
        if wire == 2:
            length, start = _varint(data, at, end)
            at = start + length
        elif wire == 0:
            _, at = _varint(data, at, end)
        elif wire == 5:
            at += 4
        else:
            raise _WireError(at, f"wire type {wire} does not occur in tf.train.Example")
        if at > end:
            raise _WireError(start, "a field reaches beyond its message")
        found.append((key >> 3, wire, start, at))
    return found


def parse_example(data: bytes) -> dict[str, Feature]:
    """Features of a serialised ``tf.train.Example``, strictly: nothing unknown, nothing doubled, nothing left over.

    Args:
        data: the message.

    Returns:
        Feature name -> list of bytes, ints or floats.

    Raises:
        ValueError: the bytes are no such message; ``args`` are (reason, offset in ``data``).
    """
    found: dict[str, Feature] = {}
    try:
        for _, _, start, end in _expect(data, 0, len(data), 1, "Example"):
            for _, _, entry, entry_end in _expect(data, start, end, 1, "Features"):
                name, feature = _entry(data, entry, entry_end)
                if name in found:
                    raise _WireError(entry, f"feature {name!r} occurs twice")
                found[name] = feature
    except _WireError as error:
        raise ValueError(f"not a tf.train.Example: {error.reason}", error.at) from None
    return found


def _expect(data: bytes, at: int, end: int, last: int, message: str) -> list[tuple[int, int, int, int]]:
    """Fields of a message whose fields are all length-delimited and numbered 1..last."""
    fields = _fields(data, at, end)
    for number, wire, start, _ in fields:
        if wire != 2 or not 1 <= number <= last:
            raise _WireError(start, f"field {number} of wire type {wire} is not part of {message}")
    return fields


def _entry(data: bytes, at: int, end: int) -> tuple[str, Feature]:
    name: str | None = None
    feature: Feature | None = None
    for number, _, start, stop in _expect(data, at, end, 2, "a feature map's entry"):
        if number == 1 and name is None:
            try:
                name = data[start:stop].decode("utf-8")
            except UnicodeDecodeError:
                raise _WireError(start, "a feature's name is not UTF-8") from None
        elif number == 2 and feature is None:
            feature = _feature(data, start, stop)
        else:
            raise _WireError(start, "a feature map's entry has two names or two values")
    if name is None or feature is None:
        raise _WireError(at, "a feature map's entry lacks its name or its value")
    return name, feature


def _feature(data: bytes, at: int, end: int) -> Feature:
    lists = _expect(data, at, end, 3, "Feature")
    if len(lists) != 1:
        raise _WireError(at, f"a feature must hold one list of values, it holds {len(lists)}")
    kind, _, start, stop = lists[0]
    if kind == 1:
        return [data[first:last] for _, _, first, last in _expect(data, start, stop, 1, "BytesList")]
    return _numbers(data, start, stop, floats=kind == 2)


def _numbers(data: bytes, at: int, end: int, *, floats: bool) -> list[int] | list[float]:
    """Values of a FloatList or an Int64List, packed or one by one."""
    reals: list[float] = []
    integers: list[int] = []
    single = 5 if floats else 0
    for number, wire, start, stop in _fields(data, at, end):
        if number != 1 or wire not in (2, single):
            raise _WireError(start, f"field {number} of wire type {wire} is not part of a list of numbers")
        if floats:
            if (stop - start) % 4:
                raise _WireError(start, f"{stop - start} bytes are no packed 32-bit floats")
            reals.extend(struct.unpack_from(f"<{(stop - start) // 4}f", data, start))
        else:
            while start < stop:
                value, start = _varint(data, start, stop)
                integers.append(value - (1 << 64) if value >> 63 else value)
    return reals if floats else integers


def read_examples(
    path: str | Path, names: Sequence[str], *, max_record: int = 1 << 16
) -> Iterator[tuple[int, list[Feature]]]:
    """Chosen features of every example of a TFRecord file.

    Args:
        path: the file.
        names: features that every example must have.
        max_record: longest record to accept, in bytes.

    Yields:
        Pairs (offset of the record's data, the features in the order of ``names``).

    Raises:
        DataFormatError: the file is damaged, or an example lacks a feature; with the offset.
    """
    for offset, data in read_records(path, max_record=max_record):
        try:
            example = parse_example(data)
        except ValueError as error:
            reason, at = error.args
            raise DataFormatError(path, reason, offset + at) from None
        missing = [name for name in names if name not in example]
        if missing:
            raise DataFormatError(path, f"an example lacks feature {missing[0]!r}; it has {sorted(example)}", offset)
        yield offset, [example[name] for name in names]
