"""An extension of griffe: docstrings as mkdocstrings wants them."""

import re
from typing import Any

import griffe


class HouseStyle(griffe.Extension):
    """``Example:`` as a section with code, and the roles of reStructuredText as plain code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            text = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r":(?:class|meth|func|mod|data|attr|exc):(?=`)", "", text)
