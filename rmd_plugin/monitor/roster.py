"""The detectors of a monitor: how they are made, which of them are fitted, and their state in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

from pytorch_ood.api import Detector, FeaturesDetector, LogitsDetector
from torch import nn

import rmd_plugin
from rmd_plugin.compare.adapters import Adapter, Representation, adopt, has_head, hearing_layers, takes_head
from rmd_plugin.compare.building import NetworkParts, NotSupported, build, detector_class, give_head
from rmd_plugin.detectors.calibrated import Calibrated
from rmd_plugin.detectors.conformal import Calibration
from rmd_plugin.detectors.snapshot import NotKeptError, damaged, restore_snapshot, take_snapshot
from rmd_plugin.encoding.batch_encoder import BatchEncoder, Encoding, Layered
from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.encoding.isolation import Evaluated
from rmd_plugin.encoding.layer_encoder import LayerEncoder
from rmd_plugin.monitor.lockstep import whole
from rmd_plugin.monitor.refit import FitOutcome
from rmd_plugin.shipped import detector_options

#: a detector; a class or partial of one, built from what the network offers; a function of the network that makes one
Spec = Detector | Callable[..., Detector]


class Roster:
    """Detectors by name, fitted or not; what may stand for one explains :class:`rmd_plugin.OODMonitor`."""

    def __init__(self, specs: Mapping[str, Spec | str] | Sequence[str]) -> None:
        self._specs = _read(specs)
        self.adapters: dict[str, Adapter] = {k: adopt(v) for k, v in self._specs.items() if isinstance(v, Detector)}
        #: those that came without a head, which they have a use for
        self._headless = {name for name, found in self.detectors.items() if takes_head(found) and not has_head(found)}
        #: epoch and step of each fit
        self.fitted: dict[str, dict[str, int]] = {}
        #: why a detector has no fit that could be used
        self.unfit: dict[str, str] = {}
        #: by which validation scores each fit decides
        self.calibrations: dict[str, Calibration] = {}
        #: where in the module the network is whose layers a detector names
        self.networks: dict[str, str] = {}
        self._snapshots: dict[str, dict[str, Any]] = {}  # until their detectors are there
        self._resuming = False

    @property
    def detectors(self) -> dict[str, Detector]:
        """The detectors that are there, by name."""
        return {name: self.adapters[name].detector for name in self._specs if name in self.adapters}

    @property
    def needs_parts(self) -> bool:
        """Whether some are built from what the network offers, or have a use for its head."""
        return bool(self._headless) or any(detector_class(spec) is not None for spec in self._specs.values())

    def head_users(self) -> dict[str, bool]:
        """Those whose logits are of the network's head, and (False) those that it had none for."""
        lent = {
            k: v for k, v in self.detectors.items() if k in self._headless or not isinstance(self._specs[k], Detector)
        }
        return {name: has_head(detector) for name, detector in lent.items() if takes_head(detector)}

    def build(self, module: nn.Module, parts: NetworkParts, names: Iterable[str] | None = None) -> None:
        """Make the detectors that are given as functions of the module or as classes, anew if they were there.

        By default those that are not fitted, or whose fit a checkpoint holds. A class that needs what the network does
        not offer is refused.
        """
        if names is None:
            names = [name for name in self._specs if name not in self.fitted or name in self._snapshots]
        for name in names:
            spec = self._specs[name]
            if not isinstance(spec, Detector):
                before = self.adapters.get(name)
                made = self._make(name, spec, module, parts)
                self.adapters[name] = made if before is None else replace(made, layers=before.layers)
            elif name in self._headless:
                give_head(spec, parts)
            if name in self._snapshots:
                self._restore(name, self._snapshots.pop(name))

    def listen(self, module: nn.Module, *, fitting: bool) -> list[LayerEncoder]:
        """What detectors on inner layers hear of a module, until :meth:`stop_listening`."""
        self.adapters = {k: hearing_layers(found, module, fitting=fitting) for k, found in self.adapters.items()}
        layers = {name: found.layers for name, found in self.adapters.items() if found.layers is not None}
        places = {id(part): name for name, part in module.named_modules()}
        self.networks |= {name: places[id(found.network)] for name, found in layers.items()}
        return list(layers.values())

    def stop_listening(self) -> None:
        """Let go of the module."""
        self.adapters = {name: replace(adapter, layers=None) for name, adapter in self.adapters.items()}

    @staticmethod
    def _make(name: str, spec: Callable[..., Detector], module: nn.Module, parts: NetworkParts) -> Adapter:
        kind = detector_class(spec)
        if kind is not None:
            try:
                return build(spec, parts)
            except NotSupported as reason:
                raise ValueError(
                    f"{name!r} cannot be monitored while the network trains: it {reason}. In Python, arguments are "
                    f"given by functools.partial({kind.__name__}, name=value)."
                ) from reason
        detector = spec(module)
        if not isinstance(detector, Detector):
            raise TypeError(f"{name!r} must be a pytorch_ood Detector, got {type(detector).__name__}.")
        return adopt(detector)

    def is_fitted(self, name: str) -> bool:
        """Whether a detector can score."""
        detector = self.adapters[name].detector
        if not detector.requires_fit:
            return True
        return name not in self.unfit and (name in self.fitted or bool(getattr(detector, "fitted", False)))

    @property
    def unusable(self) -> dict[str, str]:
        """Detectors that cannot score now, and why."""
        return {name: reason for name, reason in self.unfit.items() if self.adapters[name].detector.requires_fit}

    def note(self, outcomes: Mapping[str, FitOutcome], *, epoch: int, step: int) -> list[str]:
        """Note which detectors were fitted, and return a sentence for each reason why some were not."""
        reasons: dict[str, list[str]] = {}
        for name, outcome in outcomes.items():
            if outcome.failed:
                error = outcome.error
                reason = f"{type(error).__name__}: {error}" if error else "See the error of another process."
                reasons.setdefault(reason, []).append(name)
                self._give_up(name, f"it could not be fitted in epoch {epoch}. {reason}")
            else:
                self.fitted[name] = {"epoch": epoch, "step": step}
                self.unfit.pop(name, None)
                self.calibrations.pop(name, None)
        return [f"{', '.join(names)} could not be fitted in epoch {epoch}. {why}" for why, names in reasons.items()]

    def calibrate(self, name: str, calibration: Calibration) -> None:
        """Keep by which scores a detector decides."""
        self.calibrations[name] = calibration
        detector = self.detectors[name]
        if isinstance(detector, Calibrated):
            detector.calibration = calibration

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The fitted detectors, as plain data."""
        snapshots, unkept = {}, {}
        for name in filter(self.is_fitted, self.detectors):
            try:
                snapshots[name] = take_snapshot(self.detectors[name])
            except NotKeptError as reason:
                unkept[name] = str(reason)
        return {
            "detectors": snapshots,
            "fitted": {name: dict(when) for name, when in self.fitted.items()},
            "unfit": dict(self.unfit),
            "unkept": unkept,
            "networks": {name: place for name, place in self.networks.items() if name in snapshots},
            "calibrations": {name: dict(found.tensors) for name, found in self.calibrations.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, resuming: bool) -> None:
        """Take over fitted detectors. If training goes on, one whose options have changed since starts unfitted."""
        self._resuming = resuming
        self._snapshots = {name: s for name, s in state["detectors"].items() if name in self._specs}
        self.fitted = {name: dict(when) for name, when in state["fitted"].items() if name in self._snapshots}
        self.unfit = {name: reason for name, reason in state["unfit"].items() if name in self._specs}
        self.calibrations = {name: found for name, found in read_calibrations(state).items() if name in self._snapshots}
        for name in self._specs.keys() - self._snapshots.keys():
            why = state.get("unkept", {}).get(name, "")
            reason = "the checkpoint does not hold its fit. Pass fit_loader= to fit it again."
            self.unfit.setdefault(name, f"{reason} {why}".rstrip())
        for name in self.adapters.keys() & self._snapshots.keys():
            self._restore(name, self._snapshots.pop(name))

    def _restore(self, name: str, snapshot: dict[str, Any]) -> None:
        detector = self.adapters[name].detector
        options = getattr(detector, "options", {})
        saved = snapshot.get("state", {}).get("options", {})
        if self._resuming and any(saved.get(key) != value for key, value in options.items()):
            self._give_up(name, "the checkpoint holds a fit with other options.")
            return
        try:
            restore_snapshot(detector, snapshot)
        except ValueError as error:
            self._give_up(name, str(error))

    def _give_up(self, name: str, reason: str) -> None:
        self.fitted.pop(name, None)
        self.calibrations.pop(name, None)
        self.unfit[name] = reason


def read_calibrations(state: Mapping[str, Any]) -> dict[str, Calibration]:
    """The calibrations in the state of a monitor; those of before there were any are none."""
    found = state.get("calibrations", {})
    if not isinstance(found, dict) or not all(isinstance(tensors, dict) for tensors in found.values()):
        raise damaged(found)
    # classes do not occur here, so there is no smallest one
    return {name: Calibration.from_tensors(tensors, smallest_class=1) for name, tensors in found.items()}


def parts_of(encoder: BatchEncoder, *, head: str | None, seed: int) -> NetworkParts:
    """What a network offers to build detectors from.

    Where ``encoder`` has not found the head yet, it is taken to be ``head`` or, by default, the last ``nn.Linear``.
    """
    layers = dict(encoder.module.named_modules())
    name = encoder.head
    if name is None and encoder.by_head:
        linear = [found for found, layer in layers.items() if isinstance(layer, nn.Linear)]
        name = head if head in layers else (linear or [None])[-1]
    layer = None if name is None else layers.get(name)
    try:
        model: nn.Module | None = encoder.forward_target
    except EncodingError:
        model = None
    if not isinstance(layer, nn.Linear):
        return NetworkParts(model=model, listens=True, seed=seed)
    width, classes = layer.in_features, layer.out_features
    return NetworkParts(width, classes, head=whole(layer), model=model, listens=True, seed=seed)


def give_network(
    detector: Detector, module: nn.Module, *, head: str | None, encoder: str | None, part: str = ""
) -> None:
    """Put the network in front of a loaded detector: its features, its logits, layers of a part, or the whole of it."""
    network: nn.Module
    if isinstance(detector, LogitsDetector):
        name, network = "model", Encoding(module, head, encoder, logits=True)
    elif isinstance(detector, FeaturesDetector):
        name, network = "encoder", Encoding(module, head, encoder)
    elif adopt(detector).scored_on is Representation.POOLED:
        name, network = "encoder", Layered(module, head, encoder, part=part)
    else:
        name, network = "model", Evaluated(module)
    setattr(detector, name, network)


def _read(specs: Any) -> dict[str, Spec]:
    if isinstance(specs, str) or not isinstance(specs, (Mapping, Sequence)) or not len(specs):
        raise TypeError(f"expected detectors by name, such as {{'rmd': RMD()}}, got {specs!r}.")
    # Hydra gives mappings and sequences of its own kinds
    if isinstance(specs, Mapping):
        named = {name: _one(specs[name]) for name in specs}
    elif all(isinstance(name, str) for name in specs):
        named = {key: spec for name in specs for key, spec in _by_name(name).items()}
    else:
        raise TypeError(f"a list is for names, such as ['rmd', 'knn']. Give detectors by name, got {list(specs)!r}.")
    for name, spec in named.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"the name of a detector must be a text without '/', got {name!r}.")
        other = isinstance(spec, type) and not issubclass(spec, Detector)
        if other or (not isinstance(spec, Detector) and not callable(spec)):
            raise TypeError(
                f"{name!r} must be a pytorch_ood Detector, a class of one, or a function that makes one from the "
                f"LightningModule, got {spec.__name__ if other else type(spec).__name__}."
            )
    return named


def _one(spec: Any) -> Any:
    if not isinstance(spec, str):
        return spec
    found = _by_name(spec)
    if len(found) != 1:
        raise ValueError(f"{spec!r} stands for {len(found)} detectors: {', '.join(found)}. Give it in a list.")
    return next(iter(found.values()))


def _by_name(name: str) -> dict[str, Any]:
    """Detectors by the name of a class, rmd_plugin's or with its module, or of a config that ``detector=`` takes."""
    if "." in name:
        return {name.lower(): resolve_name(name)}
    own = getattr(rmd_plugin, name) if name in rmd_plugin.__all__ else None
    if isinstance(own, type) and issubclass(own, Detector) and own is not Calibrated:
        return {name.lower(): own()}
    found: dict[str, Any] = {}
    for key, options in detector_options(name).items():
        keywords = {option: value for option, value in options.items() if option != "_target_"}
        found[key] = partial(resolve_name(options["_target_"]), **keywords)
    return found
