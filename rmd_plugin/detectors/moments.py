"""Class moments: counts, means and covariances of labelled features, which add up over parts of the data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from rmd_plugin.detectors.cancellation import never_added, remaining_scatter
from rmd_plugin.detectors.files import File, TensorSpec, check_tensors, naming, read_state, write_state
from rmd_plugin.detectors.functional import listed

_TENSORS = ("counts", "shift", "sums", "second")
#: size of a sum that is left where nothing should be, relative to its terms: more than float32 features differ by
_RESIDUE = 1e-5


@dataclass(frozen=True, eq=False)
class Moments:
    """First and second moments of labelled features, in float64.

    Moments of disjoint sets of samples add up: ``a + b`` is what one pass over both would have given. ``a - b`` takes
    samples away that were added before, and refuses those that cannot have been: counts or variances would be negative.

    Attributes:
        counts: samples per class, shape (K,).
        shift: point that was subtracted from every feature before summing, shape (D,).
        sums: sum of the shifted features of each class, shape (K, D).
        second: sum of the outer products of the shifted features over all classes, shape (D, D), or only its
            diagonal, shape (D,).
        normalized: whether the features were scaled to unit length before.

    Example:
        >>> import torch
        >>> from rmd_plugin import ClassMoments
        >>> metric = ClassMoments()
        >>> metric.update(torch.tensor([[0.0, 1.0], [2.0, 1.0], [5.0, 5.0]]), torch.tensor([0, 0, 1]))
        >>> moments = metric.compute()
        >>> moments.means
        tensor([[1., 1.],
                [5., 5.]], dtype=torch.float64)
        >>> (moments + moments).num_samples
        6
        >>> (moments + moments - moments).num_samples
        3
    """

    counts: Tensor
    shift: Tensor
    sums: Tensor
    second: Tensor
    normalized: bool = False

    @property
    def num_classes(self) -> int:
        """K, including classes that never occurred."""
        return self.counts.numel()

    @property
    def num_features(self) -> int:
        """Width D of the features."""
        return self.shift.numel()

    @property
    def num_samples(self) -> int:
        """N, the number of in-distribution samples."""
        return int(self.counts.sum())

    @property
    def diagonal(self) -> bool:
        """Whether only the diagonal of the second moment was kept; covariances then have shape (D,)."""
        return self.second.ndim == 1

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.counts.device

    @property
    def means(self) -> Tensor:
        """Class means mu_k, shape (K, D); NaN for classes that never occurred."""
        return self.shift + self.sums / self.counts[:, None]

    @property
    def background_mean(self) -> Tensor:
        """Mean mu_0 of all samples, shape (D,)."""
        return self.shift + self.sums.sum(0) / self.counts.sum()

    @property
    def covariance(self) -> Tensor:
        """Covariance Sigma around the class means, divided by N, shape (D, D) or (D,)."""
        return self._per_sample(self._scatter())

    @property
    def background_covariance(self) -> Tensor:
        """Covariance Sigma_0 around the background mean, divided by N, shape (D, D) or (D,)."""
        return self._per_sample(self.second - self._square(self._total_root()))

    @property
    def between_covariance(self) -> Tensor:
        """Covariance Sigma_B of the class means, weighted by class size, shape (D, D) or (D,)."""
        return self._per_sample(self._square(self._class_roots()) - self._square(self._total_root()))

    def __add__(self, other: Moments) -> Moments:
        if not isinstance(other, Moments):
            return NotImplemented
        self._check_kind(other)
        classes = max(self.num_classes, other.num_classes)
        # an empty part has no shift of its own: keep the other's
        shift = self.shift if self.num_samples else other.shift
        first, second = (part.with_classes(classes).with_shift(shift) for part in (self, other.to(self.device)))
        return replace(
            first,
            counts=first.counts + second.counts,
            sums=first.sums + second.sums,
            second=first.second + second.second,
        )

    def __sub__(self, other: Moments) -> Moments:
        if not isinstance(other, Moments):
            return NotImplemented
        self._check_kind(other)
        classes = max(self.num_classes, other.num_classes)
        whole, part = self.with_classes(classes), other.to(self.device).with_classes(classes).with_shift(self.shift)
        counts, sums, size = whole.counts - part.counts, whole.sums - part.sums, whole._size().maximum(part._size())
        if wrong := (counts < 0).nonzero().flatten().tolist():
            have, less = int(whole.counts[wrong[0]]), int(part.counts[wrong[0]])
            raise never_added(f"class {wrong[0]} has {have} samples, fewer than the {less} to take away")
        empty = counts == 0
        scale = (whole.counts[empty, None] * size).sqrt()  # the largest sum of so many samples
        if bool((sums[empty].abs() > _RESIDUE * scale).any()):
            ratio = float((sums[empty].abs() / scale).nan_to_num(posinf=1.0).amax())
            raise never_added(f"a class without samples would keep a sum of {ratio:.2g} of what its samples had")
        sums[empty] = 0.0
        left = replace(whole, counts=counts, sums=sums, second=whole.second - part.second)
        freedom = left.num_samples - int((counts > 0).sum())
        scatter = remaining_scatter(left._scatter(), whole._scatter(), size, whole.num_samples, freedom)
        # around their own mean, so that a stream that moves away from the first samples loses no digits
        shift = self.shift + sums.sum(0) / counts.sum().clamp(min=1)
        left = replace(left, shift=shift, sums=sums - counts[:, None] * (shift - self.shift))
        return replace(left, second=scatter + left._square(left._class_roots()))

    def __radd__(self, other: object) -> Moments:
        # sum(parts) starts from the integer 0
        return self if other == 0 else NotImplemented

    def to(self, device: torch.device | str) -> Moments:
        """Copy on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in _TENSORS})

    def with_classes(self, num_classes: int) -> Moments:
        """The same moments with room for ``num_classes`` classes.

        Raises:
            ValueError: if there are samples of further classes.
        """
        missing = num_classes - self.num_classes
        if missing == 0:
            return self
        if bool(self.counts[max(0, num_classes) :].any()):
            last = int(self.counts.nonzero()[-1])
            raise ValueError(f"num_classes={num_classes} leaves no room for class {last}. Take it away with without().")
        return replace(self, counts=F.pad(self.counts, (0, missing)), sums=F.pad(self.sums, (0, 0, 0, missing)))

    def without(self, classes: Iterable[int]) -> Moments:
        """The same moments without some classes, whose labels stay free: those of the others are as before.

        One covariance is shared by all classes, so it stays as it is: what the samples of these classes have told about
        it is kept. To forget them altogether, subtract their moments.

        Raises:
            ValueError: if there is no such class.
        """
        chosen = sorted(set(classes))
        if wrong := [label for label in chosen if not 0 <= label < self.num_classes]:
            raise ValueError(f"there are classes 0 to {self.num_classes - 1}, got {listed(wrong)}.")
        counts, sums = self.counts.clone(), self.sums.clone()
        counts[chosen], sums[chosen] = 0.0, 0.0
        left = replace(self, counts=counts, sums=sums)
        scatter = self._scatter() * (counts.sum() / self.counts.sum().clamp(min=1))
        return replace(left, second=scatter + left._square(left._class_roots()))

    def with_shift(self, shift: Tensor) -> Moments:
        """The same moments, with the sums taken around another point of shape (D,)."""
        if torch.equal(shift, self.shift):
            return self
        delta, total, count = shift - self.shift, self.sums.sum(0), self.counts.sum()
        if self.diagonal:
            second = self.second - 2 * delta * total + count * delta.square()
        else:
            cross = torch.outer(delta, total)
            second = self.second - cross - cross.T + count * torch.outer(delta, delta)
        return replace(self, shift=shift, sums=self.sums - self.counts[:, None] * delta, second=second)

    def to_diagonal(self) -> Moments:
        """The same moments with only the diagonal of the second moment."""
        return self if self.diagonal else replace(self, second=self.second.diagonal().clone())

    def save(self, path: File) -> None:
        """Write the moments to a file that :meth:`load` reads: safetensors with a checksum, whole at every moment."""
        plain, tensors = self._parts()
        write_state(path, {"moments": plain, "tensors": tensors})

    @classmethod
    def load(cls, path: File, map_location: str | torch.device = "cpu") -> Self:
        """Read moments that :meth:`save` wrote, or ``torch.save`` before; nothing in the file is executed.

        Raises:
            DetectorFileError: a ValueError; if the file is damaged or holds something else.
        """
        with naming(path):
            state = read_state(path, map_location)
            if isinstance(state, dict) and "moments" in state:
                state = cls._from_parts(state["moments"], state["tensors"])
            if not isinstance(state, cls):
                raise ValueError(f"it holds a {type(state).__name__}, expected moments written by Moments.save.")
            state.check_content({})
            return state

    def check_content(self, sizes: dict[str, int]) -> None:
        """Refuse tensors that cannot be moments; ``sizes`` may give K and D, see :func:`.files.check_tensors`."""
        check_tensors(self._parts()[1], self._specs(), sizes)
        if bool((self.counts < 0).any()) or bool((self.counts % 1 > 0).any()):
            raise ValueError("the moments count samples with numbers other than 0, 1, 2, ... Expected whole ones.")

    def plain(self) -> Moments:
        """The moments alone, without what else was kept with them."""
        return Moments(self.counts, self.shift, self.sums, self.second, normalized=self.normalized)

    def _parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What :meth:`save` writes: plain data, and tensors."""
        return {"normalized": self.normalized}, {name: getattr(self, name) for name in _TENSORS}

    @classmethod
    def _from_parts(cls, plain: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        if missing := [name for name in _TENSORS if not isinstance(tensors.get(name), Tensor)]:
            raise ValueError(f"the moments lack {listed(missing)}. Expected what Moments.save wrote.")
        return cls(**{name: tensors[name] for name in _TENSORS}, normalized=plain["normalized"])

    def _specs(self) -> dict[str, TensorSpec]:
        sizes = {"counts": "K", "shift": "D", "sums": "K D", "second": "D" if self.diagonal else "D D"}
        return {name: TensorSpec(size) for name, size in sizes.items()}

    def _check_kind(self, other: Moments) -> None:
        for name in ("num_features", "normalized", "diagonal"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(
                    f"moments with {name}={mine} and {name}={theirs} do not add up. "
                    "Collect both parts on the same layer and with the same options."
                )

    def _size(self) -> Tensor:
        """Second moment of each feature, shape (D,)."""
        return self.second if self.diagonal else self.second.diagonal()

    def _scatter(self) -> Tensor:
        """Scatter around the class means, N times the covariance."""
        return self.second - self._square(self._class_roots())

    def _class_roots(self) -> Tensor:
        # rows r_k with sum_k r_k r_k^T = sum_k S_k S_k^T / n_k
        return self.sums * self.counts.clamp(min=1).rsqrt()[:, None]

    def _total_root(self) -> Tensor:
        return self.sums.sum(0, keepdim=True) * self.counts.sum().clamp(min=1).rsqrt()

    def _square(self, rows: Tensor) -> Tensor:
        return rows.square().sum(0) if self.diagonal else rows.T @ rows

    def _per_sample(self, scatter: Tensor) -> Tensor:
        scatter = scatter / self.counts.sum()
        if self.diagonal:
            return scatter.clamp_(min=0)
        scatter.diagonal().clamp_(min=0)  # rounding can leave -1e-17 for a constant feature
        return (scatter + scatter.T) / 2


# lets torch.load(..., weights_only=True) return Moments wherever this module has been imported
torch.serialization.add_safe_globals([Moments])
