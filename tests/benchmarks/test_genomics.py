"""Genomics: published TFRecord and text layouts, and reads cut from genomes with train and test kept apart."""

import gzip
import hashlib
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from genomics_kit import ID_GENERA, OOD_TEST, OOD_VAL, TEST, TRAIN, VAL, encode, make_reads, records, write_published

from rmd_plugin.benchmarks import DataFormatError, DataNotFoundError, Genomics, genomics
from rmd_plugin.benchmarks.genomics import one_hot, read_fasta, read_tfrecord


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


def test_the_encodings_are_one_hot_and_tokens(tmp_path):
    write_published(tmp_path / "genomics_ood", [TRAIN, VAL, OOD_VAL])
    hot, plain = Genomics(data_dir=tmp_path), Genomics(data_dir=tmp_path, encoding="tokens")
    (x, label), (tokens, same) = hot.fit_set()[3], plain.fit_set()[3]
    assert label == same
    assert (tokens.shape, tokens.dtype) == ((250,), torch.int64)
    assert (x.shape, x.dtype) == ((4, 250), torch.float32)
    torch.testing.assert_close(x, torch.nn.functional.one_hot(tokens, 4).T.float())
    assert one_hot(torch.tensor([0, 4, 3])).tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]
    with pytest.raises(ValueError, match="encoding"):
        Genomics(data_dir=tmp_path, encoding="kmers")


def test_absent_or_partial_published_data_is_one_error_with_the_remedy(tmp_path):
    with pytest.raises(DataNotFoundError) as caught:
        Genomics(data_dir=tmp_path)
    words = ("download=True", "benchmark.download=true", "benchmark.source=genomes", str(tmp_path))
    assert all(word in str(caught.value) for word in words)
    write_published(tmp_path / "genomics_ood", [TRAIN, VAL])
    with pytest.raises(DataNotFoundError, match=f"incomplete: .*{OOD_VAL}"):
        Genomics(data_dir=tmp_path)


def test_download_fetches_the_archive_by_its_hash_and_unpacks_it(server, tmp_path, monkeypatch):
    write_published(tmp_path / "made", [TRAIN, VAL, OOD_VAL, TEST, OOD_TEST])
    folder, url = server
    archive = shutil.make_archive(str(folder / "genomics_ood"), "zip", tmp_path / "made")
    monkeypatch.setattr(genomics, "_URL", f"{url}/genomics_ood.zip")
    monkeypatch.setattr(genomics, "_SHA256", hashlib.sha256(Path(archive).read_bytes()).hexdigest())
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


def places(split, letters, files):
    """Where each read lies: file, sequence and start."""
    text = ["".join("ACGT"[code] for code in read) for read in raw(split)]
    return [
        (file, key, letters[file][key].index(read))
        for read in text
        for file in files
        for key in letters[file]
        if read in letters[file][key]
    ]


def test_reads_are_stretches_of_their_genomes_and_train_val_and_test_keep_a_gap(genome_folder):
    folder, letters = genome_folder
    benchmark = Genomics(folder=folder, source="genomes", n_train=100, n_val=30, n_test=40, seed=1)
    splits = {"train": benchmark.fit_set(), "val": benchmark.val_set(), "test": benchmark.test_in}
    spans = []
    for role, split in splits.items():
        starts = places(split, letters, [file for file in letters if file[0] in "abc"])
        assert len(starts) == len(split)
        spans += [(*place, role) for place in starts]
    # the second genome of A is kept for testing
    assert {(file, role) for file, *_, role in spans if file[0] == "a"} == {
        ("a1.fna.gz", "train"), ("a1.fna.gz", "val"), ("a2.fna.gz", "test")
    }  # fmt: skip
    mixed = 0
    for (file, name, start, role), (other_file, other_name, after, other) in itertools.pairwise(sorted(spans)):
        if (file, name) == (other_file, other_name) and role != other:
            mixed += 1
            assert after - (start + 250) >= 500
    assert mixed > 10


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
    benchmark = Genomics(folder=tmp_path, source="genomes", n_train=10_000, n_val=10, n_test=4_000)
    train = {bytes(read) for read in raw(benchmark.fit_set()).astype(np.uint8)}
    forbidden = train | {bytes(3 - np.frombuffer(read, np.uint8)[::-1]) for read in train}
    test = raw(benchmark.test_in).astype(np.uint8)
    assert forbidden.isdisjoint(bytes(read) for read in test)
    # without the rule about 10,000 of 30,000 positions would strike
    assert len({bytes(read) for read in test}) == 4_000


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


def test_missing_or_too_short_genomes_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"classes\.tsv"):
        Genomics(source="genomes", folder=tmp_path)
    (tmp_path / "classes.tsv").write_text("file\tgenus\trole\tkingdom\na.fna\tA\tid\tb\nu.fna\tU\tood\tb\n")
    with pytest.raises(FileNotFoundError, match=r"a\.fna"):
        Genomics(source="genomes", folder=tmp_path)
    for name in "au":
        (tmp_path / f"{name}.fna").write_text(">s\n" + "ACGT" * 250 + "\n")
    with pytest.raises(DataFormatError, match="only 0 of"):
        Genomics(source="genomes", folder=tmp_path)


def test_any_changed_byte_of_a_record_file_is_noticed(tmp_path):
    path, reads = tmp_path / "a.tfrecord", make_reads([3, 11], 0)
    content = records([encode(read, label) for read, label in zip(reads, [3, 300], strict=True)])
    path.write_bytes(content)
    decoded, labels = read_tfrecord(path)
    assert np.array_equal(decoded, reads)
    assert labels.tolist() == [3, 300]
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DataFormatError, match=r"a\.tfrecord"):
            read_tfrecord(path)


def test_fasta_gives_the_letters_that_were_written(tmp_path):
    text = b">one of two\nACGT\nacgtu\r\nRN-\n>two\nGG\n"
    for content in (text, gzip.compress(text)):
        (tmp_path / "a.fna").write_bytes(content)
        sequences = read_fasta(tmp_path / "a.fna")
        assert [codes.tolist() for codes in sequences] == [[0, 1, 2, 3, 0, 1, 2, 3, 3, 4, 4, 4], [2, 2]]
    (tmp_path / "a.fna").write_bytes(b"no fasta")
    with pytest.raises(DataFormatError, match="FASTA"):
        read_fasta(tmp_path / "a.fna")


# real data


@pytest.mark.data
def test_the_published_sample_has_its_documented_reads_and_class_counts(data_dir):
    folder = data_dir / "genomics_ood"
    reads, labels = read_tfrecord(folder / TRAIN / "in_tr.tfrecord")
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
