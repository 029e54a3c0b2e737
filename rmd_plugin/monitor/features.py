"""Features, logits and labels of a batch, recorded by hooks in a module's own forward pass, which leaves no trace.

The input of the classification layer (the *head*) is the features, its output the logits: one forward pass serves every
detector, and the module needs no change.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from lightning_fabric.utilities.seed import _collect_rng_states, _set_rng_states
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rmd_plugin.compare.adapters import Encoded, EncodingError, Representation
from rmd_plugin.detectors.detectors import evaluating
from rmd_plugin.detectors.moments import check_labels, pool_features, widened

#: where batches that are dicts, dataclasses or named tuples keep their labels and their inputs
LABEL_KEYS = "labels", "label", "targets", "target", "y"
INPUT_KEYS = "image", "images", "img", "pixel_values", "input", "inputs", "x", "data", "features", "input_ids", "audio"


# -- evaluation mode and random states ---------------------------------------------------------------------------------


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch for the block, then restore their states."""
    cuda = torch.cuda.is_initialized()  # asking for the states of devices that are not in use would start them
    states = _collect_rng_states(include_cuda=cuda)
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed_all(seed)
        yield
    finally:
        _set_rng_states(states)


@contextmanager
def visiting(module: nn.Module, seed: int) -> Iterator[None]:
    """Use a module in the middle of its training, in evaluation mode.

    Afterwards modes, buffers (running statistics), gradients, ``requires_grad``, the global random states, and what
    FSDP2 has sharded are as they were.
    """
    parameters = [(parameter, parameter.grad, parameter.requires_grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    # FSDP2 keeps the outermost layers gathered for a backward pass
    sharded: list[Any] = [
        m for m in module.modules() if hasattr(m, "reshard") and all(hasattr(p, "full_tensor") for p in m.parameters())
    ]
    with isolated_rng(seed), evaluating(module):
        try:
            module.zero_grad()
            yield
        finally:
            for layer in sharded:
                layer.reshard()
            for parameter, gradient, requires_grad in parameters:
                parameter.grad = gradient
                parameter.requires_grad_(requires_grad)
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.data.copy_(before)


# -- batches -----------------------------------------------------------------------------------------------------------


def as_mapping(batch: Any) -> Mapping[str, Any] | None:
    """The entries of a dict, a dataclass or a named tuple; None for anything else."""
    if is_dataclass(batch) and not isinstance(batch, (type, Mapping)):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return batch._asdict() if hasattr(batch, "_asdict") else batch if isinstance(batch, Mapping) else None


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels of a batch; None for labels that it does not have.

    The labels are the second of a pair, or the entry of a dict under one of :data:`LABEL_KEYS`; the inputs are the
    first one, or the other entries.
    """
    entries = as_mapping(batch)
    if entries is not None:
        labels = next((entries[key] for key in LABEL_KEYS if key in entries), None)
        return {key: value for key, value in entries.items() if key not in LABEL_KEYS}, labels
    if not isinstance(batch, (tuple, list)) or len(batch) not in (1, 2):
        return batch, None
    inputs, labels = batch if len(batch) == 2 else (batch[0], None)
    if isinstance(labels, (tuple, list)) and labels and isinstance(labels[0], Tensor) and labels[0].ndim:
        labels = labels[0]
    return inputs, labels if as_mapping(labels) is None else split_batch(labels)[1]


def model_input(inputs: Any) -> Any:
    """The tensor of inputs that are a dict, under one of :data:`INPUT_KEYS`; other inputs stay as they are."""
    tensors = inputs if isinstance(inputs, Mapping) else {}
    return next((tensors[key] for key in INPUT_KEYS if isinstance(tensors.get(key), Tensor)), inputs)


# -- the head ----------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of a layer that may be the head, or of a module around it."""

    name: str
    layer: nn.Module
    inputs: Tensor | None  #: the first tensor that a layer got; None for modules around it
    outputs: list[Tensor]  #: the tensors that it returned, or the one that is named ``logits``


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is ``nn.Linear`` or a convolution with a kernel of 1."""
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return layer.groups == 1 and set(layer.kernel_size) == {1}
    return isinstance(layer, nn.Linear)


def as_linear(layer: nn.Module | None) -> nn.Linear | None:
    """The head's weights as a plain ``nn.Linear``, also of a convolution or sharded; None if it is something else.

    Under FSDP2 every process has to call it.
    """
    if layer is None or not is_linear(layer):
        return None
    weights: dict[str, Any] = {name: value.detach() for name, value in layer.named_parameters()}
    weights = {k: value.full_tensor() if hasattr(value, "full_tensor") else value for k, value in weights.items()}
    weights["weight"] = weights["weight"].flatten(1)
    outputs, inputs = weights["weight"].shape
    linear = nn.Linear(inputs, outputs, bias="bias" in weights, device="meta")
    linear.load_state_dict(weights, assign=True)
    return linear


def locate(call: Call, returned: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Features (B, D) and logits (B, K) of each sample in a call of the head; None if nobody can tell.

    Of several positions (tokens, places of a map) the features are the one whose output the network returned, or the
    mean if it returned the mean.

    Args:
        call: of the head.
        returned: tensors (B, K) that the modules around it returned.
    """
    layer, z, logits = call.layer, cast(Tensor, call.inputs), call.outputs[0]
    if z.ndim == 2:
        return widened(z), widened(logits)
    if not is_linear(layer):
        return None
    # (B, positions, channels)
    z, logits = (widened(t.flatten(1, -2) if isinstance(layer, nn.Linear) else t.flatten(2).mT) for t in (z, logits))
    if z.shape[1] == 1:
        return z[:, 0], logits[:, 0]
    for output in returned:
        if output.shape == logits[:, 0].shape:
            # NaN is equal here: a network that has diverged returns nothing else
            match = torch.isclose(logits, widened(output)[:, None], atol=1e-6, equal_nan=True).all(2)
            if bool(match.any(1).all()):
                return z[torch.arange(len(z)), match.int().argmax(1)], widened(output)
            if torch.allclose(logits.mean(1), widened(output), rtol=1e-3, atol=1e-5):
                return z.mean(1), widened(output)
    return None


class BatchEncoder:
    """Turns batches into features, logits and labels.

    Call it with a batch, and it runs the module in evaluation mode, without gradients. Or put :meth:`start` and
    :meth:`take` around a forward pass that somebody else runs.

    Args:
        module: the network. Batches have to be on its device already.
        head: dotted name of the classification layer. By default the linear layer whose output the module returns. Its
            input is the features; of several positions (tokens) the one that is classified, or their mean.
        encoder: the other way to the features: dotted name of the submodule whose output they are.
        forward: ``forward(module, batch)`` runs the module. By default its own ``predict_step`` if it has one, else
            ``forward`` with the inputs.
        labels: ``labels(batch)`` gives the integer labels of shape (B,), or None if the batch has none.

    Raises:
        EncodingError: if there is no layer of that name; the message lists the candidates.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from rmd_plugin.monitor.features import BatchEncoder
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> encode = BatchEncoder(net)
        >>> batch = encode((torch.randn(5, 4), torch.zeros(5, dtype=torch.long)))
        >>> encode.head, batch.features.shape, batch.logits.shape
        ('2', torch.Size([5, 8]), torch.Size([5, 3]))
    """

    def __init__(
        self,
        module: nn.Module,
        head: str | None = None,
        encoder: str | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        labels: Callable[[Any], Any] | None = None,
    ) -> None:
        self.module, self.head, self.encoder = module, head, encoder
        self._forward, self._labels = forward, labels
        try:
            module.get_submodule(head or encoder or "")
        except AttributeError as error:
            raise EncodingError(f"{error}. Candidates: {self.candidates}.") from error
        self.by_head = encoder is None  #: whether the features are the input of the head
        self._recording = False  # compiled code may hold the hooks after they are removed
        self._calls: list[Call] = []
        self._handles: list[Any] = []
        self._way = ""  # how the module is run on a batch, once it is known
        marks = ("_orig_mod", "_compiled_call_impl", "_compiler_ctx")  # the last one is Lightning's
        #: whether torch.compile has compiled a part: hooks would make it compile again
        self.compiled = any(getattr(part, mark, None) is not None for part in module.modules() for mark in marks)

    # -- recording a forward pass --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Record the forward passes from now on, until :meth:`take` or :meth:`stop`."""
        self.stop()
        self._recording = True
        layer, parents = self.head or self.encoder, set[str]()
        names = {layer} if layer else set[str]()
        if self.by_head:  # the named layer and linear layers inside of it, or all linear layers
            prefix = f"{layer}." if layer else ""
            names |= {n for n, m in self.module.named_modules() if n.startswith(prefix) and is_linear(m)}
            parents = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 1)}
        for name in sorted({"", *parents, *names}):
            hook = partial(self._record, name, name in names)
            handle = self.module.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
            self._handles.append(handle)

    def _record(self, name: str, inside: bool, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._recording:
            return
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        leaves = tree_leaves(logits if isinstance(logits, Tensor) else output)
        outputs = [z for z in leaves if isinstance(z, Tensor) and z.is_floating_point()]
        searching = self.by_head and self.head is None
        if inside:
            z = next((z for z in (*args, *kwargs.values()) if isinstance(z, Tensor)), None)
            # while the head is unknown, convolutions of the body are not of interest
            if z is None or not outputs or (searching and not isinstance(layer, nn.Linear) and z[0, 0].numel() > 1):
                return
            outputs = [z, *outputs]
        else:  # a single output for each sample may come without its dimension
            outputs = [z.reshape(len(z), -1) for z in outputs if z.ndim and z.shape[2:].numel() == 1]
        # plain tensors: subclasses with metadata (MONAI's) refuse masks. Copies, since the module may go on in place;
        # but not of the tokens of all layers
        outputs = [z.detach().as_subclass(Tensor) for z in outputs]
        outputs = [z if searching and z.ndim != 2 else z.clone() for z in outputs]
        self._calls.append(Call(name, layer, outputs.pop(0) if inside else None, outputs))

    def stop(self) -> list[Call]:
        """Remove the hooks; return what they have recorded."""
        # they are in place only while we record: torch.compile would take them for a part of the training
        for handle in self._handles:
            handle.remove()
        calls, self._calls, self._handles, self._recording = self._calls, [], [], False
        return calls

    def take(self, batch: Any, *, labelled: bool = True) -> Encoded:
        """What was recorded of ``batch`` since :meth:`start`.

        If the layer ran several times, the last call with as many samples as the batch counts. Without ``labelled`` the
        labels are not read.

        Raises:
            EncodingError: if nobody can tell the features from what was recorded.
        """
        calls, (inputs, labels) = self.stop(), split_batch(batch)
        if not labelled:
            labels = None
        elif self._labels is not None:
            labels = self._labels(batch)
        if labels is not None:
            try:
                labels = torch.as_tensor(labels).detach().as_subclass(Tensor)
                labels = labels.flatten() if labels.ndim == 2 and labels.shape[1] == 1 else labels
                labels = check_labels(labels, len(labels))
            except (TypeError, ValueError) as error:
                raise EncodingError(f"{error} Pass labels=, which takes them from the batch.") from error
        samples = [labels] if labels is not None else tree_leaves(inputs)
        size = next((len(leaf) for leaf in samples if isinstance(leaf, Tensor) and leaf.ndim), None)
        layers, around = list[Call](), list[Call]()  # those of the batch's size, the last call first
        for call in reversed(calls):
            outputs = [output for output in call.outputs if size in (None, len(output))]
            if outputs and (call.inputs is None or size in (None, len(call.inputs))):
                (around if call.inputs is None else layers).append(call._replace(outputs=outputs))
        # of the outermost module; nothing, if a layer ran after it
        returned = around[0].outputs if around and calls[-1].inputs is None else []
        pair: tuple[Tensor, Tensor | None] | None = None
        if self.by_head:
            pair = self._by_head(layers, returned, [z for call in around for z in call.outputs])
        elif layers and layers[0].outputs[0].ndim in (2, 4):
            pair = pool_features(widened(layers[0].outputs[0])), returned[0] if returned else None
        if pair is None:
            raise EncodingError(
                f"the features of {size} samples were not found at {self.head or self.encoder or 'any linear layer'}. "
                "Name the layer behind the pooling by head=, or pass encoder=, forward=lambda module, batch: ..., "
                f"or fit_loader= with batches (x, y). Candidates: {self.candidates}."
            )
        features, logits = pair
        # one sigmoid output is no distribution over classes: detectors on logits would score all samples alike
        logits = None if logits is None or logits.shape[1] == 1 else widened(logits)
        return Encoded(features, logits, labels, model_input(inputs))

    def _by_head(
        self, layers: list[Call], returned: list[Tensor], around: list[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Features and logits at the head: the named layer, else the last whose output was returned, or is as wide."""
        ranked = []
        for call in layers:
            if (pair := locate(call, around)) is not None:
                outputs = [widened(z) for z in returned if z.shape == pair[1].shape]
                same = any(torch.allclose(pair[1], z, equal_nan=True) for z in outputs)
                # what was returned may be made of the logits in some other way
                as_wide = call.inputs is not None and call.inputs.ndim == 2 and (bool(outputs) or not returned)
                ranked.append(((call.name == self.head, same, as_wide), call.name, pair))
        # of several the first one, which was called last
        rank, name, pair = max(ranked, key=itemgetter(0), default=((), None, None))
        if not any(rank):
            return None
        self.head = name
        return pair

    @property
    def candidates(self) -> str:
        """Names of the linear layers, the last ones first."""
        return ", ".join([name for name, layer in self.module.named_modules() if is_linear(layer)][:-13:-1])

    # -- running the module --------------------------------------------------------------------------------------------

    def __call__(self, batch: Any, *, labelled: bool = True) -> Encoded:
        """Run the module on a batch, in evaluation mode and without gradients.

        The first batch tells how: the ways of :meth:`_ways` are tried in turn, and the first that gives features is
        taken from then on.

        Raises:
            EncodingError: if no way gives features.
        """
        problems: list[Exception] = []
        ways = self._ways(batch)
        known = self._way in ways
        # hooks that are registered after the compilation fire only in compiled modules that run as they were written;
        # nobody has compiled anything before this module is imported, which takes seconds
        compiles = "torch._dynamo" in sys.modules
        for way in [self._way] if known else ways:
            try:
                eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
                with evaluating(self.module), torch.no_grad(), eager:
                    self.start()
                    ways[way]()
                    encoded = self.take(batch, labelled=labelled)
                self._way = way
                return encoded
            except Exception as problem:
                problems.append(problem)
            finally:
                self.stop()
        error = next((problem for problem in problems if isinstance(problem, EncodingError)), problems[0])
        if known or isinstance(error, EncodingError):
            raise error
        raise EncodingError(
            f"{type(self.module).__name__} could not be run on a {type(batch).__name__}. "
            f"{type(error).__name__}: {error} Pass forward=lambda module, batch: ... and labels=lambda batch: ..."
        ) from error

    def _ways(self, batch: Any) -> dict[str, Callable[[], Any]]:
        """Ways to run the module on a batch, by name, in the order in which they are tried."""
        if self._forward is not None:
            return {"forward=": partial(self._forward, self.module, batch)}
        ways: dict[str, Callable[[], Any]] = {}
        module: Any = self.module
        if not isinstance(batch, Tensor) and overrides(module, "predict_step"):
            numbered = is_param_in_hook_signature(module.predict_step, "batch_idx", min_args=2)
            ways["predict_step"] = partial(module.predict_step, batch, *([0] if numbered else []))
        target, (inputs, _) = module if self.target is None else self.target, split_batch(batch)
        if isinstance(inputs, Mapping):
            parameters = inspect.signature(target.forward).parameters
            any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            if keywords := {name: value for name, value in inputs.items() if any_name or name in parameters}:
                ways["keywords"] = partial(target, **keywords)
            return ways | {"input": partial(target, model_input(inputs)), "batch": partial(target, batch)}
        if inputs is not batch or not isinstance(batch, (tuple, list)):
            ways["forward"] = partial(target, inputs)
            if isinstance(inputs, (tuple, list)):
                ways["unpacked"] = partial(target, *inputs)
        elif not ways:
            kind = f"{type(batch).__name__} of length {len(batch)}"
            raise EncodingError(
                f"expected (x, y) or a dict, got a {kind}. Pass forward= and labels=, or, if only the training batches "
                "are such, fit_loader=."
            )
        return ways

    @property
    def target(self) -> nn.Module | None:
        """The module that maps inputs to logits: the module itself, or the part of it that holds the head."""
        child, _, inside = (self.head or self.encoder or "").partition(".")
        candidates = [self.module, getattr(self.module, child, None) if inside else None]
        return next((m for m in candidates if isinstance(m, nn.Module) and overrides(m, "forward")), None)


class Encoding(nn.Module):
    """A network in evaluation mode as a map from inputs to features (B, D), logits (B, K), or its own output."""

    def __init__(self, encoder: BatchEncoder, output: Representation) -> None:
        super().__init__()
        self.module, self.output, self._encode = encoder.module, output, encoder

    def forward(self, inputs: Any) -> Any:
        """Features or logits of a batch of inputs, without gradients; or what the network gives, with gradients."""
        if self.output in (Representation.FEATURES, Representation.LOGITS):
            return self._encode(inputs, labelled=False).take(self.output)
        with evaluating(self.module):
            return self.module(inputs)


def overrides(module: nn.Module, method: str) -> bool:
    """Whether a module defines a method that torch and Lightning leave open."""
    original: Any = getattr(module, "_orig_mod", module)  # torch.compile has wrapped it
    defined = getattr(type(original), method, None)
    inherited = "torch.nn.modules.module", "pytorch_lightning.core.module", "lightning.pytorch.core.module"
    return defined is not None and defined.__module__ not in inherited
