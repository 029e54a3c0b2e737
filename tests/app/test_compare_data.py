"""Real models on real data: what ``rmd-compare`` is for. The numbers are those of small subsets, so bounds are wide."""

import functools

import pytest
import torch
from pytorch_ood import detector as framework
from torch.utils.data import DataLoader

from rmd_plugin import RMD, Mahalanobis, MarginalMahalanobis, PartialMahalanobis
from rmd_plugin.compare.cache import FeatureCache
from rmd_plugin.compare.comparison import compare
from rmd_plugin.compare.extraction import TEST, TRAIN, Extractor
from rmd_plugin.compare.rows import select

pytestmark = pytest.mark.data
OURS = {"rmd": RMD, "mahalanobis": Mahalanobis, "marginal": MarginalMahalanobis, "partial": PartialMahalanobis}


def area(result, detector, ood):
    (row,) = select(result.rows, detector=detector, ood=ood, metric="AUROC")
    assert row.ok, row.reason
    return row.value


@pytest.fixture(scope="module")
def intents(data_dir):
    pytest.importorskip("transformers")
    from rmd_plugin.backbones.text import BERT
    from rmd_plugin.benchmarks import CLINC150

    benchmark = CLINC150(data_dir=data_dir, limit_train=1500, limit_test=300)
    return Extractor(benchmark, BERT(max_length=32), progress=False)


def test_on_intents_rmd_is_clearly_above_md_and_dead_dimensions_do_no_harm(intents):
    result = compare(intents, OURS, benchmark="clinc150", backbone="bert")
    assert select(result.rows, metric="ACC")[0].value > 0.85
    assert area(result, "rmd", "oos_test") > area(result, "mahalanobis", "oos_test") + 0.02
    assert area(result, "rmd", "oos_test") > 0.9
    # MiniLM has two dimensions that never move, and one that moves by 1e-9 and counts like any other
    deviations = intents.features(TRAIN).features.double().std(0).sort().values
    assert deviations[1] < 1e-30 < deviations[2] < 1e-7
    for detector in OURS:
        rank = 381 if detector == "partial" else 382  # eigen-directions cannot tell it from rounding
        assert f"rank {rank} of 384" in select(result.rows, detector=detector, metric="AUROC")[0].reason


def test_tokens_have_no_gradient_and_the_table_says_so(intents):
    result = compare(intents, {"odin": framework.ODIN}, benchmark="clinc150", backbone="bert")
    assert "no real numbers" in select(result.rows, detector="odin")[0].reason


def test_the_cache_knows_a_text_backbone_again(intents, tmp_path):
    from rmd_plugin.backbones.text import BERT

    cache = FeatureCache(tmp_path)
    first = Extractor(intents.benchmark, BERT(max_length=32), cache=cache, progress=False)
    assert not first.features("oos_test").cached
    used = intents.backbone  # its tokenizer has worked already
    assert Extractor(intents.benchmark, used, cache=cache, progress=False).features("oos_test").cached
    longer = Extractor(intents.benchmark, BERT(max_length=16), cache=cache, progress=False)
    assert not longer.features("oos_test").cached


@pytest.fixture(scope="module")
def pictures(data_dir):
    pytest.importorskip("torchvision")
    from rmd_plugin.backbones.resnet import ResNet
    from rmd_plugin.benchmarks import CIFAR10vsCIFAR100

    benchmark = CIFAR10vsCIFAR100(data_dir=data_dir, limit_train=500, limit_test=200, far=[])
    weights = data_dir / "weights" / "cifar10_resnet56.pt"
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    backbone = ResNet(blocks=[9, 9, 9], widths=[16, 32, 64], shortcut="pad", mean=mean, std=std, checkpoint=weights)
    return Extractor(benchmark, backbone, progress=False)


def test_on_pictures_the_own_head_is_used_and_rmd_is_above_md(pictures):
    detectors = {**OURS, "msp": framework.MaxSoftmax, "odin": functools.partial(framework.ODIN, eps=0.002)}
    result = compare(pictures, detectors, benchmark="cifar10_vs_cifar100", backbone="resnet56_cifar")
    accuracy = select(result.rows, metric="ACC")[0]
    assert accuracy.reason == "the backbone's own head"
    assert accuracy.value > 0.9
    assert area(result, "rmd", "CIFAR100") > area(result, "mahalanobis", "CIFAR100") + 0.03
    assert min(area(result, name, "CIFAR100") for name in ("rmd", "msp", "odin")) > 0.75


def test_the_frameworks_own_evaluation_of_our_benchmark_agrees(pictures):
    result = compare(pictures, {"rmd": RMD, "knn": framework.KNN}, benchmark="b", backbone="n", resamples=0)
    backbone = pictures.backbone.eval()
    for name, kind in (("rmd", RMD), ("knn", framework.KNN)):
        detector = kind(backbone.encoder)
        fitted = detector.fit_features(pictures.features(TRAIN).features, pictures.features(TRAIN).labels)
        test = pictures.dataset(TEST) + pictures.dataset("CIFAR100")
        scores = torch.cat([fitted.predict(x) for x, _ in DataLoader(test, 128)])
        labels = torch.cat([pictures.features(TEST).labels, pictures.features("CIFAR100").labels])
        from pytorch_ood.metrics.functional import auroc

        assert float(auroc(scores, labels)) == pytest.approx(area(result, name, "CIFAR100"), abs=1e-4)
