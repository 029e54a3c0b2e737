"""Has the stream changed? A conformal test martingale on the scores of a deployed detector.

Every new score is ranked among the calibration scores *and all earlier scores of the stream*. As long as nothing has
changed, these ranks are independent and uniform, whatever the number of calibration scores (Vovk et al. 2003); p-values
against a fixed calibration set are not. Bets on the ranks are fair games, so their capital is a martingale that starts
at 1, and by Ville's inequality the chance that it *ever* reaches 1 / level is at most the level. A bet may begin at any
sample t and has the share 1 / (t (t + 1)) of the capital: the delay grows with the logarithm of the time without a
change only. If every bet begins with the capital 1 instead, the sum is that of Shiryaev and Roberts, whose mean time
until it reaches a number is at least that number.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Scores = Tensor | Sequence[float] | npt.NDArray[Any]
_Array = npt.NDArray[np.float64]

STATE_FORMAT = 1
#: exponents k of the bets k p^(k - 1), each on high scores (p small) and on low ones (1 - p small)
_EXPONENTS = np.array([0.5, 0.7, 0.85, 0.95])
#: scores that are compared with each other at a time
_CHUNK = 256
#: scores that wait to be merged into the sorted ones: at least so many, and at least this share of those
_WAITING, _WAITING_SHARE = 4096, 1 / 64
#: points of the curve; it is thinned out when there are twice as many
_CURVE_POINTS = 1000
#: attributes that change with the stream, beside the arrays
_PROGRESS = ("count", "alarm_at", "since", "stride")


class DriftAlarm:
    """Watches a stream of scores, and raises an alarm when they are no longer like the calibration scores.

    Args:
        scores: of held-out ID samples, shape (n,); the stream is compared with them.
        level: chance of ever raising a false alarm, however long the stream is.
        every: in place of a level, the mean number of samples between false alarms, at least. For streams without an
            end: changes are noticed as soon after years as on the first day.
        seed: draws the order among equal scores.

    Attributes:
        count: number of samples of the stream.
        alarm: whether there was an alarm. It stays until :meth:`reset`.
        alarm_at: the sample of the alarm, counted from 0, or None.
        since: the sample at which the change most likely began, None before an alarm.
        stride: samples between two points of the curve.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> alarm = DriftAlarm(rng.normal(size=500))
        >>> alarm.update(rng.normal(size=10_000))
        False
        >>> alarm.update(rng.normal(0.5, size=500))
        True
        >>> 9_950 < alarm.since < 10_050
        True
    """

    alarm_at: int | None
    since: int | None

    def __init__(self, scores: Scores, level: float = 0.01, every: int | None = None, seed: int = 0) -> None:
        check_level("level", level, 0.01)
        if every is not None and (isinstance(every, bool) or not isinstance(every, Real) or not every > 1):
            raise ValueError(f"every must be a number of samples, for example 100_000, got {every!r}.")
        self.level, self.every, self.seed = level, every, seed
        self.reset(scores)

    def reset(self, scores: Scores) -> Self:
        """Begin anew, with the scores (n,) of a new calibration. The promise holds from here on."""
        values = _checked(scores)
        if not len(values):
            raise ValueError("there is no calibration score to compare a stream with.")
        self._sorted, self._waiting = np.sort(values), np.empty(0)
        self._calibration = hashlib.sha256(self._sorted.tobytes()).hexdigest()
        self._rng = np.random.Generator(np.random.PCG64(self.seed))
        self.count, self.alarm_at, self.since = 0, None, None
        bets = 2 * len(_EXPONENTS)
        #: of each bet: log of its product from the first sample on, of the capital of all starts over that product,
        #: the smallest product, and the sample after it
        self._bets = np.stack([np.zeros(bets), np.full(bets, -np.inf), np.zeros(bets), np.zeros(bets)])
        self._log_value = -math.inf if self.every else 0.0
        self._curve, self.stride = np.empty((0, 2)), 1
        return self

    @property
    def alarm(self) -> bool:
        """Whether there was an alarm."""
        return self.alarm_at is not None

    @property
    def value(self) -> float:
        """The martingale: an alarm is raised at 1 / level; with ``every``, the sum that is compared with it."""
        return math.exp(self._log_value) if self._log_value < 709 else math.inf

    @property
    def _log_limit(self) -> float:
        return math.log(self.every) if self.every else -math.log(self.level)

    def __repr__(self) -> str:
        promise = f"every={self.every}" if self.every else f"level={self.level:g}"
        state = f"alarm at {self.alarm_at}, since {self.since}" if self.alarm else "no alarm"
        return f"<DriftAlarm({promise}): {self.count} samples, value {self.value:.3g}, {state}>"

    def update(self, scores: Scores) -> bool:
        """Add scores (B,) in the order of the stream; how they are split into batches does not matter.

        Returns:
            Whether there was an alarm by now.

        Raises:
            ValueError: if a score is NaN, or the shape is another. Nothing was added.
        """
        values = _checked(scores)
        for start in range(0, len(values), _CHUNK):
            self._bet(self._rank(values[start : start + _CHUNK]))
        return self.alarm

    def _rank(self, chunk: _Array) -> _Array:
        """Ranks in (0, 1) of scores (b,) among all earlier ones; large scores have small ones."""
        earlier = np.tri(len(chunk), k=-1, dtype=bool)
        above = (earlier & (chunk > chunk[:, None])).sum(1)
        equal = 1 + (earlier & (chunk == chunk[:, None])).sum(1)
        for part in (self._sorted, self._waiting):
            right = np.searchsorted(part, chunk, "right")
            above += len(part) - right
            equal += right - np.searchsorted(part, chunk, "left")
        total = len(self._sorted) + len(self._waiting) + 1 + np.arange(len(chunk))
        ranks: _Array = (above + (1 - self._rng.random(len(chunk))) * equal) / total
        self._waiting = np.sort(np.concatenate([self._waiting, chunk]), kind="stable")
        if len(self._waiting) > max(_WAITING, _WAITING_SHARE * len(self._sorted)):
            self._sorted = np.sort(np.concatenate([self._sorted, self._waiting]), kind="stable")
            self._waiting = np.empty(0)
        return ranks.clip(max=1 - 1e-16)

    def _bet(self, ranks: _Array) -> None:
        """Go on with ranks (b,). All sums run over the samples one by one, so that no split into batches changes them.

        With C_n the log of a bet's product over the samples up to n, and a start at t with the capital w_t, a bet has
        exp(C_n) sum_{t <= n} w_t exp(-C_{t-1}).
        """
        product, starts, _, _ = self._bets
        logs = np.stack([np.log(ranks), np.log1p(-ranks)], 1)[:, :, None]  # bets on high scores, and on low ones
        wins = (np.log(_EXPONENTS) + (_EXPONENTS - 1) * logs).reshape(len(ranks), -1)
        products = np.cumsum(np.vstack([product, wins]), axis=0)
        before, after = products[:-1], products[1:]
        number = self.count + np.arange(1.0, len(ranks) + 1)
        capital = np.zeros_like(number) if self.every else -np.log(number * (number + 1))
        starts = np.logaddexp.accumulate(np.vstack([starts, capital[:, None] - before]), axis=0)[1:]
        log_values = np.logaddexp.reduce(after + starts, axis=1) - math.log(len(product))
        if not self.every:
            log_values = np.logaddexp(log_values, -np.log(number + 1))  # the capital of the starts to come
        if not self.alarm and bool((log_values >= self._log_limit).any()):
            place = int((log_values >= self._log_limit).argmax())
            low, low_at = self._lowest(before[: place + 1])
            self.alarm_at = self.count + place
            self.since = int(low_at[(after[place] - low).argmax()])
        self._bets = np.stack([after[-1], starts[-1], *self._lowest(before)])
        self._log_value = float(log_values[-1])
        self._draw(number, log_values)
        self.count += len(ranks)

    def _lowest(self, products: _Array) -> tuple[_Array, _Array]:
        """The smallest products of all bets, with those (b, K) before the next samples, and the samples after them."""
        _, _, lowest, lowest_at = self._bets
        place = products.argmin(0)
        new = products[place, np.arange(len(lowest))]
        return np.minimum(lowest, new), np.where(new < lowest, self.count + place, lowest_at)

    def _draw(self, number: _Array, log_values: _Array) -> None:
        shown = number % self.stride == 0
        if shown.any():
            self._curve = np.vstack([self._curve, np.stack([number, log_values], 1)[shown]])
        while len(self._curve) > 2 * _CURVE_POINTS:
            self.stride *= 2
            self._curve = self._curve[self._curve[:, 0] % self.stride == 0]

    # -- saving and drawing -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, as plain tensors and numbers: 8 bytes for each score, and some hundred more."""
        scores = np.sort(np.concatenate([self._sorted, self._waiting]), kind="stable")
        arrays = {"scores": scores, "bets": self._bets, "curve": self._curve, "value": np.array(self._log_value)}
        return {
            "format": STATE_FORMAT,
            "options": {"level": self.level, "every": self.every, "seed": self.seed},
            "calibration": self._calibration,
            "progress": {name: getattr(self, name) for name in _PROGRESS},
            "tensors": {name: torch.tensor(array) for name, array in arrays.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        """Go on where :meth:`state_dict` was called, to the last bit.

        Raises:
            ValueError: if the state is of another calibration, level or seed, or of something else.
        """
        if not isinstance(state, dict) or state.get("format") != STATE_FORMAT or "progress" not in state:
            raise ValueError("this is not the state of a DriftAlarm. Expected what state_dict() gave.")
        own = {"level": self.level, "every": self.every, "seed": self.seed, "calibration": self._calibration}
        theirs = {**state["options"], "calibration": state["calibration"]}
        if changed := [name for name in own if own[name] != theirs[name]]:
            raise ValueError(f"the state is of another {changed[0]}. Begin a new one, or reset(scores).")
        tensors = {name: tensor.cpu().numpy().copy() for name, tensor in state["tensors"].items()}
        self._sorted, self._waiting = tensors["scores"], np.empty(0)
        self._bets, self._curve, self._log_value = tensors["bets"], tensors["curve"], float(tensors["value"])
        for name in _PROGRESS:
            setattr(self, name, state["progress"][name])
        # one draw for each sample: the state of the generator is their number
        self._rng = np.random.Generator(np.random.PCG64(self.seed).advance(self.count))
        return self

    def plot(self, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """The martingale over the stream, the limit, the alarm and where the change began; figure and axes."""
        from matplotlib.figure import Figure

        if ax is None:
            ax = Figure(figsize=(7, 2.8), layout="constrained").subplots()
        ax.plot(self._curve[:, 0], self._curve[:, 1] / math.log(10), color="C0", label="evidence of a change")
        ax.axhline(self._log_limit / math.log(10), color="C3", linestyle="--", label="alarm")
        if self.since is not None:
            ax.axvline(self.since, color="C3", linewidth=0.8, label=f"since sample {self.since}")
        ax.set_xlabel("samples of the stream")
        ax.set_ylabel("log10 of the martingale")
        ax.legend(loc="upper left")
        return cast("Figure", ax.figure), ax


def _checked(scores: Scores) -> _Array:
    """Scores as float64; refuses other shapes and NaN."""
    values = scores.detach().cpu().double().numpy() if isinstance(scores, Tensor) else np.asarray(scores, np.float64)
    if values.ndim != 1:
        raise ValueError(f"scores must have shape (B,), one per sample, got {values.shape}.")
    if bad := int(np.isnan(values).sum()):
        raise ValueError(f"{bad} of {len(values)} scores are NaN. Nothing was added; a sample without a score is inf.")
    return values


def check_level(name: str, value: float, example: float = 0.05) -> None:
    """Refuse what is no probability strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 < value < 1.0:
        raise ValueError(f"{name} must be a number between 0 and 1, for example {example}, got {value!r}.")
