"""Options whose mistakes are said in the words of the command line. Imports nothing heavy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def whole_number(value: object, name: str) -> int:
    """An option that must be a whole number.

    Args:
        value: what was typed.
        name: name of the option, for the error.

    Raises:
        ValueError: if it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    return value


def check_options(function: Callable[..., object], options: Mapping[str, Any], prefix: str) -> None:
    """Refuse options that a function does not have, or whose kind is not that of its default.

    Args:
        function: every argument has a default: a number or a sequence.
        options: name -> value.
        prefix: what stands before the names on the command line.

    Raises:
        ValueError: with the options that there are, or with what was expected.
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    for name, value in options.items():
        if name not in defaults:
            known = ", ".join(defaults)
            raise ValueError(f"there is no option {prefix}{name}. There are, after {prefix!r}: {known}.")
        default = defaults[name]
        if isinstance(default, int):
            whole_number(value, f"{prefix}{name}")
        elif isinstance(default, float):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{prefix}{name} must be a number, got {value!r}.")
        elif not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{prefix}{name} must be several values in brackets, [a,b], got {value!r}.")
