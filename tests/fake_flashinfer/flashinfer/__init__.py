"""FlashInfer as far as mla-verify calls it, in torch on a CPU: signatures, checks and conventions of 0.6.14.

Of the real package it has the names and what they promise, not a line: everything here is computed in float64.
"""

# What the next wrapper runs in place of the backend that it is asked for, as a library may without a word.
falls_back_to: str | None = None
# (wrapper or function, its arguments) of every call, the last one last.
calls: list[tuple[str, dict[str, object]]] = []
