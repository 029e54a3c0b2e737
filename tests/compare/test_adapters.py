import functools

import pytest
import torch
from pytorch_ood import detector as framework
from pytorch_ood.api import Detector, FeaturesDetector
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, PartialMahalanobis
from rmd_plugin.compare.adapters import Route, Sources, Unserved, prepare

D, K = 12, 3


class Net(nn.Module):
    """A network as the framework's documentation has it: ``features``, ``fc``, and the whole as logits."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, D), nn.ReLU())
        self.fc = nn.Linear(D, K)

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.fc(self.features(x))

    def maps(self, x):
        return self.features(x)[:, :, None, None]

    def from_maps(self, maps):
        return self.fc(maps.flatten(1))


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    y = torch.arange(240) % K
    x = torch.randn(240, 8)
    x[:, 0] += 3.0 * y
    net = Net().eval()
    optimiser = torch.optim.Adam(net.parameters(), 0.1)
    for _ in range(30):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net.requires_grad_(False), x, y, torch.randn(50, 8) * 2


@pytest.fixture(scope="module")
def sources(data):
    net = data[0]
    return Sources(feature_dim=D, num_classes=K, encoder=net.body, head=net.fc)


# the detector on features <-> the same on the network, as the framework documents it
BUILT = {
    framework.MaxSoftmax: lambda n: framework.MaxSoftmax(n),
    framework.EnergyBased: lambda n: framework.EnergyBased(n),
    framework.MaxLogit: lambda n: framework.MaxLogit(n),
    framework.Entropy: lambda n: framework.Entropy(n),
    framework.GEN: lambda n: framework.GEN(n),
    framework.KLMatching: lambda n: framework.KLMatching(n),
    framework.OpenMax: lambda n: framework.OpenMax(n),
    framework.TemperatureScaling: lambda n: framework.TemperatureScaling(n),
    framework.KNN: lambda n: framework.KNN(n.features),
    framework.ViM: lambda n: framework.ViM(n.features, d=6, w=n.fc.weight, b=n.fc.bias),
    framework.SHE: lambda n: framework.SHE(n.features, n.fc),
    framework.fDBD: lambda n: framework.fDBD(n.features, n.fc),
    framework.NNGuide: lambda n: framework.NNGuide(n.features, n.fc),
    framework.NCI: lambda n: framework.NCI(n.features, n.fc),
    framework.GMM: lambda n: framework.GMM(n.features),
    framework.PNML: lambda n: framework.PNML(n.features, n.fc),
    framework.LTS: lambda n: framework.LTS(n.features, n.fc),
    framework.Mahalanobis: lambda n: framework.Mahalanobis(n.features),
    framework.RMD: lambda n: framework.RMD(n.features),
    framework.ReAct: lambda n: framework.ReAct(n.maps, n.from_maps),
    framework.ASH: lambda n: framework.ASH(n.maps, n.from_maps),
    framework.SCALE: lambda n: framework.SCALE(n.maps, n.from_maps),
    framework.VRA: lambda n: framework.VRA(n.maps, n.from_maps),
    framework.GradNorm: lambda n: framework.GradNorm(n, param_filter=lambda name: name == "fc.weight"),
    framework.GradUncertainty: lambda n: framework.GradUncertainty(n, param_filter=lambda name: name.startswith("fc")),
    framework.NACUE: lambda n: framework.NACUE(n, layers=[n.body]),
    framework.ODIN: lambda n: framework.ODIN(n),
    framework.MahalanobisODIN: lambda n: framework.MahalanobisODIN(n.features),
    RMD: lambda n: RMD(n.features),
}


def scores_from_features(prepared, net, x, y, new):
    """Fit and score as the comparison does, from features where the route says so."""
    with torch.no_grad():
        z, z_new = net.features(x), net.features(new)
    detector, route = prepared.detector, prepared.route
    if route is Route.LOGITS:
        return detector.fit_logits(net.fc(z), y).predict_logits(net.fc(z_new))
    if route is Route.FEATURES:
        return detector.fit_features(z, y).predict_features(z_new)
    if route is Route.MAPS:
        return detector.fit_feature_maps(z[:, :, None, None], y).predict_feature_maps(z_new[:, :, None, None])
    if route is Route.HEAD:
        return detector.fit(DataLoader(TensorDataset(z, y), 64)).predict(z_new)
    fit = detector.fit_features(z, y) if hasattr(detector, "fit_features") else detector
    return fit.predict(new)


@pytest.mark.parametrize("kind", BUILT, ids=lambda kind: f"{kind.__module__.split('.')[0]}-{kind.__name__}")
def test_scores_from_features_are_those_of_the_detector_on_the_network(kind, data, sources):
    net, x, y, new = data
    found = scores_from_features(prepare(kind, sources), net, x, y, new)
    direct = BUILT[kind](net)
    # NAC and the gradient detectors need a graph that starts at the network's own parameters
    net.requires_grad_(kind is framework.NACUE)
    expected = direct.fit(DataLoader(TensorDataset(x, y), 64)).predict(new)
    net.requires_grad_(False)
    assert found.shape == (50,)
    assert torch.allclose(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


def test_what_is_set_is_kept_and_what_is_null_is_filled_in(sources):
    assert prepare(functools.partial(framework.ViM, d=2), sources).detector.d == 2
    assert prepare(functools.partial(framework.ViM, d=None), sources).detector.d == D // 2
    assert prepare(functools.partial(PartialMahalanobis, components=None), sources).detector.components == K - 1
    assert prepare(functools.partial(framework.KNN, k=7), sources).detector.k == 7
    wide = Sources(feature_dim=512, num_classes=10, head=nn.Linear(512, 10))
    assert prepare(framework.ViM, wide).detector.d == 64


def test_calibrated_detectors_are_fitted_on_validation_data(sources):
    assert prepare(framework.TemperatureScaling, sources).fit_split == "val"
    assert prepare(framework.KLMatching, sources).fit_split == "val"
    assert prepare(framework.MaxSoftmax, sources).fit_split == "train"


@pytest.mark.parametrize(
    ("factory", "change", "reason"),
    [
        (framework.MaxSoftmax, {"head": None}, "needs a classifier"),
        (framework.ViM, {"head": None}, "needs a classifier"),
        (framework.GradNorm, {"head": None}, "needs a classifier"),
        (framework.ODIN, {"encoder": None}, "only features are there"),
        (framework.ODIN, {"differentiable": False}, "no real numbers"),
        (framework.MahalanobisODIN, {"differentiable": False}, "no real numbers"),
        (functools.partial(framework.DICE), {}, "needs p, which no backbone gives"),
        (framework.WeightedEBO, {}, "VOS"),
        (framework.MCM, {}, "text embeddings"),
        (framework.Gram, {}, "inner layers"),
        (framework.MultiMahalanobis, {}, "inner layers"),
        (framework.RankFeat, {}, "inner layers"),
        (framework.MCD, {}, "no dropout"),
    ],
)
def test_what_the_backbone_cannot_serve_is_told_in_one_sentence(factory, change, reason, sources):
    with pytest.raises(Unserved, match=reason) as caught:
        prepare(factory, Sources(**{**vars(sources), **change}))
    assert "\n" not in str(caught.value)


def test_dropout_and_text_embeddings_are_used_where_they_are(data):
    noisy = nn.Sequential(data[0].body, nn.Dropout(0.5))
    rich = Sources(D, K, encoder=noisy, head=data[0].fc, text_embeddings=torch.eye(K, D))
    assert prepare(framework.MCD, rich).route is Route.INPUTS
    scores = prepare(framework.MCM, rich).detector.predict_features(torch.eye(D)[:4])
    assert scores.argmax() == 3  # the only one that is no class


class Own(FeaturesDetector):
    """A user's detector, which pytorch-ood does not know."""

    def __init__(self, encoder, head=None, seed=3, d=5):
        self.encoder, self.head, self.seed, self.d = encoder, head, seed, d

    def predict(self, x):
        return self.encoder(x)[:, 0]


def test_a_detector_of_the_users_own_is_served_by_the_names_of_its_parameters(sources):
    detector = prepare(Own, Sources(**{**vars(sources), "seed": 9})).detector
    assert (detector.encoder, detector.seed, detector.d) == (None, 9, 5)
    assert isinstance(detector.head, nn.Linear)
    assert prepare(Own, Sources(D, K)).detector.head is None


def test_detectors_get_their_own_copy_of_the_head(sources):
    head = prepare(framework.SHE, sources).detector.head
    nn.init.zeros_(head.weight)
    assert float(sources.head.weight.abs().sum()) > 0


def make_rmd(shrinkage) -> Detector:
    return RMD(shrinkage=shrinkage)


def test_what_makes_no_detector_is_refused(sources):
    for factory in (dict, lambda: RMD()):
        with pytest.raises(TypeError, match="expected a detector class"):
            prepare(factory, sources)
    with pytest.raises(TypeError, match="by name"):
        prepare(functools.partial(framework.KNN, None), sources)
    assert prepare(functools.partial(make_rmd, shrinkage=0.1), sources).detector.shrinkage == 0.1
