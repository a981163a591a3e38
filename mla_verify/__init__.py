"""Correctness and accuracy verification for Multi-head Latent Attention."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout reference/ and evals/ stand beside this package; the wheel maps them into it (pyproject.toml).
if not (Path(__file__).parent / "reference" / "__init__.py").exists():
    __path__.append(str(Path(__file__).parents[1]))
