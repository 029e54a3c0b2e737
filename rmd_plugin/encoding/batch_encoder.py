"""Batch -> :class:`Encoded`: features, logits and labels, taken by hooks from a module's own forward pass.

The input of the classification layer (the *head*) is the features, its output the logits, so one forward pass serves
every detector and the module needs no change. Knows no detector and no Lightning.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from rmd_plugin.encoding.batches import Encoded, EncodingError, batch_inputs, batch_labels
from rmd_plugin.encoding.features import check_labels, pool_features, widened
from rmd_plugin.encoding.isolation import evaluating

_log = logging.getLogger(__name__)


class _Call(NamedTuple):
    """One call of the head, whose output is the logits, or of an encoder, which has none."""

    name: str
    features: Tensor
    logits: Tensor | None = None


class _Recorder:
    """The forward hooks. A copied or pickled module carries an idle recorder of its own."""

    def __init__(self) -> None:
        self.armed = False
        self.calls: list[_Call] = []
        self.outputs: list[Tensor] = []  # of the whole module

    def start(self) -> None:
        self.armed, self.calls, self.outputs = True, [], []

    def stop(self) -> tuple[list[_Call], list[Tensor]]:
        heard = self.calls, self.outputs
        self.armed, self.calls, self.outputs = False, [], []
        return heard

    def head(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """The input of a classification layer is the features, its output the logits."""
        if self.armed:
            features = next((z for z in (*args, *kwargs.values()) if isinstance(z, Tensor)), None)
            if features is not None:
                self.calls.append(_Call(name, _copied(features), _logits(output)))

    def encoder(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """The output of an encoder is the features."""
        if self.armed and isinstance(output, Tensor):
            self.calls.append(_Call("", _copied(output)))

    def root(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """The output of the whole module is the logits."""
        logits = _logits(getattr(output, "logits", output)) if self.armed else None
        if logits is not None:
            self.outputs.append(logits)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorder:
        return _Recorder()

    def __reduce__(self) -> tuple[type[_Recorder], tuple[()]]:
        return _Recorder, ()


class BatchEncoder:
    """Turns batches into :class:`Encoded` by listening to a module's forward pass.

    Either of two ways to use it: call it with a batch, and it runs the module in evaluation mode, without gradients;
    or put :meth:`start` and :meth:`take` around a forward pass that somebody else runs.

    Args:
        module: the network. Batches have to be on its device already.
        head: dotted name of the classification layer. By default the last ``nn.Linear`` that fires.
        encoder: the other way to the features: the name of a submodule (its output is the features) or of a method of
            the module, or any callable; methods and callables get the inputs of the batch.
        forward: ``forward(module, batch)`` runs the module. By default ``module(x)`` for batches (x, y) and
            ``module(**inputs)`` for dicts.
        labels: ``labels(batch)`` gives the integer labels of shape (B,), or None if the batch has none.
        logits: whether the logits are needed. With a callable encoder they cost a forward pass of their own.

    Raises:
        EncodingError: if there is no layer or method of that name; the message lists the candidates.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from rmd_plugin.encoding.batch_encoder import BatchEncoder
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> with BatchEncoder(net) as encode:
        ...     batch = encode((torch.randn(5, 4), torch.zeros(5, dtype=torch.long)))
        >>> encode.head, batch.features.shape, batch.logits.shape
        ('2', torch.Size([5, 8]), torch.Size([5, 3]))
    """

    def __init__(
        self,
        module: nn.Module,
        head: str | None = None,
        *,
        encoder: str | Callable[[Any], Tensor] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        labels: Callable[[Any], Tensor | None] | None = None,
        logits: bool = True,
    ) -> None:
        if head is not None and encoder is not None:
            raise EncodingError(f"give head or encoder, not both: got head={head!r} and encoder={encoder!r}.")
        self.module = module
        self.head = head
        self.logits = logits
        self._forward = forward
        self._labels = labels or batch_labels
        self._encoder_layer: nn.Module | None = None
        self._encode: Callable[[Any], Tensor] | None = None
        self._encoder_name = encoder if isinstance(encoder, str) else None
        if head is not None:
            _find_layer(module, head)
        elif isinstance(encoder, str):
            self._resolve_encoder(encoder)
        elif encoder is not None:
            self._encode = encoder
        self._recorder = _Recorder()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    # -- hooks ------------------------------------------------------------------------------------------------------

    @property
    def passive(self) -> bool:
        """Whether listening is enough; a callable encoder has to be called."""
        return self._encode is None

    @property
    def by_head(self) -> bool:
        """Whether the features are the input of the head, rather than the output of an encoder."""
        return self._encode is None and self._encoder_layer is None

    def attach(self) -> Self:
        """Put the hooks in place. They record nothing until :meth:`start`."""
        if self._handles:
            return self
        record = self._recorder
        if self._encoder_layer is not None:
            self._handles.append(self._encoder_layer.register_forward_hook(record.encoder))
        if self._encoder_layer is not None or self._encode is not None:
            self._handles.append(self.module.register_forward_hook(record.root))
        else:
            for name, layer in self._heads():
                hook = layer.register_forward_hook(partial(record.head, name), with_kwargs=True)
                self._handles.append(hook)
        return self

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._recorder.stop()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def start(self) -> None:
        """Listen to the forward passes from now on."""
        self._recorder.start()

    def take(self, batch: Any) -> Encoded | None:
        """What the forward pass since :meth:`start` said about ``batch``, or None if it did not come by.

        If the layer fired several times, the last call with as many samples as there are labels counts.
        """
        labels = self.labels_of(batch)
        calls, logits = self._recorder.stop()
        if self.by_head:
            return self._take_head(calls, labels, batch)
        features = [call.features for call in calls]
        if self._encode is not None and (logits or not self.logits):
            with evaluating(self._encode), torch.no_grad():
                features = [_copied(self._encode(batch_inputs(batch)))]
        if not features:
            return None
        layer = self._encoder_name or "the encoder"
        found = _matching(features, labels, layer)
        logits = [z for z in logits if len(z) == len(found)]
        if self.logits and not logits:
            return None
        return Encoded(_pooled(found, layer), logits[-1] if logits else None, labels, batch)

    def _take_head(self, calls: list[_Call], labels: Tensor | None, batch: Any) -> Encoded | None:
        if self.head is None:
            calls = [call for call in calls if call.features.ndim == 2]
        if not calls:
            return None
        if self.head is None:
            self.head = calls[-1].name
            _log.info("head: %s (%s)", self.head, self.module.get_submodule(self.head))
            # from now on only this layer needs a hook
            self.detach()
            self.attach()
        calls = [call for call in calls if call.name == self.head]
        features = _matching([call.features for call in calls], labels, self.head)
        logits = next(call.logits for call in reversed(calls) if call.features is features)
        return Encoded(_pooled(features, self.head), logits, labels, batch)

    # -- running the module -------------------------------------------------------------------------------------------

    def __call__(self, batch: Any) -> Encoded:
        """Run the module on a batch, in evaluation mode and without gradients.

        Raises:
            EncodingError: if the head did not take part in the forward pass, or the batch is of another kind.
        """
        attached = bool(self._handles)
        self.attach()
        try:
            with evaluating(self.module), torch.no_grad():
                self.start()
                if self._encode is None or self.logits:
                    self.run(batch)
                encoded = self.take(batch)
        finally:
            self._recorder.stop()
            if not attached:
                self.detach()
        if encoded is None:
            layer = self.head or self._encoder_name or "any nn.Linear with features of shape (B, D)"
            raise EncodingError(
                f"{layer} did not take part in the forward pass of {type(self.module).__name__}, or gave no logits. "
                f"Name the classification layer with head=, or pass encoder= and forward=. {_candidates(self.module)}"
            )
        return encoded

    def run(self, batch: Any) -> Any:
        """The module's own forward pass on a batch."""
        if self._forward is not None:
            return self._forward(self.module, batch)
        target, inputs = self.forward_target, batch_inputs(batch)
        if not isinstance(inputs, Mapping):
            return target(inputs)
        parameters = inspect.signature(target.forward).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return target(**inputs)
        required = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
        if required <= inputs.keys() and any(p.name in inputs for p in parameters):
            return target(**{p.name: inputs[p.name] for p in parameters if p.name in inputs})
        return target(batch)

    # -- details ------------------------------------------------------------------------------------------------------

    def _heads(self) -> list[tuple[str, nn.Module]]:
        if self.head is not None:
            return [(self.head, _find_layer(self.module, self.head))]
        return [(name, layer) for name, layer in self.module.named_modules() if isinstance(layer, nn.Linear)]

    def _resolve_encoder(self, name: str) -> None:
        found: Any = self.module
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, nn.Module):
            self._encoder_layer = found
        elif callable(found):
            self._encode = found
        else:
            owner = type(self.module).__name__
            raise EncodingError(f"{owner} has no layer or method {name!r} to encode with. {_candidates(self.module)}")

    @property
    def forward_target(self) -> nn.Module:
        """The module that maps inputs to logits: the module itself, or the part of it that holds the head."""
        if _has_forward(self.module):
            return self.module
        # a LightningModule without forward(): its training_step calls the network that holds the head
        child, _, inside = (self.head or self._encoder_name or "").partition(".")
        if inside and isinstance(target := getattr(self.module, child), nn.Module) and _has_forward(target):
            return target
        raise EncodingError(
            f"{type(self.module).__name__} does not define forward(), so nobody knows how to run it on a batch. "
            "Pass forward=lambda module, batch: module.model(batch[0]), or define forward()."
        )

    def labels_of(self, batch: Any) -> Tensor | None:
        """Integer labels of a batch, shape (B,), or None if it has none."""
        labels = self._labels(batch)
        if labels is None:
            return None
        try:
            labels = torch.as_tensor(labels)
            check_labels(labels, len(labels))
        except (TypeError, ValueError) as error:
            raise EncodingError(f"{error} Pass labels=, which takes them from the batch.") from error
        return labels


def _find_layer(module: nn.Module, name: str) -> nn.Module:
    try:
        if name:
            return module.get_submodule(name)
    except AttributeError:
        pass
    raise EncodingError(f"{type(module).__name__} has no layer named {name!r}. {_candidates(module, name)}")


def _candidates(module: nn.Module, name: str = "") -> str:
    names = [found for found, _ in module.named_modules() if found]
    linear = [found for found, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    close = [found for found in difflib.get_close_matches(name, names, n=3) if found not in linear] if name else []
    listed = (close + linear[::-1]) or names[::-1]  # the head is usually among the last
    return f"Candidates: {', '.join(listed[:12])}{', ...' if len(listed) > 12 else ''}."


def _has_forward(module: nn.Module) -> bool:
    forward = type(module).forward
    # torch leaves forward unimplemented, and LightningModule only passes that on
    passed_on = ("pytorch_lightning.core.module", "lightning.pytorch.core.module")
    return forward is not nn.Module.forward and forward.__module__ not in passed_on


def _copied(tensor: Tensor) -> Tensor:
    """A copy without gradients, at least float32: the module may work in place on what the hook saw."""
    tensor = tensor.detach()
    wide = widened(tensor)
    return tensor.clone() if wide is tensor else wide


def _logits(output: object) -> Tensor | None:
    return _copied(output).flatten(1) if isinstance(output, Tensor) and output.ndim > 1 else None


def _pooled(features: Tensor, layer: str) -> Tensor:
    try:
        return pool_features(features)
    except ValueError as error:
        raise EncodingError(f"at {layer}: {error}") from error


def _matching(found: list[Tensor], labels: Tensor | None, layer: str) -> Tensor:
    fitting = [z for z in found if labels is None or len(z) == len(labels)]
    if not fitting:
        sizes, expected = ", ".join(str(len(z)) for z in found), 0 if labels is None else len(labels)
        raise EncodingError(
            f"{layer} saw {sizes} samples, but the batch has {expected} labels. Does the step change the "
            "batch (several views, mixed samples)? Pass labels= that fit, or forward= and refit='pass'."
        )
    return fitting[-1]
