"""The concatenation of keys."""


def concat_mla_k(k, k_nope, k_rope):
    if k.shape[1:] != (128, 192) or k_nope.shape[1:] != (128, 128) or k_rope.shape[1:] != (1, 64):
        raise ValueError("num_heads must be 128 for optimized kernel")
    k[..., :128] = k_nope
    k[..., 128:] = k_rope
