"""A life after the fit: detectors that are fitted on moments take in samples, forget samples, and learn classes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from rmd_plugin.detectors.class_moments import ClassMoments
from rmd_plugin.detectors.files import check_state
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.detectors.shrinkage import ShrinkingDetector

#: of the names that the tensors of the moments have in a state
_PREFIX = "moments."


class UpdatingDetector(ShrinkingDetector):
    """Base class of the detectors that are fitted on moments, which add up: no old sample is needed for a new fit.

    After a fit the moments are in memory. With ``keep_moments=True`` they are part of ``state_dict()`` and of files, so
    that a loaded detector can go on. Every change is a whole new fit on the new moments, which takes as long as an
    eigendecomposition; if it raises, the detector is as it was.

    Example:
        >>> import torch
        >>> from rmd_plugin import RMD
        >>> z, y = torch.randn(300, 4), torch.arange(300) % 3
        >>> detector = RMD(keep_moments=True).fit_features(z[:200], y[:200])
        >>> detector.update(z[200:], y[200:]).moments.num_samples
        300
        >>> detector.forget(z[:50], y[:50]).moments.num_samples
        250
        >>> detector.add_class(torch.randn(40, 4) + 5, "cat")
        3
    """

    keep_moments: bool
    _moments: Moments | None = None
    _names: dict[int, str]
    _kind: type[Moments] = Moments  #: of the moments

    @abstractmethod
    def new_moments(self, num_classes: int | None = None, **kwargs: Any) -> ClassMoments:
        """An empty accumulator with this detector's options (and torchmetrics'), to ``compute()`` and fit on."""

    @abstractmethod
    def fit_moments(self, moments: Moments) -> Self:
        """Fit on moments, for example those of several processes, collected as :meth:`new_moments` does."""

    def _fit_batches(self, batches: Iterable[tuple[Tensor, Tensor]], *, progress: bool) -> Self:
        return self.fit_moments(self._moments_of(batches))

    def _moments_of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Moments:
        metric = self.new_moments(sync_on_compute=False)
        for z, y in batches:
            metric.update(z, y)
        return metric.compute()

    def _fit_changed(self, moments: Moments) -> Self:
        """Fit on changed moments, with all else as it was."""
        return self.fit_moments(moments)

    @staticmethod
    def _require_samples(moments: Moments) -> None:
        if moments.num_samples == 0:
            raise ValueError("the moments hold no in-distribution sample (label >= 0): there is nothing to fit.")

    # -- after the fit ------------------------------------------------------------------------------------------------

    @property
    def moments(self) -> Moments | None:
        """Moments of all samples that the detector stands on; None before the fit, or if a file did not keep them."""
        return self._moments

    @property
    def class_names(self) -> list[str]:
        """Names of the K classes: those that :meth:`add_class` was given; the others are called by their labels."""
        return [self._names.get(label, str(label)) for label in range(self.n_classes)]

    def update(self, z: Tensor, y: Tensor) -> Self:
        """Add samples: the detector becomes what a fit on all samples, old and new, would have given.

        Args:
            z: features of shape (N, D), or maps of shape (N, C, H, W), which are averaged over space.
            y: class labels of shape (N,). Samples with y < 0 are skipped; larger labels than before are new classes.

        Raises:
            ValueError: if features or labels do not fit, or the detector has no moments.
        """
        moments, new = self._require_moments(), self._collect(z, y)
        return self if new is None else self._refit(moments + new)

    def forget(self, z: Tensor, y: Tensor) -> Self:
        """Take away samples that were added before: the detector becomes what a fit without them would have given.

        A class without samples keeps its label and is never nearest. Samples that were never added are noticed where
        counts or variances would become negative, not in every case. Lost digits are warned of, with their number.

        Args:
            z: their features, as they were added.
            y: their labels. Samples with y < 0 are skipped.

        Raises:
            ValueError: if they cannot have been added, if too little is left to fit on, or there are no moments.
        """
        moments, old = self._require_moments(), self._collect(z, y)
        return self if old is None else self._refit(moments - old)

    def add_class(self, z: Tensor, name: str | None = None) -> int:
        """Add a class from its samples, and return its label, which is the number of classes before.

        Args:
            z: features of shape (N, D) or (N, C, H, W), at least one.
            name: what :attr:`class_names` calls it; by default its label.

        Raises:
            ValueError: if there is a class of this name, no sample, or the detector has no moments.
        """
        moments, names, label = self._require_moments(), self.class_names, self.n_classes
        if name in names:
            raise ValueError(f"class {names.index(name)} is named {name!r} already. Use update(z, y) to add samples.")
        new = self._collect(z, torch.full((len(z),), label))
        if new is None:
            raise ValueError(f"a new class needs at least one sample, got features of shape {tuple(z.shape)}.")
        self._refit(moments + new)
        self._names = self._names if name is None else self._names | {label: name}
        return label

    def _collect(self, z: Tensor, y: Tensor) -> Moments | None:
        """Moments of a batch; None if it has no ID sample."""
        metric = self.new_moments(num_features=self.num_features, sync_on_compute=False)
        metric.update(z, y)
        return metric.compute() if bool(metric.counts.any()) else None

    def _refit(self, moments: Moments) -> Self:
        names = self._names
        self._fit_changed(moments)
        self._names = names
        return self

    def _require_moments(self) -> Moments:
        self._require_fit()
        if self._moments is None:
            raise ValueError(
                f"this {type(self).__name__} has no moments, so nothing can be added or taken away: it was saved "
                "without them. Fit it with keep_moments=True and save it, or call fit_moments(Moments.load(path))."
            )
        return self._moments

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was fitted, as plain tensors and numbers, with ``keep_moments`` the moments too; not the encoder."""
        state = super().state_dict()
        state["options"]["keep_moments"] = self.keep_moments
        if self.keep_moments and self._moments is not None:
            kept = self._moments._parts()[1]
            state["tensors"] |= {_PREFIX + name: tensor.detach().clone() for name, tensor in kept.items()}
        return state | ({"class_names": self.class_names} if self._names else {})

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        """Take over what :meth:`state_dict` gave, including the options it was fitted with, moments and names.

        Raises:
            ValueError: if the state belongs to another detector or format, or no such fit can have left it.
        """
        names = check_state(state).get("class_names", [])
        if names and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError("the names of the classes are no list of texts. Expected what state_dict() gave.")
        if names and len(names) != state["options"].get("num_classes"):
            raise ValueError(f"there are {len(names)} names of classes, expected one for each. Was the state changed?")
        super().load_state_dict(state)
        self._names = {label: name for label, name in enumerate(names) if name != str(label)}
        return self

    def _set_fitted(self, state: dict[str, Tensor], num_classes: int, num_features: int) -> Self:
        self._moments, self._names = self._read_moments(state), {}
        own = {name: tensor for name, tensor in state.items() if not name.startswith(_PREFIX)}
        return super()._set_fitted(own, num_classes, num_features)

    def _check_tensors(self, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
        super()._check_tensors(tensors, sizes)
        kept = self._read_moments(tensors)
        if kept is not None:
            kept.check_content({"K": sizes["K"], "D": sizes["D"]})
            if kept.diagonal != (self.options.get("covariance") == "diagonal") or not kept.num_samples:
                raise ValueError("the moments beside the fit are not those that it was made from. Fit and save again.")

    def _read_moments(self, tensors: dict[str, Tensor]) -> Moments | None:
        """The moments in a state, if there are any."""
        kept = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(_PREFIX)}
        if not kept or any(tensor.is_meta for tensor in kept.values() if isinstance(tensor, Tensor)):
            return None
        about = {"normalized": self.options.get("normalize", False), "seed": self.options.get("seed", 0)}
        return self._kind._from_parts(about, kept)
