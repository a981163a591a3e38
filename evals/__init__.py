"""Accuracy of a served model. Imported as `mla_verify.evals`. It imports no torch."""

if __name__ != "mla_verify.evals":
    raise ImportError("import it as mla_verify.evals: two copies would not share their types")
