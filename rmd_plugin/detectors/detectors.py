"""What our detectors share, and the Gaussian ones: RMD, Mahalanobis, MarginalMahalanobis, PartialMahalanobis.

All of them are pytorch-ood detectors, take the encoder as their first argument and score higher = more OOD. Gaussian
detectors are fitted from :class:`rmd_plugin.Moments`, so a fit streams over the data once and never holds it.

Distances are those of the paper, with covariances divided by N, the number of training samples. pytorch-ood does not
divide, so a threshold of its detectors has to be scaled: ``N * threshold`` for its RMD, ``2 * N * threshold`` for its
Mahalanobis, which halves the distance as well. Rankings, and so AUROC, AUPR and FPR95, are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, cast, dataclass_transform

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_ood.api import DetectorInfo, FeaturesDetector, ModelNotSetException, Paper, RequiresFittingException, Task
from torch import Tensor, nn

from rmd_plugin.detectors import gaussian
from rmd_plugin.detectors.gaussian import MAX_FLOAT32_AMPLIFICATION, QuadraticScore, Shrinkage
from rmd_plugin.detectors.moments import ClassMoments, Moments, Path, check_features, read_state, warn, write_state

if TYPE_CHECKING:
    from rmd_plugin.detectors.conformal import Calibrated

Encoder = Callable[[Any], Tensor]

#: of what ``state_dict`` gives
STATE_FORMAT = 1
#: of the names that the tensors of the moments have in a state
_MOMENTS = "moments."
#: what options in a state hold beside the options
_SIZES = ("num_classes", "num_features")
_NO_SAMPLES = "the detector is trained on samples and keeps none of them. Fit it again on all, or use RMD or FusedRMD."


def _info(title: str, venue: str, year: int, arxiv: str) -> DetectorInfo:
    paper = Paper(title=title, venue=venue, year=year, url=f"https://arxiv.org/abs/{arxiv}")
    return DetectorInfo(tasks=frozenset({Task.CLASSIFICATION}), paper=paper, ai_coded=True)


RMD_INFO = _info("A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection", "arXiv", 2021, "2106.09022")
_MD_TITLE = "A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks"
_MD_INFO = _info(_MD_TITLE, "NeurIPS", 2018, "1807.03888")
_PMD_INFO = _info("Why is the Mahalanobis Distance Effective for Anomaly Detection?", "arXiv", 2020, "2003.00402")


# -- batches through a network ----------------------------------------------------------------------------------------


@contextmanager
def evaluating(*networks: object) -> Iterator[None]:
    """Put modules, or those that methods belong to, into evaluation mode; every part gets its own mode back."""
    owners = [getattr(network, "__self__", network) for network in networks]
    modes = [(part, part.training) for owner in owners if isinstance(owner, nn.Module) for part in owner.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def to_device(batch: Any, device: torch.device | str | None) -> Any:
    """A batch on a device: what has a ``to`` of its own, and collections of tensors."""
    if device is None:
        return batch
    return batch.to(device) if hasattr(batch, "to") else apply_to_collection(batch, Tensor, lambda x: x.to(device))


def as_pair(batch: Any) -> tuple[Any, Any]:
    """The x and y of a batch; refuses what is no pair."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(f"the loader must yield pairs (x, y), got a {type(batch).__name__}.")
    return batch[0], batch[1]


# -- the base class ---------------------------------------------------------------------------------------------------


@dataclass_transform(field_specifiers=(field,))
class DeclaredOptions(FeaturesDetector):
    """Makes the ``__init__`` of each subclass from its annotated fields, as :func:`dataclasses.dataclass` does.

    An instance is none of a data class to others: OmegaConf, which holds what Hydra has instantiated, would take it for
    a structured config.
    """

    _fields: ClassVar[dict[str, Field[Any]]]
    _options: ClassVar[tuple[Field[Any], ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        bases = [base for base in cls.__mro__[1:] if "_fields" in vars(base)]
        for base in bases:
            base.__dataclass_fields__ = base._fields  # type: ignore[attr-defined]
        dataclass(eq=False, repr=False)(cls)
        cls._options = fields(cls)  # type: ignore[arg-type]
        cls._fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
        for base in [cls, *bases]:
            del base.__dataclass_fields__  # type: ignore[attr-defined]


class StatefulDetector(DeclaredOptions):
    """Base class of our detectors: streaming fits, scoring in chunks, changes after the fit, saving and export.

    Its options are annotated keyword-only fields, of which the ``__init__`` is made. A subclass gives
    :meth:`_fit_parameters`, from moments to tensors, and, unless these are those of :class:`.gaussian.QuadraticScore`,
    :meth:`_build_module`, from the tensors to the ``nn.Module`` that scores and is exported.

    Means and covariances have the names that pytorch-ood gives them. As there, they are None before the fit and of
    torch's default dtype (:class:`rmd_plugin.Moments` has float64). They belong to our scores: covariances are divided
    by the number N of training samples and include the shrinkage. Those of pytorch-ood are not divided: its ``cov`` is
    N times ours plus 1e-6 on the diagonal. With ``covariance="diagonal"`` they are diagonals, of shape (D,).

    Args:
        encoder: maps inputs to features of shape (B, D), or to maps (B, C, H, W), which are averaged over space. May be
            None where only the feature methods are used.
        shrinkage: of the within-class covariance towards a multiple of the identity: an intensity in [0, 1], ``"oas"``,
            which derives it from the data, or ``"auto"``, which is ``"oas"`` where N < 5 D, else 0. With N < 5 D and no
            shrinkage, detectors that suffer from it warn.
        normalize: scale the features to unit length first (Mahalanobis++).
        covariance: ``"tied"``, one covariance matrix for all classes as in the paper, or ``"diagonal"``, only its
            diagonal: O(D) memory and no matrix product in the fit, for very wide features.
        keep_moments: save the moments too, so that a loaded detector has :meth:`update`, :meth:`forget` and
            :meth:`add_class`: a file of K x D + D x D further numbers. Scoring does not use them.

    Attributes:
        moments: of all samples of the fit; None before it, or if a file did not keep them.
    """

    requires_fit = True
    from_moments: ClassVar[bool] = True  #: whether moments are all that a fit needs
    _kind: ClassVar[type[Moments]] = Moments  #: of these moments
    hyperparameter_space = {"shrinkage": [0.0, 0.01, 0.1, 0.5], "normalize": [False, True]}  # noqa: RUF012
    _chunk_rows: ClassVar[int] = 0  #: samples that are scored at a time; 0: as many as fit into the caches
    _needs_many_samples = False  #: whether scores suffer from N < 5 D without shrinkage

    encoder: Encoder | None = None
    _: KW_ONLY
    shrinkage: Shrinkage = 0.0
    normalize: bool = False
    covariance: Literal["tied", "diagonal"] = "tied"
    keep_moments: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        shrinkage = self.shrinkage
        if shrinkage not in ("oas", "auto") and not (hasattr(shrinkage, "__float__") and 0 <= float(shrinkage) <= 1):
            raise ValueError(f"shrinkage must be a number in [0, 1], 'oas' or 'auto', got {shrinkage!r}.")
        if self.covariance not in ("tied", "diagonal"):
            raise ValueError(f"covariance must be 'tied' or 'diagonal', got {self.covariance!r}.")
        if shrinkage in ("oas", "auto") and self.covariance == "diagonal":
            raise ValueError(f"shrinkage={shrinkage!r} needs covariance='tied'. Give a number in [0, 1] instead.")
        self._state: dict[str, Tensor] = {}
        self._fitted_options: dict[str, Any] = {}  # later changes of options take effect with the next fit
        self.moments: Moments | None = None
        self._class_names: dict[int, str] = {}
        self._modules: dict[torch.dtype, nn.Module] = {}

    def __repr__(self) -> str:
        defaults = {option.name: option.default for option in self._options}
        name = f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.options.items() if v != defaults[k])})"
        if not self.fitted:
            return name
        auto = f", intensity {self.intensity:.3g}" if self.shrinkage == "auto" else ""
        return f"<{name} fitted: {self.n_classes} classes, {self.num_features} features{auto}>"

    def _fit_parameters(self, moments: Moments) -> dict[str, Tensor]:
        """The tensors that the scoring module is made of, ``amplification`` among them."""
        raise NotImplementedError(_NO_SAMPLES)

    def _build_module(self, dtype: torch.dtype) -> nn.Module:
        """Scoring module with ``forward`` -> (B,), ``class_scores`` -> (B, K') and ``scored`` -> (B,), (B,)."""
        return QuadraticScore(self._state, dtype, normalize=self._fitted_options["normalize"])

    # -- fitting --------------------------------------------------------------------------------------------------

    def new_moments(self, num_classes: int | None = None, **kwargs: Any) -> ClassMoments:
        """An empty accumulator with this detector's options (and torchmetrics'), to ``compute()`` and fit on."""
        diagonal = self.covariance == "diagonal"
        return ClassMoments(num_classes, diagonal=diagonal, normalize=self.normalize, **kwargs)

    def fit(self, data_loader: Iterable[Any], **background: Any) -> Self:
        """Fit on a loader in one pass: batches are encoded in evaluation mode.

        Gaussian detectors keep only the moments of the features, FusedRMD a sample beside, flows all on the CPU. Under
        ``torch.distributed`` every process fits on its own loader. To fit a Gaussian detector on all of them, collect
        :class:`rmd_plugin.ClassMoments` yourself, whose ``compute`` adds them up, and call ``fit_moments``.

        Args:
            data_loader: yields pairs (x, y). Samples with y < 0 are skipped.
            background: of :class:`RMD`: ``background=``, another corpus that MD_0 is fitted to, in place of all
                training samples: a loader of pairs (x, y), whose labels do not matter, or its moments.

        Raises:
            ModelNotSetException: if the detector has no encoder.
            ValueError: if there is no in-distribution sample, or features are NaN or infinite.
        """
        return self._fit_batches(self._encode(data_loader), **background)

    def fit_features(self, z: Tensor, y: Tensor, **background: Any) -> Self:  # type: ignore[override]
        """Fit on features; works inside ``no_grad`` and ``inference_mode``.

        Args:
            z: features of shape (N, D), or maps of shape (N, C, H, W), which are averaged over space.
            y: class labels of shape (N,), integers of any type. Samples with y < 0 are skipped.
            background: of :class:`RMD`: ``background=``, features of another corpus of shape (M, D) or (M, C, H, W), or
                their moments.

        Raises:
            TypeError: if features or labels have the wrong dtype.
            ValueError: if shapes do not fit, features are NaN or infinite, or none varies within the classes.
        """
        return self._fit_batches([(z, y)], **background)

    def fit_moments(self, moments: Moments, **background: Any) -> Self:
        """Fit on moments, for example those of several processes, collected as :meth:`new_moments` does.

        Args:
            moments: of the training features.
            background: of :class:`RMD`: ``background=``, the moments of another corpus, whatever its labels are.

        Raises:
            ValueError: if the moments were collected with other options than the detector's.
        """
        moments = self._suited(moments)
        with torch.inference_mode(False), torch.no_grad():
            state = self._fit_parameters(moments, **background)
            if "intensity" not in state:
                intensity = gaussian.shrinkage_intensity(moments, self.shrinkage)
                state["intensity"] = moments.shift.new_tensor(intensity)
                if self._needs_many_samples and not intensity:
                    gaussian.warn_few_samples(moments)
        return self._set_fitted(state, moments.num_classes, moments.num_features, moments)

    def _suited(self, moments: Moments) -> Moments:
        """The moments, if they were collected as the detector's options want them."""
        if moments.num_samples == 0:
            raise ValueError("the moments hold no in-distribution sample: there is nothing to fit.")
        if moments.normalized != self.normalize:
            raise ValueError(f"the moments have normalize={moments.normalized}. Collect them with new_moments().")
        if missing := (moments.counts == 0).nonzero().flatten().tolist():
            warn(f"{len(missing)} classes have no sample and are never nearest: {missing[:8]}.")
        if self.covariance == "diagonal":
            return moments.to_diagonal()
        if moments.diagonal:
            raise ValueError("covariance='tied' needs more than the diagonal that was collected.")
        return moments

    def _encode(self, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Features and labels of a loader, batch by batch, in evaluation mode."""
        if self.encoder is None:
            raise ModelNotSetException("fit(loader) needs an encoder. Pass one, or use fit_features(z, y).")
        with evaluating(self.encoder):
            for x, y in map(as_pair, loader):
                with torch.no_grad():  # not around the yield: the caller's gradients are the caller's
                    z = self.encoder(to_device(x, self.device))
                yield z, torch.as_tensor(y)

    def _collect(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Moments:
        metric = self.new_moments(sync_on_compute=False)
        for z, y in batches:
            metric.update(z, y)
        return metric.compute()

    def _fit_batches(self, batches: Iterable[tuple[Tensor, Tensor]], **background: Any) -> Self:
        return self.fit_moments(self._collect(batches), **background)

    def _set_fitted(
        self, state: dict[str, Tensor], num_classes: int, num_features: int, moments: Moments | None = None
    ) -> Self:
        self._modules = {}
        device = self.device
        self._state = {name: tensor if device is None else tensor.to(device) for name, tensor in state.items()}
        self._fitted_options = self.options | {"num_classes": num_classes, "num_features": num_features}
        self.moments, self._class_names = moments, {}
        return self

    # -- after the fit ----------------------------------------------------------------------------------------------

    @property
    def class_names(self) -> list[str]:
        """Names of the K classes: those that :meth:`add_class` was given; the others are called by their labels."""
        return [self._class_names.get(label, str(label)) for label in range(self.n_classes)]

    def update(self, z: Tensor, y: Tensor) -> Self:
        """Add samples: the detector becomes what a fit on all samples, old and new, would have given.

        Args:
            z: features of shape (N, D), or maps of shape (N, C, H, W), which are averaged over space.
            y: class labels of shape (N,). Samples with y < 0 are skipped; larger labels than before are new classes.

        Raises:
            ValueError: if features or labels do not fit, or the detector has no moments.
        """
        return self._change(lambda moments, new: moments + new, z, y)

    def forget(self, z: Tensor, y: Tensor) -> Self:
        """Take away samples that were added before: the detector becomes what a fit without them would have given.

        A class without samples keeps its label and is never nearest. Moments are sums, so they cannot tell whether
        these samples were among them, or under another label: only counts below zero are refused.

        Args:
            z: their features, as they were added.
            y: their labels, as they were added. Samples with y < 0 are skipped.

        Raises:
            ValueError: if they cannot have been added, if too little is left to fit on, or there are no moments.
        """
        return self._change(lambda moments, old: moments - old, z, y)

    def add_class(self, z: Tensor, name: str | None = None) -> int:
        """Add a class from its samples, and return its label, which is the number of classes before.

        Args:
            z: features of shape (N, D) or (N, C, H, W), at least one.
            name: what :attr:`class_names` calls it; by default its label.

        Raises:
            ValueError: if there is a class of this name, no sample, or the detector has no moments.
        """
        names, label = self.class_names, self.n_classes
        if name in names:
            raise ValueError(f"class {names.index(name)} is named {name!r} already. Use update(z, y) to add samples.")
        if not len(z):
            raise ValueError(f"a new class needs at least one sample, got features of shape {tuple(z.shape)}.")
        self.update(z, torch.full((len(z),), label))
        self._class_names |= {} if name is None else {label: name}
        return label

    def _change(self, combine: Callable[[Moments, Moments], Moments], z: Tensor, y: Tensor) -> Self:
        self._require_fit()
        if not self.from_moments:
            raise NotImplementedError(_NO_SAMPLES)
        if self.moments is None:
            raise ValueError("without its moments a detector cannot change. Fit it with keep_moments=True.")
        metric, names = self.new_moments(num_features=self.num_features, sync_on_compute=False), self._class_names
        metric.update(z, y)
        if bool(metric.counts.any()):
            corpus = (self._state["shift"], self._state["background"]) if "background" in self._state else None
            background = {} if corpus is None else {"background": corpus}
            self.fit_moments(combine(self.moments, metric.compute()), **background)
            self._class_names = names
        return self

    # -- scoring --------------------------------------------------------------------------------------------------

    def predict(self, x: Any) -> Tensor:
        """OOD scores of shape (B,) of a batch of inputs, which pass through the encoder in the mode that it has."""
        self._require_fit()
        if self.encoder is None:
            raise ModelNotSetException("predict(x) needs an encoder. Pass one, or use predict_features(z).")
        with torch.no_grad():
            return self.predict_features(self.encoder(to_device(x, self.device)))

    def predict_features(self, z: Tensor) -> Tensor:
        """OOD scores of features.

        A sample with NaN or infinite features scores NaN, and no other. An empty batch gives an empty tensor.

        Args:
            z: features of shape (B, D), or maps of shape (B, C, H, W), which are averaged over space.

        Returns:
            Scores of shape (B,); higher means more likely out-of-distribution.

        Raises:
            RequiresFittingException: if the detector was not fitted.
            ValueError: if the shape of the features does not fit.
        """
        return self._map_chunks(z, lambda module, rows: module(rows))

    def class_scores(self, z: Tensor) -> Tensor:
        """Score of every class, whose minimum over the classes is the OOD score, of features (B, D) or (B, C, H, W).

        Returns:
            Scores of shape (B, K), where column k belongs to label k; infinite for classes without a training sample.
        """
        classes = self._require_classes()
        # exact: large terms cancel where the classes lie far apart
        scores = self._map_chunks(z, lambda module, rows: module.class_scores(rows), exact=True)  # type: ignore[operator]
        return scores.new_full((len(scores), self.n_classes), torch.inf).index_copy_(1, classes, scores)

    def nearest_class(self, z: Tensor) -> Tensor:
        """Label of the class with the smallest score, shape (B,), of features of shape (B, D) or (B, C, H, W)."""
        return self.scored_classes(z)[1]

    def scored_classes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """What :meth:`predict_features` and :meth:`nearest_class` give, in one pass."""
        labels, places = self._require_classes(), []

        def score(module: nn.Module, rows: Tensor) -> Tensor:
            scores, place = module.scored(rows)  # type: ignore[operator]
            places.append(place)
            return cast(Tensor, scores)

        return self._map_chunks(z, score), labels[torch.cat(places)]

    def contributions(self, z: Tensor) -> Tensor:
        """Terms of the score along each of the detector's directions; their sum is the score.

        The directions are ordered: for RMD by how much the classes differ along them, for the others by variance.
        Features (B, D) or (B, C, H, W) give terms of shape (B, q), where q is the number of directions.
        """
        return self._map_chunks(z, lambda module, rows: module.contributions(rows))  # type: ignore[operator]

    def _map_chunks(self, z: Tensor, score: Callable[[nn.Module, Tensor], Tensor], *, exact: bool = False) -> Tensor:
        """Apply the scoring module to row chunks that fit the cache (or, on a GPU, its memory)."""
        self._require_fit()
        z = check_features(z, self.num_features)
        z = z if self.device is None else z.to(self.device)
        dtype = torch.float64 if exact else self._score_dtype(z.dtype)
        if dtype not in self._modules:
            self._modules[dtype] = self.to_module(dtype)
        # maps are averaged inside, and widened before
        numbers = max(self.num_features, self._fitted_options["num_classes"]) * math.prod(z.shape[2:])
        rows = self._chunk_rows or max(64, (2**20 if z.device.type == "cpu" else 2**26) // numbers)
        with torch.no_grad():
            scores = torch.cat([score(self._modules[dtype], part) for part in z.split(rows)])
        # MD_0 of a corpus that lies far away has more digits than float32
        wide = z.dtype == torch.float64 or "background" in self._state
        return scores.to(torch.float64 if wide else torch.float32)

    def _score_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Precision in which features of a dtype are scored."""
        exact = dtype == torch.float64 or float(self._state["amplification"]) > MAX_FLOAT32_AMPLIFICATION
        return torch.float64 if exact else torch.float32

    def _require_fit(self) -> None:
        if not self._state:
            raise RequiresFittingException(f"{type(self).__name__} is not fitted. Call fit or fit_features, or load.")

    def _require_classes(self) -> Tensor:
        self._require_fit()
        if "classes" not in self._state:
            raise NotImplementedError(f"{type(self).__name__} has one Gaussian for all classes, so no class scores.")
        return self._state["classes"]

    @property
    def n_classes(self) -> int:
        """K, including classes without a training sample."""
        self._require_fit()
        return int(self._fitted_options["num_classes"])

    @property
    def num_features(self) -> int:
        """Width D of the features that the detector was fitted on."""
        self._require_fit()
        return int(self._fitted_options["num_features"])

    @property
    def fitted(self) -> bool:
        """Whether the detector can score."""
        return bool(self._state)

    @property
    def intensity(self) -> float:
        """What ``shrinkage`` came to in the fit, a number in [0, 1]."""
        self._require_fit()
        return float(self._state["intensity"])

    def _uncalibrated(self) -> NoReturn:
        raise AttributeError("decisions need a calibration: Calibrated(detector).calibrate(held_out_loader).")

    is_ood = p_value = select = threshold = calibrate = property(_uncalibrated)
    is_ood_features = p_value_features = select_features = calibrate_features = property(_uncalibrated)
    fit_calibrate = fit_calibrate_features = calibrate_scores = judge = drift_alarm = property(_uncalibrated)

    # -- means and covariances, as pytorch-ood names them ---------------------------------------------------------

    @property
    def mu(self) -> Tensor | None:
        """Class means mu_k, shape (K, D); NaN for classes without a sample."""
        return self._attribute(lambda moments: moments.means)

    @property
    def cov(self) -> Tensor | None:
        """Covariance Sigma around the class means, shape (D, D)."""
        return self._attribute(self._sigma)

    @property
    def precision(self) -> Tensor | None:
        """Inverse of Sigma, shape (D, D); its pseudo-inverse where directions have no variance."""
        return self._attribute(lambda moments: _inverse(self._sigma(moments)))

    @property
    def background_mu(self) -> Tensor | None:
        """Mean mu_0 of all samples, or of the background that the fit was given, shape (D,)."""
        return self._attribute(lambda moments: self._state["shift"])

    @property
    def background_cov(self) -> Tensor | None:
        """Covariance Sigma_0 around that mean, shape (D, D)."""
        return self._attribute(self._sigma_0)

    @property
    def background_precision(self) -> Tensor | None:
        """Inverse of Sigma_0, shape (D, D); its pseudo-inverse where directions have no variance."""
        return self._attribute(lambda moments: _inverse(self._sigma_0(moments)))

    def _sigma(self, moments: Moments) -> Tensor:
        return gaussian.shrunk_covariance(moments, self.intensity)

    def _sigma_0(self, moments: Moments) -> Tensor:
        corpus = self._state.get("background")
        return self._sigma(moments) + moments.between_covariance if corpus is None else corpus

    def _attribute(self, compute: Callable[[Moments], Tensor]) -> Tensor | None:
        if not self.fitted:
            return None
        if self.moments is None:
            raise AttributeError("means and covariances need the moments, which were not saved: keep_moments.")
        with torch.inference_mode(False), torch.no_grad():  # the framework differentiates through some of them
            return compute(self.moments).to(self.device, torch.get_default_dtype())

    # -- saving and export ----------------------------------------------------------------------------------------

    @property
    def options(self) -> dict[str, Any]:
        """The options that the detector was made with, as keyword arguments."""
        return {option.name: getattr(self, option.name) for option in self._options if option.init and option.kw_only}

    def state_dict(self) -> dict[str, Any]:
        """What was fitted, as plain tensors and numbers, with ``keep_moments`` the moments too; not the encoder."""
        self._require_fit()
        moments = self.moments.tensors() if self.keep_moments and self.moments is not None else {}
        tensors = self._state | {_MOMENTS + name: tensor for name, tensor in moments.items()}
        return {
            "format": STATE_FORMAT,
            "detector": type(self).__name__,
            "options": self._fitted_options | ({"keep_moments": True} if moments else {}),
            "tensors": {name: tensor.detach().clone() for name, tensor in tensors.items()},
            **({"class_names": self.class_names} if self._class_names else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        """Take over what :meth:`state_dict` gave, including the options it was fitted with, moments and names.

        Raises:
            ValueError: if the state belongs to another detector or format.
        """
        options = dict(check_state(state, type(self))["options"])
        sizes = {name: int(options.pop(name)) for name in _SIZES}
        for name, value in options.items():
            setattr(self, name, value)
        tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}
        saved = {name.removeprefix(_MOMENTS): tensors.pop(name) for name in [*tensors] if name.startswith(_MOMENTS)}
        self._set_fitted(tensors, **sizes, moments=self._kind(**saved, normalized=self.normalize) if saved else None)
        self._class_names = dict(enumerate(state.get("class_names", [])))
        return self

    @classmethod
    def from_state(cls, state: dict[str, Any], encoder: Encoder | None = None) -> Self:
        """Make a fitted detector from the result of :meth:`state_dict`."""
        options = check_state(state, cls)["options"].items()
        return cls(encoder, **{name: value for name, value in options if name not in _SIZES}).load_state_dict(state)

    def save(self, path: Path) -> None:
        """Write the fitted detector to a safetensors file, without its encoder; an earlier file is replaced whole."""
        write_state(path, self.state_dict())

    @classmethod
    def load(cls, path: Path, encoder: Encoder | None = None, *, map_location: str | torch.device = "cpu") -> Self:
        """Read a fitted detector, whose scores are bitwise those of the saved one; nothing in the file is executed.

        Args:
            path: file that :meth:`save` wrote.
            encoder: encoder for ``predict``; not needed for ``predict_features``.
            map_location: device for the tensors.

        Raises:
            ValueError: if the file is damaged or holds something else.
        """
        return cls.from_state(read_state(path, map_location), encoder)

    def to_module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The scoring as an ``nn.Module`` with buffers only, for ``torch.export``, ONNX or a model of your own.

        Its ``forward`` maps features to scores of shape (B,). It is differentiable, unlike ``predict_features``, and
        independent of the detector. By default it computes in the precision that float32 features are scored in.
        """
        self._require_fit()
        with torch.inference_mode(False):
            return self._build_module(dtype or self._score_dtype(torch.float32)).requires_grad_(False).eval()


def load_detector(state: dict[str, Any] | Path, encoder: Encoder | None = None) -> StatefulDetector | Calibrated:
    """Make a fitted detector from a saved file or a ``state_dict``, whichever of ours it belongs to.

    Args:
        state: path of a file that ``save`` wrote, or the result of ``state_dict``.
        encoder: encoder for ``predict``.

    Example:
        >>> import torch
        >>> from rmd_plugin import RMD, load_detector
        >>> z, y = torch.randn(100, 4), torch.arange(100) % 2
        >>> load_detector(RMD(shrinkage=0.1).fit_features(z, y).state_dict())
        <RMD(shrinkage=0.1) fitted: 2 classes, 4 features>
    """
    import rmd_plugin  # the package resolves public names lazily, so this import has to wait

    content = state if isinstance(state, dict) else read_state(state)
    name = check_state(content)["detector"]
    # only public names: the file must not choose what else is run
    kind: Any = getattr(rmd_plugin, name) if name in rmd_plugin.__all__ else None
    if not hasattr(kind, "from_state"):
        raise ValueError(f"{name} is no detector of rmd_plugin. Load it with the class that it belongs to.")
    detector: StatefulDetector | Calibrated = kind.from_state(content, encoder)
    return detector


def check_state(state: Any, kind: type | None = None) -> dict[str, Any]:
    """The state of a detector, if it is one of this format, and of the class ``kind``."""
    if not isinstance(state, dict) or not {"format", "detector", "options", "tensors"} <= state.keys():
        raise ValueError("this is not the state of a detector. Expected what state_dict() or save() gave.")
    if state["format"] != STATE_FORMAT:
        raise ValueError(f"the state has format {state['format']}, expected {STATE_FORMAT}. Is it of a newer version?")
    if kind is not None and state["detector"] != kind.__name__:
        raise ValueError(f"the state belongs to {state['detector']}, expected {kind.__name__}.")
    return state


def _inverse(covariance: Tensor) -> Tensor:
    if covariance.ndim == 1:
        cutoff = len(covariance) * torch.finfo(covariance.dtype).eps * covariance.amax()
        return torch.where(covariance > cutoff, 1 / covariance, 0.0)
    inverse: Tensor = torch.linalg.pinv(covariance, hermitian=True)
    return inverse


# -- the Gaussian detectors -------------------------------------------------------------------------------------------


class RMD(StatefulDetector):
    """Relative Mahalanobis distance: the distance to the nearest class minus the distance to the background.

    The score is min_k MD_k(z) - MD_0(z). A fitted RMD is one D x r projection and K points in r <= min(D, K - 1)
    dimensions: directions in which the class means agree cancel exactly and are not computed at all.

    Scores are N times those of ``pytorch_ood.detector.RMD``, where N is the number of training samples: its threshold t
    becomes ``N * t``.

    The background is all training samples, or another corpus that a fit is given: ``fit(loader, background=corpus)``.
    Then MD_0 is that of the corpus, no direction cancels, and a fitted RMD is a D x D projection: docs/detectors.md.
    Scores are float64, because MD_0 of a corpus that lies far away has more digits than float32.

    Example:
        >>> import torch
        >>> from rmd_plugin import RMD
        >>> _ = torch.manual_seed(0)
        >>> y = torch.arange(400) % 2
        >>> z = torch.randn(400, 8)
        >>> z[:, 0] += 8.0 * y
        >>> detector = RMD(keep_moments=True).fit_features(z, y)
        >>> near_ood = torch.randn(5, 8)
        >>> near_ood[:, 0] += 4.0  # half-way between the classes
        >>> bool(detector.predict_features(near_ood).min() > detector.predict_features(z).median())
        True
        >>> detector.add_class(torch.randn(40, 8) + 5, "cat")
        2
        >>> corpus = 3.0 * torch.randn(1000, 8)
        >>> RMD().fit_features(z, y, background=corpus).contributions(near_ood).shape
        torch.Size([5, 8])
    """

    info = RMD_INFO
    _needs_many_samples = True

    def _fit_parameters(self, moments: Moments, background: Any = None) -> dict[str, Tensor]:
        if background is None:
            return gaussian.fit_relative(moments, self.shrinkage)
        if isinstance(background, tuple):  # mean and covariance of an earlier fit
            mean, covariance = (part.to(moments.device) for part in background)
            return gaussian.fit_relative_to(moments, mean, covariance, self.shrinkage)
        if not isinstance(background, Moments):
            batches = [(background, None)] if isinstance(background, Tensor) else self._encode(background)
            # whatever its labels are: one below zero is OOD, and a background may be just that
            background = self._collect((z, torch.zeros(len(z), dtype=torch.long)) for z, _ in batches)
        corpus = self._suited(background).to(moments.device)
        if corpus.num_features != moments.num_features:
            raise ValueError(f"the background has {corpus.num_features} features: take both from the same layer.")
        return gaussian.fit_relative_to(moments, *gaussian.fit_background(corpus, self.shrinkage), self.shrinkage)


class Mahalanobis(StatefulDetector):
    """Squared Mahalanobis distance to the nearest class mean, min_k MD_k(z), with one covariance for all classes.

    Scores are 2 N times those of ``pytorch_ood.detector.Mahalanobis``, where N is the number of training samples: its
    threshold t becomes ``2 * N * t``.

    Example:
        >>> import torch
        >>> from rmd_plugin import Mahalanobis
        >>> z, y = torch.randn(200, 4), torch.arange(200) % 2
        >>> detector = Mahalanobis(shrinkage="oas").fit_features(z, y)
        >>> detector
        <Mahalanobis(shrinkage='oas') fitted: 2 classes, 4 features>
        >>> bool(detector.predict_features(100 + z).min() > detector.predict_features(z).max())
        True
    """

    info = _MD_INFO
    _needs_many_samples = True

    def _fit_parameters(self, moments: Moments) -> dict[str, Tensor]:
        return gaussian.fit_mahalanobis(moments, self.shrinkage)


class MarginalMahalanobis(StatefulDetector):
    """Squared Mahalanobis distance MD_0(z) to one Gaussian that is fitted to all classes together.

    Example:
        >>> import torch
        >>> from rmd_plugin import RMD, Mahalanobis, MarginalMahalanobis
        >>> z, y = torch.randn(200, 4), torch.arange(200) % 2
        >>> detectors = RMD(), Mahalanobis(), MarginalMahalanobis()
        >>> rmd, md, md_0 = (detector.fit_features(z, y).predict_features(z) for detector in detectors)
        >>> torch.allclose(rmd, md - md_0, atol=1e-4)
        True
    """

    info = _PMD_INFO

    def _fit_parameters(self, moments: Moments) -> dict[str, Tensor]:
        return gaussian.fit_marginal(moments, self.shrinkage)


class PartialMahalanobis(StatefulDetector):
    """Mahalanobis distance within part of the eigen-directions of the within-class covariance.

    Args:
        encoder: see :class:`RMD`.
        components: d, the number of leading eigen-directions.
        largest: sum over the d directions of largest variance; if False, over the D - d remaining ones.
        shrinkage: see :class:`RMD`.
        normalize: see :class:`RMD`.
        keep_moments: see :class:`RMD`.

    Example:
        >>> import torch
        >>> from rmd_plugin import PartialMahalanobis
        >>> z, y = torch.randn(200, 4), torch.arange(200) % 2
        >>> detector = PartialMahalanobis(components=3).fit_features(z, y)
        >>> detector.contributions(z).shape
        torch.Size([200, 3])
    """

    info = _PMD_INFO
    hyperparameter_space = {"components": [1, 2, 4, 8, 16, 32, 64, 128, 256]}  # noqa: RUF012

    _: KW_ONLY
    components: int
    largest: bool = True
    covariance: Literal["tied", "diagonal"] = field(init=False, default="tied")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._needs_many_samples = not self.largest  # few samples get small variances wrong
        lowest = 1 if self.largest else 0
        if not isinstance(self.components, int) or self.components < lowest:
            raise ValueError(f"components must be an integer of at least {lowest}, got {self.components!r}.")

    def _fit_parameters(self, moments: Moments) -> dict[str, Tensor]:
        return gaussian.fit_partial(moments, self.components, largest=self.largest, shrinkage=self.shrinkage)
