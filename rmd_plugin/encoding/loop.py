"""The one encode loop: batches of a loader through an encoder, in evaluation mode and without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from tqdm.auto import tqdm

from rmd_plugin.encoding.batches import Encoded, EncodingError
from rmd_plugin.encoding.features import pool_features, widened
from rmd_plugin.encoding.isolation import evaluating, evaluating_calls


def as_pair(batch: Any) -> tuple[Any, Any]:
    """The x and y of a batch; refuses what is no pair."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        found = f"{type(batch).__name__} of length {len(batch)}" if hasattr(batch, "__len__") else batch
        raise EncodingError(f"the loader must yield pairs (x, y), got a {found}.")
    x, y = batch
    return x, y


class PairEncoder:
    """Turns batches (x, y) into :class:`Encoded` by any encoder: half precision is widened, maps are averaged.

    An encoder that gives several layers by name (:class:`rmd_plugin.encoding.layer_encoder.LayerEncoder`) fills
    ``layers``, and the last one is the features.
    """

    def __init__(self, encoder: Callable[[Any], Tensor | Mapping[str, Tensor]]) -> None:
        self.module = encoder

    def __call__(self, batch: Any) -> Encoded:
        """Encode a batch; refuse one that is no pair (x, y)."""
        x, y = as_pair(batch)
        with evaluating_calls(self.module):
            z = self.module(x)
        layers = {name: pool_features(part.detach()) for name, part in z.items()} if isinstance(z, Mapping) else {}
        last = list(layers.values())[-1] if isinstance(z, Mapping) else pool_features(z.detach())
        return Encoded(widened(last), labels=torch.as_tensor(y), batch=batch, layers=layers)


def encode_batches(
    encode: Callable[[Any], Encoded],
    loader: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    id_only: bool = False,
    title: str | None = None,
) -> Iterator[Encoded]:
    """Encode the batches of a loader.

    Args:
        encode: a :class:`PairEncoder`, a :class:`rmd_plugin.encoding.batch_encoder.BatchEncoder`, or the like. If it
            has a ``module``, that is in evaluation mode until the loop ends.
        loader: yields batches.
        device: where batches are moved to; None leaves them where they are.
        id_only: leave out samples with a label below zero, and batches of which nothing is left.
        title: of a progress bar, shown on a terminal only; None for no bar.

    Example:
        >>> net = torch.nn.Flatten()
        >>> batches = [(torch.zeros(3, 2, 2), torch.tensor([0, 1, -1]))]
        >>> [tuple(batch.features.shape) for batch in encode_batches(PairEncoder(net), batches, id_only=True)]
        [(2, 4)]
    """
    # leave=False: a finished bar would stand between the tables
    # disable=None: only on a terminal
    bar = tqdm(loader, desc=title, unit="batch", leave=False, disable=True if title is None else None)
    with evaluating(getattr(encode, "module", encode)):
        for batch in bar:
            if device is not None:
                batch = apply_to_collection(batch, Tensor, lambda tensor: tensor.to(device))
            with torch.no_grad():  # not around the yield: the caller's gradients are the caller's
                encoded = encode(batch)
                if id_only and encoded.labels is not None:
                    encoded = encoded.select(encoded.labels >= 0)
            if len(encoded) or not id_only:
                yield encoded
