"""Checkpoint files -> the weights of one module, whatever the file calls them. Nothing is ever unpickled."""

import functools
import logging
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rmd_plugin.extras import require
from rmd_plugin.untrusted import DataFormatError, load_tensors

log = logging.getLogger(__name__)

# names under which training programs put the weights beside optimiser state and counters
_CONTAINERS = ("state_dict", "model_state_dict", "model")
_MAX_BYTES = 1 << 36
#: under which ``rmd-train`` keeps the ``repr`` of the test transform
PREPROCESSING = "rmd_preprocessing"


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not belong to the backbone it was given to."""


@dataclass(frozen=True)
class Notes:
    """What a checkpoint says about itself besides its weights."""

    accuracy: float | None = None  #: on its validation data, in [0, 1]
    preprocessing: str | None = None  #: ``repr`` of the transform that it was trained behind, if ``rmd-train`` made it


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The weights of :func:`read_checkpoint`."""
    return read_checkpoint(path)[0]


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], Notes]:
    """Tensors by name, on the CPU, of a plain state_dict, a Lightning checkpoint or a safetensors file; and its notes.

    Anything beyond tensors and plain containers is refused with a CheckpointError, never executed.
    """
    kind, load = "checkpoint", functools.partial(load_tensors, usual=_MAX_BYTES)
    if path.suffix == ".safetensors":
        safetensors = require("safetensors.torch", "vision", needed_by=f"reading {path.name}")
        kind, load = "safetensors file", safetensors.load_file
    try:
        with warnings.catch_warnings():
            # a file of another pickle protocol loads or is refused: either way the outcome says more
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            content: object = load(str(path))
    except DataFormatError as error:
        raise CheckpointError(str(error)) from error
    except pickle.UnpicklingError as error:
        # not torch's own words: they advise to turn the protection off
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, or is damaged, and is refused: loading it could run "
            "code. Save it again with torch.save(model.state_dict(), path), or fetch it again."
        ) from error
    except Exception as error:  # damage shows in many classes, and that of safetensors has moved between versions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} is not a readable {kind}: {reason}") from error
    noted = _notes(content)
    for container in _CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(container), Mapping):
            content = content[container]
            break
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a state_dict (name -> tensor).")
    state = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise CheckpointError(f"{path} holds no tensors; its entries are {_examples(map(str, content))}.")
    return state, noted


def _notes(content: object) -> Notes:
    """What Lightning's ``ModelCheckpoint`` and ``rmd-train`` wrote into a checkpoint, where they did."""
    if not isinstance(content, Mapping):
        return Notes()
    states = content.get("callbacks")
    preprocessing = content.get(PREPROCESSING)
    accuracy = None
    for state in states.values() if isinstance(states, Mapping) else ():
        if isinstance(state, Mapping) and "acc" in str(state.get("monitor")):
            # the score of these weights; the best one may be of others
            score = state.get("current_score", state.get("best_model_score"))
            if isinstance(score, Tensor) and score.numel() == 1 and 0 <= float(score) <= 1:
                accuracy = float(score)
    return Notes(accuracy, preprocessing if isinstance(preprocessing, str) else None)


@dataclass(frozen=True)
class Matched:
    """Weights of a checkpoint under the names of a backbone."""

    state: dict[str, Tensor]  #: own name (``encoder...`` or ``head...``) to tensor
    prefix: str  #: what stood before every name in the file, for example ``model.``
    unexpected: list[str]  #: names inside the network that the backbone does not have
    ignored: list[str]  #: names of other parts of the file (losses, metrics, other towers)


def match_names(
    state: Mapping[str, Tensor],
    encoder_names: Iterable[str],
    *,
    head_names: Sequence[str] = ("head",),
    rename: Callable[[str], str] | None = None,
) -> Matched:
    """Find which prefix of the file holds the network, and translate its names.

    The network may be stored as a whole backbone (``encoder.*``, ``head.*``) or as the original project names it
    (no ``encoder.``, the classifier under one of ``head_names``), under any prefix (``model.``, ``module.``, ...).
    ``rename`` translates an encoder name of another project into ours.
    """
    expected = set(encoder_names)
    parts = {name.split(".")[0] for name in expected} | {"encoder", "head"}

    def translate(name: str) -> str | None:
        module, _, leaf = name.rpartition(".")
        bare = name.removeprefix("encoder.")
        if bare in expected:
            return f"encoder.{bare}"
        if module == "head" or module in head_names:
            return f"head.{leaf}"
        if rename is not None and rename(bare) in expected:
            return f"encoder.{rename(bare)}"
        return None

    hits: Counter[str] = Counter()
    for name in state:
        pieces = name.split(".")
        for depth in range(min(len(pieces), 6)):
            if translate(".".join(pieces[depth:])) is not None:
                hits["".join(f"{piece}." for piece in pieces[:depth])] += 1
    # the shortest prefix wins a tie, so that a file that fits as it is keeps its names
    prefix = min(hits, key=lambda p: (-hits[p], len(p), p), default="")

    matched = Matched({}, prefix, [], [])
    for name, tensor in state.items():
        rest = name[len(prefix) :]
        own = translate(rest) if name.startswith(prefix) else None
        if own is not None:
            matched.state[own] = tensor
        elif name.startswith(prefix) and rest.split(".")[0] in parts:
            matched.unexpected.append(name)
        else:
            matched.ignored.append(name)
    return matched


def check_fit(matched: Matched, wanted: Mapping[str, Tensor], *, path: Path, what: str) -> None:
    """Refuse a checkpoint without exactly the ``wanted`` weights of ``what``, with count and examples of each fault."""
    # a step counter that old files lack and inference never reads
    missing = [n for n in wanted if n not in matched.state and not n.endswith("num_batches_tracked")]
    shapes = [
        f"{name} is {tuple(matched.state[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in matched.state and matched.state[name].shape != tensor.shape
    ]
    problems = [
        f"{len(names)} {kind}: {_examples(names)}"
        for kind, names in (("missing", missing), ("unexpected", matched.unexpected), ("of another shape", shapes))
        if names
    ]
    if problems:
        found = sum(name in matched.state for name in wanted)
        where = f" under the prefix {matched.prefix!r}" if matched.prefix else ""
        raise CheckpointError(
            f"{path} does not fit {what}: {found} of {len(wanted)} weights found{where}; {'; '.join(problems)}. "
            "Was it trained with another architecture or other sizes?"
        )
    if matched.ignored:
        log.info("%s: %d entries not used: %s", path, len(matched.ignored), _examples(matched.ignored))


def _examples(names: Iterable[str], limit: int = 3) -> str:
    listed = list(names)
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")
