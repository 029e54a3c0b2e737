"""Batch -> :class:`Encoded`: features, logits and labels, taken by hooks from a module's own forward pass.

The input of the classification layer (the *head*) is the features, its output the logits, so one forward pass serves
every detector and the module needs no change. Knows no detector and no Lightning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from rmd_plugin.encoding.batches import Encoded, EncodingError, batch_inputs, batch_labels
from rmd_plugin.encoding.features import check_labels, pool_features, widened
from rmd_plugin.encoding.heads import Located, candidates, choose_head, inner_head, is_linear, locate, parents
from rmd_plugin.encoding.isolation import evaluating
from rmd_plugin.encoding.layer_encoder import LayerEncoder
from rmd_plugin.encoding.recorder import Call, Recorder, eagerly


class BatchEncoder:
    """Turns batches into :class:`Encoded` by listening to a module's forward pass.

    Either of two ways to use it: call it with a batch, and it runs the module in evaluation mode, without gradients;
    or put :meth:`start` and :meth:`take` around a forward pass that somebody else runs.

    Args:
        module: the network. Batches have to be on its device already.
        head: dotted name of the classification layer. By default the ``nn.Linear`` whose output the module returns. Its
            input is the features; of an input with several positions of each sample (tokens, places of a map) it is the
            position that is classified, or the mean, whichever gives the module's logits.
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
        #: what was taken for features, in a few words, where there was a choice
        self.taken = ""
        #: why :meth:`take` could not tell the features; a pass of our own may tell more than one of somebody else
        self.problem: EncodingError | None = None
        self._found = self._alone = False  # whether the features are found, and in the call of the head alone
        #: of the module or a part of it: what they hear becomes ``Encoded.layers``
        self.layers: list[LayerEncoder] = []
        self._recorder = Recorder()
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen to the forward passes from now on, until :meth:`take` or :meth:`stop`."""
        self.stop()
        for listener in self.layers:
            if listener.found:
                listener.start()
        record = self._recorder  # always the same one: compiled code has it inside
        record.start(copies=self.head is not None or not self.by_head)
        heads = self._heads() if self.by_head else {}
        around = {parent for name in heads for parent in parents(name)} if self.by_head else {""}
        if self._encoder_layer is not None:
            self._handles.append(self._encoder_layer.register_forward_hook(record.encoder))
        for name, layer in heads.items():
            self._handles.append(layer.register_forward_hook(partial(record.layer, name), with_kwargs=True))
        for name in () if self._alone else around - heads.keys():
            hook = partial(record.around, name)
            self._handles.append(self.module.get_submodule(name).register_forward_hook(hook))

    def stop(self) -> list[Call]:
        """Take the hooks away; what they have heard is forgotten."""
        # hooks are in place only while we listen: torch.compile would take them for a part of the training
        for listener in self.layers:
            listener.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return self._recorder.stop()

    def take(self, batch: Any) -> Encoded | None:
        """What the forward pass since :meth:`start` said about ``batch``, or None if it did not come by.

        If the layer fired several times, the last call with as many samples as there are labels counts.
        """
        labels, self.problem = self.labels_of(batch), None
        layers = self._take_layers()
        found = self._take(self.stop(), labels, batch)
        if found is None or layers is None:
            return None
        for name, z in layers.items():
            if len(z) != len(found):
                raise EncodingError(
                    f"{name} saw {len(z)} samples, but the batch has {len(found)}. Does the step change the batch "
                    "(several views, mixed samples)? Name other layers, or use refit='pass'."
                )
        return replace(found, layers=layers)

    def _take_layers(self) -> dict[str, Tensor] | None:
        try:
            return {
                key: z
                for listener in self.layers
                for key, z in zip(listener.keys().values(), listener.take().values(), strict=True)
            }
        except EncodingError as error:
            self.problem = EncodingError(
                f"{error} A network that was compiled and run before is heard in passes of our own only: refit='pass'."
            )
            return None

    def _take(self, calls: list[Call], labels: Tensor | None, batch: Any) -> Encoded | None:
        if self.by_head:
            return self._take_head(calls, labels, batch)
        features = [call.features for call in calls if call.features is not None]
        logits = [call.outputs[0] for call in calls if call.outputs]
        if self._encode is not None and (logits or not self.logits):
            with evaluating(self._encode), torch.no_grad():
                features = [self._encode(batch_inputs(batch)).detach().clone()]
        if not features:
            return None
        layer = self._encoder_name or "the encoder"
        found = features[_matching(features, labels, layer)]
        logits = [widened(z) for z in logits if len(z) == len(found)]
        if self.logits and not logits:
            return None
        return Encoded(_pooled(found, layer), logits[-1] if logits else None, labels, batch)

    def _take_head(self, calls: list[Call], labels: Tensor | None, batch: Any) -> Encoded | None:
        head = self.head
        heard = [(z, name) for name, z, _ in calls if z is not None and head in (None, name)]
        if not heard:
            return None
        given = heard[_matching([z for z, _ in heard], labels, head or heard[-1][1])][0]
        calls = [call for call in calls if call.features is None or len(call.features) == len(given)]
        try:
            if head is None:
                head = choose_head(calls, len(given), self._layers)
            elif given.ndim != 2 and not is_linear(self.module.get_submodule(head)):
                head = inner_head(head, self.module.get_submodule(head), calls)
            last = max(number for number, call in enumerate(calls) if call.name == head)
            targets = [z for call in calls[last:] if call.name in parents(head) for z in call.outputs]
            found = locate(self.module.get_submodule(head), calls[last], targets)
        except EncodingError as error:
            self.problem = error
            return None
        if not self._found:
            self._settle(head, found)
        return Encoded(found.features, found.logits, labels, batch)

    def _settle(self, head: str, found: Located) -> None:
        if head != self.head or not found.alone:
            self.taken = f"the head is {head!r}, {self.module.get_submodule(head)}; the features are {found.where}"
        self.head, self._found, self._alone = head, True, found.alone

    # -- running the module -------------------------------------------------------------------------------------------

    def __call__(self, batch: Any) -> Encoded:
        """Run the module on a batch, in evaluation mode and without gradients.

        Raises:
            EncodingError: if the head did not take part in the forward pass, or the batch is of another kind.
        """
        try:
            with evaluating(self.module), torch.no_grad(), eagerly():
                self.start()
                if self._encode is None or self.logits or self.layers:
                    self.run(batch)
                encoded = self.take(batch)
        finally:
            self.stop()
        if encoded is None:
            layer = self.head or self._encoder_name or "any nn.Linear"
            raise self.problem or EncodingError(
                f"{layer} did not take part in the forward pass of {type(self.module).__name__}, or gave no logits. "
                f"Name the classification layer with head=, or pass encoder= and forward=. {candidates(self._layers)}"
            )
        return encoded

    def find_layers(self, batch: Any) -> None:
        """Look up the layers that only a pass on a batch can tell."""
        with evaluating(self.module):
            for listener in self.layers:
                listener.find(batch, self.run)

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

    def _heads(self) -> dict[str, nn.Module]:
        """What may be the head: the layer of that name, and linear layers inside of it."""
        if self.head is None:
            return {name: layer for name, layer in self._layers.items() if is_linear(layer)}
        layer = _find_layer(self.module, self.head)
        inner = {} if self._alone else {f"{self.head}.{n}": x for n, x in layer.named_modules() if n and is_linear(x)}
        return {self.head: layer} | inner

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
            raise EncodingError(f"{owner} has no layer or method {name!r} to encode with. {candidates(self._layers)}")

    @property
    def _layers(self) -> dict[str, nn.Module]:
        return dict(self.module.named_modules())

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

    def check_width(self, encoded: Encoded) -> None:
        """Refuse a head that has no output for one of the ID labels."""
        if not self.by_head or encoded.logits is None or encoded.labels is None or not len(encoded):
            return
        largest, width = int(encoded.labels.max()), encoded.logits.shape[1]
        if largest >= max(width, 2):  # one output tells two classes apart
            raise EncodingError(
                f"{self.head} gives {width} logits, but there is a sample of class {largest}: another layer classifies "
                f"them. Name the classification layer with head=, or pass encoder=. {candidates(self._layers)}"
            )

    def labels_of(self, batch: Any) -> Tensor | None:
        """Integer labels of a batch, shape (B,), or None if it has none."""
        labels = self._labels(batch)
        if labels is None:
            return None
        try:
            labels = torch.as_tensor(labels)
            return check_labels(labels, len(labels))
        except (TypeError, ValueError) as error:
            raise EncodingError(f"{error} Pass labels=, which takes them from the batch.") from error


class Encoding(nn.Module):
    """A network as a map from inputs to features (B, D) or logits (B, C), as :class:`BatchEncoder` finds them.

    It runs in evaluation mode, without gradients.
    """

    def __init__(self, module: nn.Module, head: str | None, encoder: str | None, *, logits: bool = False) -> None:
        super().__init__()
        self.module = module
        self._encode = BatchEncoder(module, head, encoder=encoder, logits=logits)

    def forward(self, x: Any) -> Tensor:
        """Features or logits of a batch of inputs."""
        encoded = self._encode(x)
        if not self._encode.logits:
            return encoded.features
        if encoded.logits is None:
            raise EncodingError("the network gave no logits of shape (B, C) for this batch.")
        return encoded.logits


class Layered(nn.Module):
    """A part of a network by the names of its layers, run as :class:`BatchEncoder` runs the network it is a part of.

    It runs in evaluation mode, without gradients.
    """

    def __init__(self, module: nn.Module, head: str | None, encoder: str | None, *, part: str = "") -> None:
        super().__init__()
        for name, child in module.get_submodule(part).named_children():
            self.add_module(name, child)
        self._encode = BatchEncoder(module, head, encoder=encoder)

    def forward(self, *batch: Any, **inputs: Any) -> Any:
        """What the network gives."""
        with evaluating(self._encode.module), torch.no_grad():
            return self._encode.run(batch[0] if batch else inputs)


def _find_layer(module: nn.Module, name: str) -> nn.Module:
    try:
        if name:
            return module.get_submodule(name)
    except AttributeError:
        pass
    raise EncodingError(
        f"{type(module).__name__} has no layer named {name!r}. {candidates(dict(module.named_modules()), name)}"
    )


def _has_forward(module: nn.Module) -> bool:
    original: Any = getattr(module, "_orig_mod", module)  # torch.compile has wrapped it
    forward = type(original).forward
    # torch leaves forward unimplemented, and LightningModule only passes that on
    passed_on = ("pytorch_lightning.core.module", "lightning.pytorch.core.module")
    return forward is not nn.Module.forward and forward.__module__ not in passed_on


def _pooled(features: Tensor, layer: str) -> Tensor:
    try:
        return pool_features(widened(features))
    except ValueError as error:
        raise EncodingError(f"at {layer}: {error}") from error


def _matching(found: list[Tensor], labels: Tensor | None, layer: str) -> int:
    """Number of the last one with as many samples as there are labels."""
    fitting = [number for number, z in enumerate(found) if labels is None or len(z) == len(labels)]
    if not fitting:
        sizes, expected = ", ".join(str(len(z)) for z in found), 0 if labels is None else len(labels)
        raise EncodingError(
            f"{layer} saw {sizes} samples, but the batch has {expected} labels. Does the step change the "
            "batch (several views, mixed samples)? Pass labels= that fit, or forward= and refit='pass'."
        )
    return fitting[-1]
