"""What a case can be: the forms, and the phases, regimes and layouts that each of them has."""

from __future__ import annotations

# absorbed: q_nope [.., 512] and q_pe against a paged latent cache.  mha: q and k [.., 192], v [.., 128], ragged.
# write: the latent and rope part of new tokens, into their rows of a paged cache [.., 576].
# concat: nope and rope part side by side: queries [T, H, 512 + 64], or keys [T, H, 128 + 64], whose heads share rope.
# layer: q_nope [.., 128] and q_pe, a paged latent cache and the layer's w_kc and w_vc; out [.., 128].
FORMS = ("absorbed", "mha", "write", "concat", "layer")
ATTENTION_PHASES = ("decode", "spec", "prefill", "prefix", "chunked", "mixed")
CONCAT_PHASES = ("queries", "keys")
PHASES = (*ATTENTION_PHASES, "append", *CONCAT_PHASES)
FORM_PHASES = {
    "absorbed": ATTENTION_PHASES,
    "mha": ATTENTION_PHASES,
    "write": ("append",),
    "concat": CONCAT_PHASES,
    "layer": ATTENTION_PHASES,
}
RAGGED_FORMS = ("mha", "concat")  # tokens of all requests in order, no pages
REGIMES = ("uniform", "normal", "peaked", "mixed", "needle", "unequal", "rope", "nope", "channel")
# Of cache writes: every token its own slot; several tokens for one slot; slots before the cache and past its end.
WRITE_REGIMES = ("rows", "repeated", "outside")
FORM_REGIMES = {"absorbed": REGIMES, "mha": REGIMES, "write": WRITE_REGIMES, "concat": ("rows",), "layer": REGIMES}
# split: every tensor is contiguous, no two share memory.  fused: q_nope and q_pe are views of one [.., 576], so are
# ckv and kpe, and k and v of one [.., 320]; what the two parts hold is the same. Keys to be concatenated: k_nope is a
# slice of what kv_b_proj gives, [.., 256], and rope of the latent row, [.., 576].
# transposed: q_nope as the absorbing product leaves it, [H, T, ..] in memory, q_pe a slice of [.., 192].
# far31, far32: in a cache so large that every referenced slot lies past 2^31 or 2^32 elements.
LAYOUTS = ("split", "fused", "transposed", "far31", "far32")
FORM_LAYOUTS = {
    "absorbed": LAYOUTS,
    "mha": ("split", "fused"),
    "write": ("split", "fused", "far31", "far32"),
    "concat": ("split", "fused", "transposed"),
    "layer": ("split",),
}
