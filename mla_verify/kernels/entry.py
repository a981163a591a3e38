"""A function of a library under test: where it is, what is passed to it, and whether it is as we know it.

Nothing here imports a library until one of its functions is asked for.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import reduce
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A function and the parameters that are passed to it, all by name."""

    library: str  # the distribution's name, "sglang"
    module: str
    name: str  # "function", or "Class.method", which is called on an instance
    parameters: tuple[str, ...]

    def load(self) -> Any:
        return reduce(getattr, self.name.split("."), importlib.import_module(self.module))

    def why_unusable(self) -> str | None:
        """Why it cannot be called as it is called here, or None. Imports it."""
        try:
            function = self.load()
        # An extension module that does not fit this machine raises what it likes.
        except Exception as error:
            first_line = str(error).strip().split("\n")[0]
            return f"{version(self.library)} does not import: {type(error).__name__}: {first_line}"
        difference = self._difference(inspect.signature(function))
        return difference and (
            f"{self.name} of {version(self.library)} is not as mla-verify knows it: its signature {difference}"
        )

    def _difference(self, signature: inspect.Signature) -> str | None:
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        known = {p.name: p.default is p.empty for p in signature.parameters.values() if p.kind not in variable}
        if "." in self.name:
            known.pop("self", None)
        missing = [name for name in self.parameters if name not in known]
        new = [name for name, is_required in known.items() if is_required and name not in self.parameters]
        parts = (f"has no {', '.join(missing)}" if missing else "", f"also needs {', '.join(new)}" if new else "")
        return " and ".join(filter(None, parts)) or None


def version(library: str) -> str:
    """Name and version of an installed distribution, "sglang 0.5.23"; the name alone if it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        return f"{library} {version_of(library)}"
    except PackageNotFoundError:
        return library
