import numpy as np
import pytest
import torch
from conftest import make_blobs
from torch import nn

from rmd_plugin import RMD, FusedRMD, Mahalanobis, MarginalMahalanobis, PartialMahalanobis

CASES = {
    "rmd": lambda: RMD(),
    "rmd normalized": lambda: RMD(normalize=True, shrinkage=0.1),
    "rmd diagonal": lambda: RMD(covariance="diagonal"),
    "mahalanobis": lambda: Mahalanobis(),
    "marginal": lambda: MarginalMahalanobis(),
    "partial": lambda: PartialMahalanobis(components=3),
    "fused": lambda: FusedRMD(w=torch.linspace(-1, 1, 60).view(5, 12), b=torch.ones(5)),
    "fused without a head": lambda: FusedRMD(),
}
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


@every_case
def test_the_module_has_buffers_only_and_gives_the_scores(make):
    z, y, x = make_blobs(dtype=torch.float32)
    detector = make().fit_features(z, y)
    module = detector.to_module()
    assert isinstance(module, nn.Module)
    assert not list(module.parameters())
    torch.testing.assert_close(module(x), detector.predict_features(x))
    copy = nn.Sequential(nn.Identity(), module)
    torch.testing.assert_close(copy(x), detector.predict_features(x))
    # the module is independent of the detector
    detector.fit_features(z + 1, y)
    torch.testing.assert_close(module(x), make().fit_features(z, y).predict_features(x))


@every_case
def test_torch_export_equals_eager_for_any_batch_size(make):
    z, y, x = make_blobs(dtype=torch.float32)
    detector = make().fit_features(z, y)
    batch = torch.export.Dim("batch")
    program = torch.export.export(detector.to_module(), (x[:3],), dynamic_shapes={"z": {0: batch}})
    torch.testing.assert_close(program.module()(x), detector.predict_features(x))


def test_torch_export_of_feature_maps():
    z, y, _ = make_blobs(dtype=torch.float32)
    detector = RMD().fit_features(z, y)
    maps = torch.randn(4, 12, 3, 3)
    program = torch.export.export(detector.to_module(), (maps,))
    torch.testing.assert_close(program.module()(maps), detector.predict_features(maps))


def test_the_module_is_differentiable():
    z, y, x = make_blobs()
    module = RMD().fit_features(z, y).to_module(torch.float64)
    assert torch.autograd.gradcheck(module, (x[:4].clone().requires_grad_(),))


@pytest.mark.slow
@every_case
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnxruntime_agrees_with_eager(make, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    z, y, x = make_blobs(dtype=torch.float32)
    detector = make().fit_features(z, y)
    path = tmp_path / "detector.onnx"
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        detector.to_module(torch.float32), (x[:3],), path, dynamo=True, dynamic_shapes={"z": {0: batch}}, verbose=False
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = detector.predict_features(x).numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
