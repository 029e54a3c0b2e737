import numpy as np
import pytest
import torch

from rmd_plugin.benchmarks import CLINC150, Intents


def rows(split):
    return torch.stack([split[place][0] for place in range(len(split))]).numpy()


def test_every_intent_has_as_many_queries_in_each_part():
    benchmark = Intents()
    for split, count in ((benchmark.fit_set(), 20), (benchmark.val_set(), 5), (benchmark.test_in, 10)):
        assert np.bincount(split.labels).tolist() == [count] * 150
    assert benchmark.distance == {"out_of_scope": "near"}
    assert (benchmark.test_oods[0].labels == -1).all()
    assert rows(benchmark.fit_set()).dtype == np.float32


def test_no_query_is_trained_and_tested_on():
    benchmark = Intents()
    train = {row.tobytes() for row in rows(benchmark.fit_set())}
    test = [row.tobytes() for row in rows(benchmark.test_in)]
    # the published splits themselves repeat a handful of queries
    assert sum(row in train for row in test) <= 3
    assert not any(row.tobytes() in train for row in rows(benchmark.test_oods[0]))


@pytest.mark.data
def test_the_packaged_embeddings_are_those_of_the_published_queries():
    pytest.importorskip("transformers")
    from make_intents import FILE, PER_INTENT, chosen, embeddings

    clinc, benchmark = CLINC150(), Intents()
    assert benchmark.class_names == clinc.class_names
    packaged = {"train": benchmark.fit_set(), "val": benchmark.val_set(), "test": benchmark.test_in}
    packaged["out_of_scope"] = benchmark.test_oods[0]
    for name, (queries, labels) in chosen(clinc).items():
        split, some = packaged[name], np.arange(0, len(labels), 7)
        assert len(split) == len(labels)
        if name in PER_INTENT:
            np.testing.assert_array_equal(split.labels, labels)
        expected = embeddings([queries[place] for place in some])
        np.testing.assert_allclose(rows(split)[some], expected, atol=0.51 * np.load(FILE)["step"])  # 8 bits
