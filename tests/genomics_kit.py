"""The published layout of Genomics OOD with random reads: TFRecord files of two shards for each split."""

import json
import struct

import google_crc32c
import numpy as np

ID_GENERA = [f"Inside{letter}" for letter in "ABCDEFGHIJ"]
TRAIN, VAL, TEST = "before_2011_in_tr", "between_2011-2016_in_val", "after_2016_in_test"
OOD_VAL, OOD_TEST = "between_2011-2016_ood_val", "after_2016_ood_test"
SPLITS = (TRAIN, VAL, TEST, OOD_VAL, OOD_TEST)


def varint(value):
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def encode(read, label):
    """The message of the published files: x a string of digits, y the label, z where the read comes from."""
    digits = " ".join(map(str, read)).encode()
    features = {
        b"y": field(3, field(1, varint(label))),
        b"x": field(1, field(1, digits)),
        b"z": field(1, field(1, b"CP000001.1 genome_pos1-250")),
    }
    return field(1, b"".join(field(1, field(1, name) + field(2, value)) for name, value in features.items()))


def records(contents):
    """TFRecord framing with masked checksums."""

    def masked(piece):
        crc = google_crc32c.value(piece)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    lengths = [struct.pack("<Q", len(content)) for content in contents]
    framed = zip(lengths, map(masked, lengths), contents, map(masked, contents), strict=True)
    return b"".join(b"".join(parts) for parts in framed)


def make_reads(labels, seed):
    return np.random.default_rng(seed).integers(0, 4, size=(len(labels), 250))


def write_published(folder, splits, shards=2):
    folder.mkdir(parents=True, exist_ok=True)
    names = ID_GENERA + [f"Outside{number}" for number in range(20)]
    written = {}
    for seed, split in enumerate(splits):
        labels = np.tile(np.arange(10, 16) if "ood" in split else np.arange(10), 6)
        written[split] = make_reads(labels, seed), labels
        (folder / split).mkdir()
        for number, part in enumerate(np.array_split(np.arange(len(labels)), shards)):
            content = records([encode(written[split][0][row], labels[row]) for row in part])
            (folder / split / f"{split}-{number:05d}-of-{shards:05d}.tfrecord").write_bytes(content)
    (folder / "label_dict.json").write_text(json.dumps({name: label for label, name in enumerate(names)}))
    return written
