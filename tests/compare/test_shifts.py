"""ID samples under a covariate shift in a comparison: their accuracy and false alarms, and no place among OOD sets."""

import numpy as np
import pytest
import torch
from pytorch_ood.detector import MaxSoftmax
from tiny_benchmark import CLASSES, WIDTH, Tiny, TinyNet, vectors

from rmd_plugin import RMD
from rmd_plugin.benchmarks import OODSet
from rmd_plugin.compare.comparison import compare
from rmd_plugin.compare.features import Extractor
from rmd_plugin.compare.rows import select
from rmd_plugin.report.tables import comparison_tables, decision_tables, near_far_means

DETECTORS = {"rmd": RMD, "msp": MaxSoftmax}


class Shifted(Tiny):
    """The classes of Tiny as two other scanners see them; nobody has labelled what the second one sees."""

    def load(self):
        y = torch.arange(45) % CLASSES
        noise = torch.randn(45, WIDTH, generator=torch.Generator().manual_seed(5))
        seen, parts = 4 * torch.eye(CLASSES, WIDTH)[y] + 2 * noise, super().load()
        parts.oods.append(OODSet("scanner", "shift", vectors(seen, y)))
        parts.oods.append(OODSet("unlabelled", "shift", vectors(seen + 1, np.full(45, -1))))
        return parts


def run(benchmark):
    extractor = Extractor(benchmark, TinyNet(), progress=False, batch_size=64)
    return extractor, compare(extractor, DETECTORS, benchmark="tiny", backbone="net", resamples=50)


@pytest.fixture(scope="module")
def shifted():
    return run(Shifted())


def test_a_shifted_set_has_false_alarms_and_accuracy_and_nothing_that_ood_has(shifted):
    _, result = shifted
    mine = [row for row in result.rows.itertuples() if row.ood in ("scanner", "unlabelled")]
    assert {row.distance for row in mine} == {"shift"}
    assert {(row.detector, row.ood, row.metric) for row in mine} == {
        ("", "scanner", "ACC_shift"),
        *((name, ood, "false_alarms_shift@0.05") for name in DETECTORS for ood in ("scanner", "unlabelled")),
    }
    assert all(set(scores) == {"test", "val", "near", "far"} for scores in result.scores.values())


def test_its_numbers_are_those_of_the_head_and_of_the_threshold(shifted):
    extractor, result = shifted
    features, labels = extractor.features("scanner").features, extractor.features("scanner").labels
    with torch.no_grad():
        right = (result.classifier(features).argmax(1) == labels).double().mean()
    (accuracy,) = select(result.rows, metric="ACC_shift").itertuples()
    assert accuracy.value == pytest.approx(float(right))
    (threshold,) = select(result.rows, detector="rmd", metric="threshold@0.05").itertuples()
    train = extractor.features("train")
    scores = RMD().fit_features(train.features, train.labels).predict_features(features)
    (alarms,) = select(result.rows, detector="rmd", ood="scanner", metric="false_alarms_shift@0.05").itertuples()
    assert alarms.value == pytest.approx(float((scores > threshold.value).double().mean()))
    assert 0 < alarms.value < 1
    assert alarms.low < alarms.value < alarms.high


def test_every_other_number_is_as_if_it_were_not_there(shifted):
    def others(result):
        kept = [row for row in result.rows.itertuples() if row.distance != "shift" and "seconds" not in row.metric]
        return [(row.detector, row.ood, row.metric, row.value, row.low, row.high) for row in kept]

    _, without = run(Tiny())
    np.testing.assert_equal(others(shifted[1]), others(without))
    assert near_far_means(shifted[1].rows).equals(near_far_means(without.rows))


def test_the_tables_name_it_beside_the_false_alarms_and_not_among_the_ood_sets(shifted):
    _, result = shifted
    (table,), (decisions,) = comparison_tables(result.rows), decision_tables(result.rows)
    assert not any("scanner" in column.title for column in table.columns)
    assert any(
        note.startswith("Accuracy on scanner, in-distribution under a covariate shift: ") for note in table.notes
    )
    titles = [(column.title, column.detail) for column in decisions.columns]
    assert ("False alarms, scanner", "(shifted ID)") in titles
    assert (
        titles.index(("False alarms, scanner", "(shifted ID)")) == titles.index(("False alarms", "(ID test set)")) + 1
    )
