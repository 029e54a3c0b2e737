import functools

import pytest
import torch
from pytorch_ood import detector as framework
from pytorch_ood.api import FeaturesDetector
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, FusedRMD, PartialMahalanobis
from rmd_plugin.compare.adapters import Encoded, NetworkParts, NotSupported, Representation, adopt, build

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
def parts(data):
    net = data[0]
    return NetworkParts(feature_dim=D, num_classes=K, encoder=net.body, head=net.fc)


# the detector on features <-> the same on the network, as the framework documents it
ON_NETWORK = {
    ("MaxSoftmax", "EnergyBased", "GEN", "KLMatching", "OpenMax", "TemperatureScaling", "ODIN"): lambda kind, n: kind(
        n
    ),
    ("KNN", "GMM", "Mahalanobis", "RMD", "MahalanobisODIN", RMD): lambda kind, n: kind(n.features),
    ("SHE", "fDBD", "NNGuide", "NCI", "PNML", "LTS", FusedRMD): lambda kind, n: kind(n.features, n.fc),
    ("ReAct", "ASH", "SCALE", "VRA"): lambda kind, n: kind(n.maps, n.from_maps),
    ("ViM",): lambda kind, n: kind(n.features, d=6, w=n.fc.weight, b=n.fc.bias),
    ("GradNorm",): lambda kind, n: kind(n, param_filter=lambda name: name == "fc.weight"),
    ("GradUncertainty",): lambda kind, n: kind(n, param_filter=lambda name: name.startswith("fc")),
    ("NACUE",): lambda kind, n: kind(n, layers=[n.body]),
}
BUILT = {
    kind: functools.partial(make, kind)
    for names, make in ON_NETWORK.items()
    for kind in (getattr(framework, name) if isinstance(name, str) else name for name in names)
}


def scores_from_features(adapter, net, x, y, new):
    """Fit and score as the comparison does, from features wherever the table says so."""
    with torch.no_grad():
        train, test = (Encoded(net.features(batch), net(batch), y, batch) for batch in (x, new))
    adapter.fit(DataLoader(TensorDataset(x, y), 64) if adapter.fitted_on is Representation.INPUTS else train)
    return adapter.score(test.take(adapter.scored_on))


@pytest.mark.parametrize("kind", BUILT, ids=lambda kind: f"{kind.__module__.split('.')[0]}-{kind.__name__}")
def test_scores_from_features_are_those_of_the_detector_on_the_network(kind, data, parts):
    net, x, y, new = data
    found = scores_from_features(build(kind, parts), net, x, y, new)
    direct = BUILT[kind](net)
    # NAC and the gradient detectors need a graph that starts at the network's own parameters
    net.requires_grad_(kind is framework.NACUE)
    expected = direct.fit(DataLoader(TensorDataset(x, y), 64)).predict(new)
    net.requires_grad_(False)
    assert found.shape == (50,)
    assert torch.allclose(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


class Stages(nn.Module):
    """Two stages that need a stem before, and a normalisation behind them before the pooling."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU())

    def forward(self, x):
        return self.pool(self.layer2(self.layer1(self.stem(x))))

    def pool(self, maps):
        return self.norm(maps).relu().mean(dim=(2, 3))


# as the framework's documentation cuts a network into parts
BY_HAND = {
    framework.Gram: lambda first, second, head: framework.Gram(head, [first, second], K),
    framework.MultiMahalanobis: lambda first, second, head: framework.MultiMahalanobis([first, second]),
    framework.RankFeat: lambda first, second, head: framework.RankFeat(lambda x: second(first(x)), head),
}


@pytest.mark.parametrize("layers", [None, "layer*"])
@pytest.mark.parametrize("kind", BY_HAND, ids=lambda kind: kind.__name__)
def test_detectors_on_inner_layers_score_as_on_a_network_that_is_cut_by_hand(kind, layers):
    torch.manual_seed(0)
    encoder, head = Stages().eval().requires_grad_(False), nn.Linear(8, K).requires_grad_(False)
    x, y, new = torch.randn(120, 1, 8, 8), torch.arange(120) % K, torch.randn(20, 1, 8, 8) * 2
    parts = NetworkParts(8, K, encoder=encoder, head=head, sample=x[:1])
    adapter = build(functools.partial(kind, layers=layers), parts)
    first = nn.Sequential(encoder.stem, encoder.layer1)
    by_hand = BY_HAND[kind](first, encoder.layer2, lambda maps: head(encoder.pool(maps)))
    loader = DataLoader(TensorDataset(x, y), 50)
    torch.manual_seed(1)  # Gram draws what it holds out
    adapter.fit(loader)
    torch.manual_seed(1)
    expected = by_hand.fit(loader).predict(new)
    found = adapter.score(Encoded(encoder(new), None, None, new).take(adapter.scored_on))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert not found.requires_grad


def test_layers_that_there_are_not_are_a_reason(data):
    encoder = Stages()
    parts = NetworkParts(8, K, encoder=encoder, head=nn.Linear(8, K), sample=torch.zeros(1, 1, 8, 8))
    with pytest.raises(NotSupported, match="layer9"):
        build(functools.partial(framework.Gram, layers=["layer9"]), parts)
    with pytest.raises(NotSupported, match="inner layers"):
        build(framework.Gram, NetworkParts(D, K, encoder=data[0].body, head=data[0].fc, sample=data[1][:1]))


def test_what_is_set_is_kept_and_what_is_null_is_filled_in(parts):
    assert build(functools.partial(framework.ViM, d=2), parts).detector.d == 2
    assert build(functools.partial(framework.ViM, d=None), parts).detector.d == D // 2
    assert build(functools.partial(PartialMahalanobis, components=None), parts).detector.components == K - 1
    assert build(functools.partial(framework.KNN, k=7), parts).detector.k == 7
    wide = NetworkParts(feature_dim=512, num_classes=10, head=nn.Linear(512, 10))
    assert build(framework.ViM, wide).detector.d == 64


def test_a_head_is_given_once_and_one_that_is_set_is_kept(parts):
    weight = torch.ones(2, D)
    assert torch.equal(build(functools.partial(FusedRMD, w=weight), parts).detector.head.weight, weight)
    found = build(FusedRMD, parts).detector.head
    assert torch.equal(found.weight, parts.head.weight)
    assert found is not parts.head
    assert build(FusedRMD, NetworkParts(feature_dim=D, num_classes=K)).detector.head is None


@pytest.mark.parametrize(
    ("factory", "change", "reason"),
    [
        (framework.MaxSoftmax, {"head": None}, "needs a classifier"),
        (framework.ODIN, {"encoder": None}, "only features are there"),
        (framework.ODIN, {"differentiable": False}, "no real numbers"),
        (functools.partial(framework.DICE), {}, "needs p, which no backbone gives"),
        (framework.WeightedEBO, {}, "VOS"),
        (framework.MCM, {}, "text embeddings"),
        (framework.Gram, {}, "inner layers"),
        (framework.MCD, {}, "no dropout"),
    ],
)
def test_what_the_backbone_does_not_give_is_told_in_one_sentence(factory, change, reason, parts):
    with pytest.raises(NotSupported, match=reason) as caught:
        build(factory, NetworkParts(**{**vars(parts), **change}))
    assert "\n" not in str(caught.value)


def test_dropout_and_text_embeddings_are_used_where_they_are(data):
    noisy = nn.Sequential(data[0].body, nn.Dropout(0.5))
    rich = NetworkParts(D, K, encoder=noisy, head=data[0].fc, text_embeddings=torch.eye(K, D))
    assert build(framework.MCD, rich).scored_on is Representation.INPUTS
    scores = build(framework.MCM, rich).detector.predict_features(torch.eye(D)[:4])
    assert scores.argmax() == 3  # the only one that is no class


class Own(FeaturesDetector):
    """A user's detector, which pytorch-ood does not know."""

    def __init__(self, encoder, head=None, seed=3, d=5):
        self.encoder, self.head, self.seed, self.d = encoder, head, seed, d

    def predict(self, x):
        return self.encoder(x)[:, 0]


def test_a_detector_of_the_users_own_is_served_by_the_names_of_its_parameters(parts):
    detector = build(Own, NetworkParts(**{**vars(parts), "seed": 9})).detector
    assert (detector.encoder, detector.seed, detector.d) == (None, 9, 5)
    assert isinstance(detector.head, nn.Linear)
    assert build(Own, NetworkParts(D, K)).detector.head is None


def test_what_makes_no_detector_is_refused(parts):
    for factory in (dict, lambda: RMD(), functools.partial(framework.KNN, None)):
        with pytest.raises(TypeError, match="expected a detector class"):
            build(factory, parts)


def test_a_detector_that_somebody_else_made_is_fed_by_what_it_offers(data):
    net = data[0]
    fed = {
        RMD(): ("MOMENTS", "FEATURES"),
        framework.KNN(None): ("FEATURES", "FEATURES"),
        framework.KLMatching(None): ("LOGITS", "LOGITS"),
        framework.MaxSoftmax(None): (None, "LOGITS"),
        framework.ReAct(net.maps, net.from_maps): ("INPUTS", "INPUTS"),
        framework.MahalanobisODIN(net.features): ("INPUTS", "INPUTS"),
        framework.ODIN(net): (None, "INPUTS"),
    }
    for detector, (fitted_on, scored_on) in fed.items():
        adapter = adopt(detector)
        assert adapter.fitted_on is (None if fitted_on is None else Representation[fitted_on])
        assert adapter.scored_on is Representation[scored_on]


def test_a_whole_network_takes_the_place_of_encoder_and_head(data):
    assert build(framework.ODIN, NetworkParts(model=data[0])).detector.model is data[0]
