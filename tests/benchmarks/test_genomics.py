"""Genomics: published TFRecord and text layouts, and reads cut from genomes with train and test kept apart."""

import gzip
import hashlib
import io
import itertools
import json
import struct
import zipfile
from collections import Counter

import google_crc32c
import numpy as np
import pytest
import torch
from pytorch_ood.detector import KNN, Mahalanobis
from torch.utils.data import DataLoader

from rmd_plugin.benchmarks import DataFormatError, DataNotFoundError, Genomics, genomics
from rmd_plugin.benchmarks.genomics import one_hot, read_tfrecord_reads
from rmd_plugin.benchmarks.readers.genomes import GenomeFolder, read_classes
from rmd_plugin.benchmarks.readers.tfrecord import read_examples

ID_GENERA = [f"Inside{letter}" for letter in "ABCDEFGHIJ"]
TRAIN, VAL, TEST = "before_2011_in_tr", "between_2011-2016_in_val", "after_2016_in_test"
OOD_VAL, OOD_TEST = "between_2011-2016_ood_val", "after_2016_ood_test"


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


def write_published(folder, splits, kind="tfrecord", shards=2):
    folder.mkdir(parents=True, exist_ok=True)
    names = ID_GENERA + [f"Outside{number}" for number in range(20)]
    written = {}
    for seed, split in enumerate(splits):
        labels = np.tile(np.arange(10, 16) if "ood" in split else np.arange(10), 6)
        reads = make_reads(labels, seed)
        written[split] = reads, labels
        if kind == "tfrecord":
            (folder / split).mkdir()
            pieces = zip(np.array_split(reads, shards), np.array_split(labels, shards), strict=True)
            for number, (part, part_labels) in enumerate(pieces):
                content = records([encode(r, y) for r, y in zip(part, part_labels, strict=True)])
                (folder / split / f"{split}-{number:05d}-of-{shards:05d}.tfrecord").write_bytes(content)
        else:
            lines = ["seq\tlabel\tseq_info\tdomain"]
            for read, label in zip(reads, labels, strict=True):
                domain = "ood" if label >= 10 else "in"
                lines.append(f"{''.join('ACGT'[b] for b in read)}\t{names[label]}\tCP000001.1 genome\t{domain}")
            (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    if kind == "tfrecord":
        (folder / "label_dict.json").write_text(json.dumps({name: label for label, name in enumerate(names)}))
    return written


def raw(split):
    return torch.stack([split.raw(index) for index in range(len(split))]).numpy()


# published layouts


def test_the_complete_layout_tests_on_the_reads_after_2016(tmp_path):
    written = write_published(tmp_path / "genomics_ood", [TRAIN, VAL, OOD_VAL, TEST, OOD_TEST])
    benchmark = Genomics(data_dir=tmp_path)
    assert (benchmark.class_names, benchmark.ood_names) == (ID_GENERA, ["ood_test"])
    for split, name in ((benchmark.fit_set(), TRAIN), (benchmark.val_set(), VAL), (benchmark.test_in, TEST)):
        np.testing.assert_array_equal(raw(split), written[name][0])
        np.testing.assert_array_equal(split.labels, written[name][1])
    np.testing.assert_array_equal(raw(benchmark.test_oods[0]), written[OOD_TEST][0])
    assert set(benchmark.test_oods[0].labels.tolist()) == {-1}


def test_the_sample_layout_tests_on_2011_to_2016_and_holds_out_training_reads(tmp_path):
    written = write_published(tmp_path / "genomics_ood", [TRAIN, VAL, OOD_VAL])
    benchmark = Genomics(data_dir=tmp_path, val_fraction=1 / 3)
    assert benchmark.ood_names == ["ood_val"]
    np.testing.assert_array_equal(raw(benchmark.test_in), written[VAL][0])
    assert np.bincount(benchmark.fit_set().labels).tolist() == [4] * 10
    assert np.bincount(benchmark.val_set().labels).tolist() == [2] * 10
    together = np.concatenate([raw(benchmark.fit_set()), raw(benchmark.val_set())])
    assert sorted(map(bytes, together.astype(np.uint8))) == sorted(map(bytes, written[TRAIN][0].astype(np.uint8)))


def test_the_text_tables_and_the_records_give_the_same_data(tmp_path):
    splits = [TRAIN, VAL, OOD_VAL, TEST, OOD_TEST]
    write_published(tmp_path / "one" / "genomics_ood", splits)
    write_published(tmp_path / "two" / "genomics_ood", splits, kind="text")
    records, tables = (Genomics(data_dir=tmp_path / place) for place in ("one", "two"))
    assert records.fingerprint() == tables.fingerprint()
    assert records.class_names == tables.class_names


def test_the_encodings_are_one_hot_and_tokens(tmp_path):
    write_published(tmp_path / "genomics_ood", [TRAIN, VAL, OOD_VAL])
    hot, plain = Genomics(data_dir=tmp_path), Genomics(data_dir=tmp_path, encoding="tokens")
    (x, label), (tokens, same) = hot.fit_set()[3], plain.fit_set()[3]
    assert label == same
    assert (tokens.shape, tokens.dtype) == ((250,), torch.int64)
    assert (x.shape, x.dtype) == ((4, 250), torch.float32)
    torch.testing.assert_close(x, torch.nn.functional.one_hot(tokens, 4).T.float())
    other = one_hot(torch.tensor([0, 4, 3]))
    assert other.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]
    with pytest.raises(ValueError, match="encoding must be one_hot or tokens"):
        Genomics(data_dir=tmp_path, encoding="kmers")
    with pytest.raises(ValueError, match="source must be published or genomes"):
        Genomics(data_dir=tmp_path, source="fasta")


def test_the_framework_evaluates_detectors_on_reads(tmp_path):
    write_published(tmp_path / "genomics_ood", [TRAIN, VAL, OOD_VAL])
    benchmark = Genomics(data_dir=tmp_path)
    encoder = torch.nn.Sequential(torch.nn.AvgPool1d(50), torch.nn.Flatten())
    loader = DataLoader(benchmark.fit_set(), batch_size=32)
    detectors = [KNN(encoder, k=3).fit(loader), Mahalanobis(encoder).fit(loader)]
    rows = benchmark.evaluate(detectors, loader_kwargs={"batch_size": 32})
    assert [row["Dataset"] for row in rows] == ["ood_val"] * 2
    assert all(0 <= float(row["AUROC"]) <= 1 for row in rows)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (encode(range(4), 0), "one string of 499 bytes"),
        (encode([7] * 250, 0), r"digits 0\.\.4"),
        (encode([0] * 250, 12), "has class 12, not an in-distribution one"),
        (field(1, field(1, field(1, b"x") + field(2, field(1, field(1, b"0"))))), "lacks feature 'y'"),
        (encode([0] * 250, 0).replace(b"0 0", b"0,0"), r"digits 0\.\.4 separated by blanks"),
        (encode([0] * 250, 1 << 40), "one label >= 0"),
    ],
    ids=["short", "digits", "OOD in training", "no label", "commas", "huge label"],
)
def test_reads_of_another_form_are_refused_with_file_and_place(tmp_path, content, reason):
    write_published(tmp_path / "genomics_ood", [TRAIN, VAL, OOD_VAL])
    path = tmp_path / "genomics_ood" / TRAIN / f"{TRAIN}-00000-of-00002.tfrecord"
    path.write_bytes(path.read_bytes() + records([content]))
    with pytest.raises(DataFormatError, match=reason) as caught:
        Genomics(data_dir=tmp_path)
    assert caught.value.path == path


def test_absent_or_partial_published_data_is_one_error_with_the_remedy(tmp_path):
    with pytest.raises(DataNotFoundError) as caught:
        Genomics(data_dir=tmp_path)
    assert all(
        word in str(caught.value)
        for word in (TRAIN, "download=True", "benchmark.download=true", "benchmark.source=genomes", str(tmp_path))
    )
    write_published(tmp_path / "genomics_ood", [TRAIN, VAL])
    with pytest.raises(DataNotFoundError, match=f"incomplete: {OOD_VAL} is missing"):
        Genomics(data_dir=tmp_path)
    (tmp_path / "genomics_ood" / OOD_VAL).mkdir()
    (tmp_path / "genomics_ood" / OOD_VAL / "a.tfrecord").write_bytes(b"")
    with pytest.raises(DataFormatError, match="holds no reads"):
        Genomics(data_dir=tmp_path)
    (tmp_path / "genomics_ood" / "label_dict.json").unlink()
    with pytest.raises(DataNotFoundError, match=r"label_dict\.json"):
        Genomics(data_dir=tmp_path)


@pytest.mark.parametrize("labels", [[], {"a": 0}, {"a": "0"}, {f"g{n}": 0 for n in range(10)}, {"a": True}])
def test_a_label_dict_of_another_form_is_refused(tmp_path, labels):
    write_published(tmp_path / "genomics_ood", [TRAIN, VAL, OOD_VAL])
    (tmp_path / "genomics_ood" / "label_dict.json").write_text(json.dumps(labels))
    with pytest.raises(DataFormatError, match="must"):
        Genomics(data_dir=tmp_path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ACGT\tInsideA\tx\tin", "a read of 4 letters, 250 are expected"),
        ("A" * 250 + "\tInsideA\tx", "has 3 cells"),
        ("!" * 250 + "\tInsideA\tx\tin", "letters that are no bases"),
    ],
)
def test_text_tables_of_another_form_are_refused_with_the_offset_of_the_line(tmp_path, line, reason):
    write_published(tmp_path / "genomics_ood", [TRAIN, VAL, OOD_VAL], kind="text")
    path = tmp_path / "genomics_ood" / f"{TRAIN}.txt"
    offset = path.stat().st_size
    with open(path, "a") as stream:
        stream.write(line + "\n")
    with pytest.raises(DataFormatError, match=reason) as caught:
        Genomics(data_dir=tmp_path)
    assert caught.value.offset == offset


def test_download_fetches_the_archive_by_its_hash_and_unpacks_it(server, tmp_path, monkeypatch):
    splits = [TRAIN, VAL, OOD_VAL, TEST, OOD_TEST]
    write_published(tmp_path / "made", splits, kind="text")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for split in splits:
            archive.write(tmp_path / "made" / f"{split}.txt", f"{split}.txt")
    content = packed.getvalue()
    folder, url = server
    (folder / "genomics_ood.zip").write_bytes(content)
    monkeypatch.setattr(genomics, "_URL", f"{url}/genomics_ood.zip")
    monkeypatch.setattr(genomics, "_SHA256", hashlib.sha256(content).hexdigest())
    benchmark = Genomics(data_dir=tmp_path / "data", download=True)
    assert (len(benchmark.train_set()), benchmark.ood_names) == (60, ["ood_test"])


# genomes


def random_letters(rng, length):
    return "".join("ACGT"[code] for code in rng.integers(0, 4, size=length))


@pytest.fixture(scope="module")
def genome_folder(tmp_path_factory):
    """Three ID genera (A with two genomes, B and C with one) and two OOD ones, one of another kingdom."""
    folder = tmp_path_factory.mktemp("data") / "genomes"
    folder.mkdir()
    rng = np.random.default_rng(0)
    rows, letters = ["file\tgenus\trole\tkingdom"], {}
    listed = [("a1", "A", "id", "bacteria"), ("a2", "A", "id", "bacteria"), ("b", "B", "id", "bacteria")]
    listed += [("c", "C", "id", "bacteria"), ("u", "U", "ood", "bacteria"), ("w", "W", "ood", "archaea")]
    for name, genus, role, kingdom in listed:
        chromosome, plasmid = random_letters(rng, 300_000), random_letters(rng, 30_000)
        # unknown bases in the middle, which no read may touch
        chromosome = chromosome[:150_000] + "N" * 5_000 + chromosome[155_000:]
        letters[f"{name}.fna.gz"] = {"chromosome": chromosome, "plasmid": plasmid}
        text = "".join(
            f">{key} of {name}\n" + "\n".join(seq[at : at + 80] for at in range(0, len(seq), 80)) + "\n"
            for key, seq in letters[f"{name}.fna.gz"].items()
        )
        (folder / f"{name}.fna.gz").write_bytes(gzip.compress(text.encode(), 1))
        rows.append(f"{name}.fna.gz\t{genus}\t{role}\t{kingdom}")
    (folder / "classes.tsv").write_text("\n".join(rows) + "\n")
    return folder, letters


@pytest.fixture(scope="module")
def cuts(genome_folder):
    return GenomeFolder(genome_folder[0], seed=1).cut_id({"train": 300, "val": 40, "test": 60})


def test_every_read_is_the_stretch_of_the_genome_that_it_says(genome_folder, cuts):
    _, letters = genome_folder
    for cut in cuts.values():
        for read, (file, sequence, start) in zip(cut.reads, cut.origins, strict=True):
            assert "".join("ACGT"[code] for code in read) == letters[file][sequence][start : start + 250]


def test_reads_of_train_val_and_test_never_overlap_and_keep_the_gap(cuts):
    spans = [(origin, role) for role, cut in cuts.items() for origin in cut.origins]
    by_sequence = {}
    for (file, sequence, start), role in spans:
        by_sequence.setdefault((file, sequence), []).append((start, role))
    mixed = 0
    for found in by_sequence.values():
        found.sort()
        for (start, role), (after, other) in itertools.pairwise(found):
            if role != other:
                mixed += 1
                assert after - (start + 250) >= 500
    assert mixed > 10


def test_the_regions_of_a_genome_leave_out_the_gaps_and_nothing_else(genome_folder):
    folder = GenomeFolder(genome_folder[0])
    regions = folder.regions("B")
    shares = {role: sum(region.stop - region.start for region in found) for role, found in regions.items()}
    assert shares["val"] == pytest.approx(0.1 * 330_000, rel=0.4)
    assert shares["test"] == pytest.approx(0.2 * 330_000, rel=0.4)
    spans = sorted((region.sequence, region.start, region.stop) for found in regions.values() for region in found)
    for (name, _, stop), (other, start, _) in itertools.pairwise(spans):
        assert (start - stop == 500) if name == other else (start == 0)
    assert [stop for name, _, stop in spans if name == "plasmid"][-1] == 30_000


def test_a_genus_with_two_genomes_keeps_the_last_one_for_testing(cuts):
    files = {role: Counter(origin[0] for origin in cut.origins) for role, cut in cuts.items()}
    assert {f for f in files["train"] if f[0] == "a"} == {f for f in files["val"] if f[0] == "a"} == {"a1.fna.gz"}
    assert {f for f in files["test"] if f[0] == "a"} == {"a2.fna.gz"}
    assert {f for role in files for f in files[role] if f[0] in "bc"} == {"b.fna.gz", "c.fna.gz"}
    assert [np.bincount(cut.genera).tolist() for cut in cuts.values()] == [[300] * 3, [40] * 3, [60] * 3]


def test_no_test_read_occurs_in_training_on_either_strand_even_if_the_genomes_repeat(tmp_path):
    rng = np.random.default_rng(3)
    shared = random_letters(rng, 30_000)
    complement = shared[::-1].translate(str.maketrans("ACGT", "TGCA"))
    rows = ["file\tgenus\trole\tkingdom"]
    # the test genome of A is the reverse complement of its training genome, but for a stretch of its own
    genomes = {"a1": shared, "a2": complement + random_letters(rng, 2_000), "u": random_letters(rng, 5_000)}
    for name, letters in genomes.items():
        (tmp_path / f"{name}.fna").write_text(f">s\n{letters}\n")
        rows.append(f"{name}.fna\t{name[0].upper()}\t{'ood' if name == 'u' else 'id'}\tbacteria")
    (tmp_path / "classes.tsv").write_text("\n".join(rows))
    folder = GenomeFolder(tmp_path, block=1_500, gap=100)
    # nearly all reads of the training genome are taken, so nearly all of the test genome is forbidden
    found = folder.cut_id({"train": 16_000, "val": 10, "test": 4_000})
    flip = str.maketrans("\0\1\2\3", "\3\2\1\0")
    train = {bytes(read) for read in found["train"].reads}
    forbidden = train | {read.decode("latin1")[::-1].translate(flip).encode("latin1") for read in train}
    for role in ("val", "test"):
        assert forbidden.isdisjoint(bytes(read) for read in found[role].reads)
    chance = 4_000 / (len(genomes["a2"]) - 249)
    own = sum(start > 29_750 for _, _, start in found["test"].origins) / 4_000
    assert own > chance  # the stretch of its own is over-represented, so the rule did strike


def test_the_benchmark_of_genomes_has_near_and_far_sets_by_kingdom(genome_folder):
    folder = genome_folder[0]
    options = {"data_dir": folder.parent, "source": "genomes", "n_train": 40, "n_val": 10, "n_test": 20}
    benchmark = Genomics(**options)
    assert benchmark.class_names == ["A", "B", "C"]
    assert benchmark.distance == {"ood_bacteria": "near", "ood_archaea": "far"}
    assert [len(s) for s in (benchmark.train_set(), benchmark.val_set(), benchmark.test_in)] == [120, 30, 60]
    assert [len(ood) for ood in benchmark.test_oods] == [20, 20]
    assert Genomics(**options).fingerprint() == benchmark.fingerprint() != Genomics(**options, seed=1).fingerprint()
    assert raw(benchmark.fit_set()).max() == 3
    absolute = Genomics(**{**options, "data_dir": None}, folder=folder)
    assert absolute.fingerprint() == benchmark.fingerprint()
    encoder = torch.nn.Sequential(torch.nn.AvgPool1d(125), torch.nn.Flatten())
    detector = KNN(encoder, k=5).fit(DataLoader(benchmark.fit_set(), batch_size=64))
    rows = benchmark.evaluate(detector, loader_kwargs={"batch_size": 64})
    assert [row["Dataset"] for row in rows] == ["ood_bacteria", "ood_archaea"]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("", "first line"),
        ("genus\tfile\trole\tkingdom\n", "first line"),
        ("file\tgenus\trole\tkingdom\na.fna\tA\tid\n", "line 2 has 3 cells, 4 are expected"),
        ("file\tgenus\trole\tkingdom\na.fna\tA\tboth\tb\n", "role 'both'"),
        ("file\tgenus\trole\tkingdom\n../a.fna\tA\tid\tb\n", "plain name"),
        ("file\tgenus\trole\tkingdom\n/etc/passwd\tA\tid\tb\n", "plain name"),
        ("file\tgenus\trole\tkingdom\na.fna\tA\tid\tb\nb.fna\tA\tood\tb\n", "the same within A"),
        ("file\tgenus\trole\tkingdom\na.fna\tA\tid\tb\na.fna\tB\tood\tb\n", "listed twice"),
        ("file\tgenus\trole\tkingdom\na.fna\tA\tid\tb\n", "no in-distribution or no OOD"),
    ],
)
def test_bad_class_tables_are_refused(tmp_path, table, reason):
    (tmp_path / "classes.tsv").write_text(table)
    with pytest.raises(DataFormatError, match=reason):
        read_classes(tmp_path / "classes.tsv")


def test_missing_or_too_short_genomes_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"classes\.tsv of the columns"):
        Genomics(source="genomes", folder=tmp_path)
    (tmp_path / "classes.tsv").write_text("file\tgenus\trole\tkingdom\na.fna\tA\tid\tb\nu.fna\tU\tood\tb\n")
    with pytest.raises(DataNotFoundError, match=r"2 genomes listed .* such as 'a\.fna'"):
        Genomics(source="genomes", folder=tmp_path)
    for name in "au":
        (tmp_path / f"{name}.fna").write_text(">s\n" + "ACGT" * 250 + "\n")
    with pytest.raises(DataFormatError, match=r"no block of 20000 bases is left for .* of A\. Add a genome"):
        Genomics(source="genomes", folder=tmp_path)
    rng = np.random.default_rng(0)
    (tmp_path / "a.fna").write_text(f">s\n{random_letters(rng, 100_000)}\n")
    with pytest.raises(DataFormatError, match="Ask for fewer"):
        Genomics(source="genomes", folder=tmp_path, n_train=10, n_val=1, n_test=5)
    with pytest.raises(ValueError, match="at least 1"):
        Genomics(source="genomes", folder=tmp_path, n_val=0)
    with pytest.raises(ValueError, match=r"val_fraction must be above 0 and below 0\.8"):
        Genomics(source="genomes", folder=tmp_path, val_fraction=0.9)
    with pytest.raises(ValueError, match="block must be at least"):
        GenomeFolder(tmp_path, block=100)


# real data


@pytest.mark.data
def test_the_published_sample_has_its_documented_reads_and_class_counts(data_dir):
    folder = data_dir / "genomics_ood"
    reads, labels = read_tfrecord_reads(folder / TRAIN / "in_tr.tfrecord")
    assert (reads.shape, reads.dtype, int(reads.max())) == ((1001, 250), np.uint8, 3)
    names = json.loads((folder / "label_dict.json").read_text())
    counts = json.loads((folder / TRAIN / "in_tr_nsample.json").read_text())
    assert np.bincount(labels).tolist() == [
        counts[name] for name, label in sorted(names.items(), key=lambda i: i[1])[:10]
    ]

    benchmark = Genomics(data_dir=data_dir)
    assert [len(s) for s in (benchmark.fit_set(), benchmark.test_in, *benchmark.test_oods)] == [901, 1001, 1001]
    assert benchmark.class_names == sorted(counts)
    assert len(benchmark.val_set()) == 100
    fit, val = ({bytes(read) for read in raw(s).astype(np.uint8)} for s in (benchmark.fit_set(), benchmark.val_set()))
    assert len(fit) == 901
    assert fit.isdisjoint(val)


@pytest.mark.data
def test_the_source_named_in_each_record_agrees_with_its_label(data_dir):
    folder = data_dir / "genomics_ood"
    genus_of = {label: genus for genus, label in json.loads((folder / "label_dict.json").read_text()).items()}
    for path in sorted(folder.glob("*/*.tfrecord")):
        named = [genus_of[y[0]] in z[0].decode() for _, (y, z) in read_examples(path, ["y", "z"])]
        assert len(named) == 1001
        # some organisms were renamed since, so not every description carries the genus
        assert np.mean(named) > 0.9


@pytest.mark.data
@pytest.mark.slow
def test_reads_cut_from_the_real_genomes_are_disjoint_and_balanced(data_dir):
    folder = GenomeFolder(data_dir / "genomes")
    assert (len(folder.genera("id")), len(folder.genera("ood"))) == (10, 10)
    cuts = folder.cut_id({"train": 2000, "val": 200, "test": 200})
    kept = {"escherichia_coli__MG1655", "neisseria_meningitidis__GCF_003355215"}
    kept |= {"staphylococcus_aureus__N315", "streptococcus_suis__GCF_002285535"}
    tested = {origin[0].removesuffix(".fna.gz") for origin in cuts["test"].origins}
    assert kept <= tested
    trained = {origin[0].removesuffix(".fna.gz") for origin in cuts["train"].origins}
    assert kept.isdisjoint(trained)
    spans = sorted((*origin, role) for role, cut in cuts.items() for origin in cut.origins)
    for (file, name, start, role), (other_file, other_name, after, other) in itertools.pairwise(spans):
        if (file, name) == (other_file, other_name) and role != other:
            assert after - (start + 250) >= 500
    train = {bytes(read) for read in cuts["train"].reads}
    assert train.isdisjoint(bytes(read) for role in ("val", "test") for read in cuts[role].reads)
    assert all(set(np.bincount(cut.genera).tolist()) == {len(cut.reads) // 10} for cut in cuts.values())
