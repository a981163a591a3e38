"""The oracle: Multi-head Latent Attention in float64, plain PyTorch, one convention. A leaf: it imports torch only.

Imported as `mla_verify.reference` in a checkout and from the wheel alike.
"""

if __name__ != "mla_verify.reference":
    raise ImportError("import it as mla_verify.reference: two copies would not share their types")
