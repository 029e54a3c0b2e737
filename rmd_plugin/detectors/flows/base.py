"""What the detectors of masked autoregressive flows share.

They start from the Gaussian fit. In coordinates u in which every class has unit covariance, the flow of class k acts on
u - c_k and begins as the identity, so p_k begins as the Gaussian of the Mahalanobis distance. A background flow acts
on v = L^-1 u, where L L^T is the background covariance in these coordinates, so p_0 begins as the Gaussian of MD_0.
The coordinates are as many as there are features, or only the K - 1 of RMD, in which the class means differ: p_k and
p_0 are equal Gaussians in all others, which cancel in the ratio.
Training can only improve on that: each flow keeps the epoch with the best held-out likelihood, the start included.
Flows of several transforms are trained from another start as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
from nflows.flows import Flow
from torch import Tensor, nn
from typing_extensions import Self

from rmd_plugin.detectors.base import Encoder
from rmd_plugin.detectors.class_moments import ClassMoments
from rmd_plugin.detectors.files import TensorSpec, check_tensors
from rmd_plugin.detectors.flows.fitting import MIN_SAMPLES, FlowFit, Role, TrainingOptions, train_flows
from rmd_plugin.detectors.flows.scoring import (
    PASS_SAMPLES,
    FlowBank,
    FlowScore,
    GaussianBank,
    Space,
    fit_start,
    project,
)
from rmd_plugin.detectors.flows.spec import FlowSpec, Kind, Parameters
from rmd_plugin.detectors.functional import listed, warn_numerical
from rmd_plugin.detectors.mahalanobis import RMD
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.detectors.shrinkage import Shrinkage, ShrinkingDetector
from rmd_plugin.encoding.features import pool_features

Sharing = Literal["per_class", "conditional"]

#: rows that are widened to float64 at a time
_CHUNK_ROWS = 8192


class FlowDetector(ShrinkingDetector):
    """Base class of the detectors that are made of flows.

    Features are kept in memory while the flows are trained (in their own dtype, plus one or two float32 copies). Ctrl-C
    ends the training with a warning; the detector then scores with the best flows it has had so far.

    Args:
        encoder: maps inputs to features of shape (B, D), or to maps (B, C, H, W), which are averaged over space. May be
            None where only the feature methods are used.
        space: where the flows act: ``"features"``, in all directions, as in the paper, or ``"discriminant"``, in the
            min(D, K - 1) in which the class means differ (those of :class:`rmd_plugin.RMD`).
        transforms: autoregressive transforms of a flow; the paper has one. Several are trained twice, from the Gaussian
            and from nflows' own random start, and the better held-out likelihood is kept.
        hidden_features: width of the masked networks. None takes as many as there are features, within 64 and 128.
        num_blocks: residual blocks of the masked networks.
        kind: ``"maf"``, affine as in the paper, or ``"rqs"``, rational-quadratic splines: more flexible and several
            times slower.
        num_bins: bins of a spline.
        tail_bound: a spline bends [-tail_bound, tail_bound], in standard deviations within a class.
        sharing: ``"per_class"``, a flow for each class as in the paper, or ``"conditional"``, one flow that is given
            the class as context: it is trained on all samples, for classes too small for flows of their own.
        max_epochs: largest number of passes over the training part; 0 gives the Gaussian detectors.
        batch_size: samples of one class in one step. All classes take their steps at the same time. The background flow
            and a conditional flow, which see all classes, take up to four times as many where that leaves 200 steps.
        lr: learning rate of AdamW.
        weight_decay: weight decay of AdamW, on weights, not on biases.
        validation_fraction: part of each class that is held out to find the best epoch of its flow. With 0 the training
            part decides, and only ``max_epochs`` ends the training.
        patience: epochs without a better held-out likelihood after which a flow is frozen, though not before its first
            100 steps.
        class_chunk: classes whose flows are trained together, which bounds the memory. None derives it from 1 GiB. It
            does not change the result.
        seed: of everything random. The global random state is neither used nor changed.
        shrinkage: of the within-class covariance, see :class:`rmd_plugin.RMD`.
        normalize: scale the features to unit length first.
        device: where to train and to score. None takes the device of the encoder, or of the features.
        progress: show a bar with the epoch, and training and validation loss in nats, if there is a terminal.
    """

    info = RMD.info
    _relative: ClassVar[bool]
    _before = {"space": "features"}  # noqa: RUF012
    hyperparameter_space: dict[str, list[Any]] = {  # noqa: RUF012
        "transforms": [1, 2],
        "kind": ["maf", "rqs"],
        "shrinkage": [0.0, 0.1],
    }

    def __init__(
        self,
        encoder: Encoder | None = None,
        *,
        space: Space = "features",
        transforms: int = 1,
        hidden_features: int | None = None,
        num_blocks: int = 1,
        kind: Kind = "maf",
        num_bins: int = 8,
        tail_bound: float = 5.0,
        sharing: Sharing = "per_class",
        max_epochs: int = 100,
        batch_size: int = 64,
        lr: float = 2e-3,
        weight_decay: float = 1e-4,
        validation_fraction: float = 0.1,
        patience: int = 10,
        class_chunk: int | None = None,
        seed: int = 0,
        shrinkage: Shrinkage = 0.0,
        normalize: bool = False,
        device: str | torch.device | None = None,
        progress: bool = True,
    ) -> None:
        super().__init__(encoder)
        self.space: Space = space
        self.transforms = transforms
        self.hidden_features = hidden_features
        self.num_blocks = num_blocks
        self.kind: Kind = kind
        self.num_bins = num_bins
        self.tail_bound = tail_bound
        self.sharing: Sharing = sharing
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.class_chunk = class_chunk
        self.seed = seed
        self.shrinkage = shrinkage
        self.normalize = normalize
        self.progress = progress
        self._check_options()
        if device is not None:
            self.to(device)

    # -- fitting --------------------------------------------------------------------------------------------------

    def _encoded_batches(self, loader: Iterable[Any], *, progress: bool) -> Iterator[tuple[Tensor, Tensor]]:
        # all of them are kept until the flows are trained
        return ((z.cpu(), y.cpu()) for z, y in super()._encoded_batches(loader, progress=progress))

    def _fit_batches(self, batches: Iterable[tuple[Tensor, Tensor]], *, progress: bool) -> Self:
        self._check_options()
        with torch.inference_mode(False), torch.no_grad():
            metric = ClassMoments(normalize=self.normalize, sync_on_compute=False)
            rows, labels = [], []
            for z, y in batches:
                metric.update(z, y)  # also refuses what cannot be fitted
                z, is_id = pool_features(z.detach()), y >= 0
                rows.append(z if bool(is_id.all()) else z[is_id.to(z.device)])
                labels.append(y[is_id].cpu().long())
            moments = metric.compute()
            self._warn_missing_classes(moments.counts)
            if self._relative and int((moments.counts > 0).sum()) == 1:
                message = "a single class is its own background, so the ratio says little. Use FlowLikelihood."
                warn_numerical(message, kind="ratio of a single class")
            z, y = rows[0] if len(rows) == 1 else torch.cat(rows), torch.cat(labels)
            del rows
            state = self._fit_state(moments, z, y, progress=progress) | self._intensity(moments)
            return self._set_fitted(state, moments.num_classes, moments.num_features)

    def update(self, z: Tensor, y: Tensor) -> Self:
        """Refused: flows are trained on samples, and keep none."""
        raise self._no_update()

    def forget(self, z: Tensor, y: Tensor) -> Self:
        """Refused, see :meth:`update`."""
        raise self._no_update()

    def add_class(self, z: Tensor, name: str | None = None) -> int:
        """Refused, see :meth:`update`."""
        raise self._no_update()

    def _no_update(self) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} is trained on samples and keeps none of them, so none can be added or taken away. "
            "Fit it again on all samples, or use RMD or FusedRMD(keep_moments=True), which can be updated."
        )

    def _fit_state(self, moments: Moments, z: Tensor, y: Tensor, *, progress: bool) -> dict[str, Tensor]:
        state = fit_start(moments, self.shrinkage, self.space)
        labels, points = state["classes"].cpu(), state["points"]
        index = torch.searchsorted(labels, y)
        device = z.device if self.device is None else self.device
        own = torch.empty(len(z), points.shape[1], dtype=torch.float32, device=device)
        background = torch.empty_like(own) if "background" in self._roles(self.options) else None
        for start in range(0, len(z), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            u = project(z[part].to(points.device), state, self.normalize)
            own[part] = (u - points[index[part].to(u.device)]).to(own)
            if background is not None:
                background[part] = (u @ state["background"]).to(own)
        options = self._training_options(progress=progress)

        fit = self._train_classes(own, index, labels, options)
        del own
        counts = torch.bincount(index, minlength=len(labels))
        state |= {"counts": counts, "plain": counts < MIN_SAMPLES, **fit.tensors("class")}
        self._warn(fit, labels)
        self.interrupted = fit.interrupted
        if background is not None:
            spec = self._spec(points.shape[1])
            options = replace(self._for_all(options, len(y)), max_epochs=0 if fit.interrupted else self.max_epochs)
            everything = torch.zeros(len(y), dtype=torch.long)
            fit = train_flows(spec, background, everything, 1, options, title="background flow")
            state |= fit.tensors("background")
            self._warn(fit, None)
            self.interrupted |= fit.interrupted
        return {name: tensor.to(device) for name, tensor in state.items()}

    def _train_classes(self, x: Tensor, index: Tensor, labels: Tensor, options: TrainingOptions) -> FlowFit:
        if self.sharing == "per_class":
            return train_flows(self._spec(x.shape[1]), x, index, len(labels), options, title="class flows")
        # a class with a handful of samples has the Gaussian fall-back here too: it must not bend the shared flow
        counts = torch.bincount(index, minlength=len(labels))
        large = counts[index] >= MIN_SAMPLES
        x, index = x[large.to(x.device)], index[large]
        spec, one = self._spec(x.shape[1], len(labels)), torch.zeros(len(index), dtype=torch.long)
        options = self._for_all(options, len(index))
        fit = train_flows(spec, x, one, 1, options, contexts=index, title="conditional flow")
        fit.skipped = (counts < MIN_SAMPLES).nonzero().flatten().tolist()
        return fit

    def _warn(self, fit: FlowFit, labels: Tensor | None) -> None:
        """Say what the training could not do; ``labels`` is None for the background flow."""

        def names(flows: list[int]) -> str:
            if labels is None:
                return "the background flow"
            if self.sharing == "conditional" and flows is fit.diverged:
                return "the conditional flow"
            return f"class{'es' if len(flows) > 1 else ''} {listed(labels[flows].tolist())}"

        if fit.skipped:
            message = f"fewer than {MIN_SAMPLES} samples, no flow is trained and the Gaussian is used"
            warn_numerical(f"{message}: {names(fit.skipped)}.", kind="classes too small for a flow")
        if fit.diverged:
            message = "the training ran into NaN or infinity and went back to the best parameters before"
            remedy = f"Try a learning rate below {self.lr:g}."
            kind = "diverged background flow" if labels is None else "diverged class flows"
            warn_numerical(f"{message}: {names(fit.diverged)}. {remedy}", kind=kind)
        if fit.interrupted:
            message = "the training was interrupted: every flow has the best parameters it has had so far."
            warnings.warn(message, UserWarning, stacklevel=5)

    # -- loading --------------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, TensorSpec]:
        sizes = {"shift": "D", "projection": "D q", "points": "k q", "background": "q q"}
        sizes |= {"log_volume": "", "background_log_volume": ""}
        layout = {name: TensorSpec(size) for name, size in sizes.items()}
        layout |= {"classes": TensorSpec("k", torch.int64, labels=True), "counts": TensorSpec("k", torch.int64)}
        return layout | {"plain": TensorSpec("k", torch.bool)}

    def _check_tensors(self, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
        super()._check_tensors(tensors, sizes)
        for role in self._roles(self.options):
            conditional = role == "class" and self.sharing == "conditional"
            flows = str(sizes["k"]) if role == "class" and not conditional else "1"
            layout = {f"{role}_epochs": TensorSpec(flows, torch.int64)}
            # NaN where nothing was trained
            losses = TensorSpec(flows, torch.float32, finite=False)
            layout |= {f"{role}_start_loss": losses, f"{role}_loss": losses}
            for name, value in self._spec(sizes["q"], sizes["k"] if conditional else 0).build().named_parameters():
                layout[f"{role}_flow.{name}"] = TensorSpec(" ".join(map(str, (flows, *value.shape))), torch.float32)
            check_tensors(tensors, layout, sizes)

    # -- scoring --------------------------------------------------------------------------------------------------

    def _build_module(self, dtype: torch.dtype) -> nn.Module:
        normalize = bool(self._fitted_options["normalize"])
        background: nn.Module | None = GaussianBank() if self._relative else None
        if "background" in self._roles(self._fitted_options):
            background = self._bank("background", dtype)
        return FlowScore(self._state, self._bank("class", dtype), background, normalize=normalize)

    @staticmethod
    def _roles(options: Mapping[str, Any]) -> tuple[Role, ...]:
        """The flows that there are with these options."""
        return ("class", "background") if options.get("background") == "flow" else ("class",)

    def _bank(self, role: Role, dtype: torch.dtype) -> FlowBank:
        params = {name: value.to(dtype) for name, value in self._parameters(role).items()}
        if role == "class":
            state, capped = self._state, self._fitted_options.get("background") == "gaussian"
            # on average over held-out samples; none where nothing was trained
            gain = (state["class_start_loss"] - state["class_loss"]).nan_to_num(0.0) if capped else None
            return FlowBank(self._fitted_spec(role), params, state["points"], state["plain"], gain)
        return FlowBank(self._fitted_spec(role), params, torch.zeros_like(self._state["points"][:1]))

    def _parameters(self, role: Role) -> Parameters:
        """Stacked parameters of the flows, under the names of nflows."""
        prefix = f"{role}_flow."
        return {name[len(prefix) :]: value for name, value in self._state.items() if name.startswith(prefix)}

    def _fitted_spec(self, role: Role) -> FlowSpec:
        """Shape of the fitted flows: of the fitted tensors, not of options that may have been changed since."""
        names = ("num_blocks", "transforms", "kind", "num_bins", "tail_bound")
        return FlowSpec.of(self._parameters(role), **{name: self._fitted_options[name] for name in names})

    def _score_dtype(self, dtype: torch.dtype, *, classes: bool = False) -> torch.dtype:
        return torch.float32  # of the flows; features are always whitened in float64

    def _chunk_rows(self, device: torch.device) -> int:
        return PASS_SAMPLES if device.type == "cpu" else 16 * PASS_SAMPLES

    def class_flow(self, label: int) -> Flow:
        """The flow of a class as a new ``nflows.flows.Flow``: of u - c_k, see :meth:`coordinates`.

        With ``sharing="conditional"`` it is the same for every class and takes the one-hot class, among those that
        have samples, as context.
        """
        spec, position = self._fitted_spec("class"), self._position(label)
        return spec.unstack(self._parameters("class"), 0 if spec.contexts else position)

    def coordinates(self, z: Tensor, label: int | None = None) -> Tensor:
        """Where the flows act: features in coordinates in which each class has mean zero and unit covariance.

        Args:
            z: features of shape (B, D) or (B, C, H, W).
            label: the class whose centre is subtracted; None subtracts the background mean.

        Returns:
            Coordinates of shape (B, q); q < D where features are constant or linearly dependent.
        """
        centre = 0.0 if label is None else self._state["points"][self._position(label)]
        return self._map_chunks(z, lambda module, rows: module.whiten(rows) - centre)  # type: ignore[operator]

    def _position(self, label: int) -> int:
        """Place of a class among those that have samples."""
        position = (self._require_classes() == label).nonzero().flatten()
        if not len(position):
            raise ValueError(f"no flow for class {label!r}. Classes with samples: {self._state['classes'].tolist()}.")
        return int(position)

    def training_report(self) -> list[dict[str, int | float | str]]:
        """How the training of each flow went, one row per flow.

        Returns:
            Rows with ``flow`` (the label, "conditional" or "background"), ``epoch`` (whose parameters are kept, 0 for
            the Gaussian start), ``gaussian`` and ``trained`` (mean negative log-density of the held-out samples at the
            start and at that epoch, in nats, lower is better; NaN where nothing was trained).
        """
        labels = self._require_classes().tolist()
        flows = {"class": ["conditional"] if self._fitted_spec("class").contexts else labels}
        if "background" in self._roles(self._fitted_options):
            flows["background"] = ["background"]
        rows: list[dict[str, int | float | str]] = []
        for role, names in flows.items():
            columns = (self._state[f"{role}_{column}"].tolist() for column in ("epochs", "start_loss", "loss"))
            for values in zip(names, *columns, strict=True):
                rows.append(dict(zip(("flow", "epoch", "gaussian", "trained"), values, strict=True)))
        return rows

    # -- options --------------------------------------------------------------------------------------------------

    def _spec(self, width: int, contexts: int = 0) -> FlowSpec:
        hidden = min(max(width, 64), 128) if self.hidden_features is None else self.hidden_features
        return FlowSpec(
            width, hidden, self.num_blocks, self.transforms, self.kind, self.num_bins, self.tail_bound, contexts
        )

    def _training_options(self, *, progress: bool) -> TrainingOptions:
        names = ("max_epochs", "batch_size", "lr", "weight_decay", "validation_fraction", "patience", "seed")
        options = {name: getattr(self, name) for name in names}
        return TrainingOptions(**options, chunk=self.class_chunk, progress=progress)

    @staticmethod
    def _for_all(options: TrainingOptions, samples: int) -> TrainingOptions:
        """Options for a flow that sees all classes: thousands of small steps per epoch would only take longer."""
        size = min(max(options.batch_size, samples // 200), 4 * options.batch_size)
        return replace(options, batch_size=size)

    def _check_options(self) -> None:
        self._spec(1)
        self._training_options(progress=False)
        for name, choices in (("sharing", Sharing), ("space", Space)):
            check_choice(name, getattr(self, name), choices)
        super()._check_options()


def check_choice(name: str, value: object, choices: object) -> None:
    """Refuse an option that is none of a ``Literal``'s values."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}.")
