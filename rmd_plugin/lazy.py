"""Public names: imported on first use, so that importing a package does not import torch; and how they leave."""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def lazy_names(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package, given its public names and the modules that define them."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}. Public names: {', '.join(names)}.")
        value = getattr(import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(sys.modules[package].__all__)


def deprecated(since: str, *, use: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark a public function that will leave; it stays for at least one minor release.

    Args:
        since: the version that deprecates it.
        use: what to use in its place.

    Returns:
        A decorator: each call warns with a ``FutureWarning``, which Python shows to users, not to developers only.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def warn_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
            message = f"{function.__qualname__} is deprecated since rmd-plugin {since}: use {use}."
            warnings.warn(message, FutureWarning, stacklevel=2)
            return function(*args, **kwargs)

        return warn_and_call

    return decorate
