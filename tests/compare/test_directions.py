import functools

import numpy as np
from tiny_benchmark import Tiny, TinyNet

from rmd_plugin import RMD, Mahalanobis, MarginalMahalanobis
from rmd_plugin.compare.comparison import compare
from rmd_plugin.compare.directions import direction_terms
from rmd_plugin.compare.extraction import Extractor


def test_terms_add_up_to_the_scores_of_the_detectors_that_were_compared():
    extractor = Extractor(Tiny(), TinyNet(), progress=False, batch_size=64)
    shrunk = functools.partial(RMD, shrinkage=0.3)
    kinds = {"rmd": shrunk, "mahalanobis": Mahalanobis, "marginal": MarginalMahalanobis}
    result = compare(extractor, kinds, benchmark="tiny", backbone="net", resamples=0)
    found = direction_terms(extractor, result.detectors)
    assert list(found) == ["mahalanobis", "rmd"]
    for name, sets in found.items():
        for split, terms in sets.items():
            np.testing.assert_allclose(terms.sum(1), result.scores[name][split], rtol=1e-4, atol=1e-3)


def test_other_detectors_have_no_terms():
    extractor = Extractor(Tiny(), TinyNet(), progress=False, batch_size=64)
    result = compare(
        extractor, {"rmd": MarginalMahalanobis}, benchmark="tiny", backbone="net", resamples=0
    )  # a name alone is no RMD
    assert direction_terms(extractor, result.detectors) == {}
