"""Packages that an extra of rmd-plugin brings: imported where they are used, or named with the command to get them."""

from importlib import import_module
from typing import Any


class MissingExtraError(ImportError):
    """An optional package is not installed; the message says which extra brings it."""


def missing_extra(package: str, extra: str, *, needed_by: str = "this") -> MissingExtraError:
    """The error for a package that is not installed, though a choice of the user needs it.

    Example:
        >>> print(missing_extra("timm", "vision", needed_by="backbone=timm"))
        backbone=timm needs the package timm, which is not installed: pip install "rmd-plugin[vision]", or in a \
checkout pip install -e ".[vision]"
    """
    return MissingExtraError(
        f'{needed_by} needs the package {package}, which is not installed: pip install "rmd-plugin[{extra}]", '
        f'or in a checkout pip install -e ".[{extra}]"',
        name=package,
    )


def require(module: str, extra: str, *, needed_by: str = "this") -> Any:
    """Import an optional module, or raise the error that says which extra brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # a package that is installed but whose own import fails is another story: let it tell it
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise missing_extra(error.name, extra, needed_by=needed_by) from error
