"""CaseSpec: one case, as a value. Its id is readable and reproduces it: `CaseSpec.parse(spec.id) == spec`.

decode-absorbed-h16-4xq1.kv4096-p64-bf16-normal-s0
mixed-absorbed-h16-q1.kv33+2xq1.kv0+q5.kv100-p16-fp16-needle-full-scale0.25-s3
prefill-mha-h16-q257.kv257-ragged-fp32-normal-fused-s0
append-write-h1-q768.kv1000-p64-bf16-rows-s0
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import groupby

from mla_verify.dims import MLADims
from mla_verify.errors import UsageError, did_you_mean
from mla_verify.formats import DTYPES

# absorbed: q_nope [.., 512] and q_pe against a paged latent cache.  mha: q and k [.., 192], v [.., 128], ragged.
# write: the latent and rope part of new tokens, into their rows of a paged cache [.., 576].
FORMS = ("absorbed", "mha", "write")
ATTENTION_PHASES = ("decode", "spec", "prefill", "prefix", "chunked", "mixed")
PHASES = (*ATTENTION_PHASES, "append")
FORM_PHASES = {"absorbed": ATTENTION_PHASES, "mha": ATTENTION_PHASES, "write": ("append",)}
REGIMES = ("uniform", "normal", "peaked", "mixed", "needle", "unequal", "rope", "nope", "channel")
# Of cache writes: every token its own slot; several tokens for one slot; slots before the cache and past its end.
WRITE_REGIMES = ("rows", "repeated", "outside")
# split: every tensor is contiguous, no two share memory.  fused: q_nope and q_pe are views of one [.., 576], so are
# ckv and kpe, and k and v of one [.., 320]; what the two parts hold is the same.
LAYOUTS = ("split", "fused")

# Not within 10 % of any default a kernel could fall back to: 192**-0.5 = 0.0722, 576**-0.5 = 0.0417, 512**-0.5 =
# 0.0442, 128**-0.5 = 0.0884, 64**-0.5 = 0.125, 1, and 192**-0.5 * mscale**2 = 0.1147 (V2-Lite), 0.1352 (V3).
# Sixteen significant bits, so that fp32 holds it exactly and a kernel's own rounding of it plays no part.
SM_SCALE = 0.1011962890625

# An id with a typing error must not ask for a terabyte.
MAX_TOKENS = 1 << 23  # of one case, queries or keys; 7,456,541 keys of 576 pass offset 2^32
MAX_ELEMENTS = 1 << 34  # of one tensor, 64 GiB in fp32

_DIMS = MLADims()


@dataclass(frozen=True)
class Request:
    """One sequence: `q_len` new query tokens, the last of `kv_len` keys (bottom-right causal)."""

    q_len: int
    kv_len: int

    @property
    def id(self) -> str:
        return f"q{self.q_len}.kv{self.kv_len}"


@dataclass(frozen=True)
class CaseSpec:
    phase: str
    form: str
    num_heads: int  # of this rank
    requests: tuple[Request, ...]
    page_size: int  # 0 for mha, whose k and v are ragged and not paged
    dtype: str
    regime: str
    seed: int = 0
    causal: bool = True
    sm_scale: float = SM_SCALE
    dims: MLADims = _DIMS
    layout: str = "split"

    def __post_init__(self) -> None:
        for field, value, known in (
            ("phase", self.phase, PHASES),
            ("form", self.form, FORMS),
            ("dtype", self.dtype, DTYPES),
            ("regime", self.regime, WRITE_REGIMES if self.form == "write" else REGIMES),
            ("layout", self.layout, LAYOUTS),
        ):
            if value not in known:
                raise UsageError(f"unknown {field} {value!r}", did_you_mean(value, known, f"known: {', '.join(known)}"))
        problem = self._problem()
        if problem:
            raise UsageError(f"case {self.id}: {problem[0]}", problem[1])

    def _problem(self) -> tuple[str, str] | None:
        """What contradicts itself in this spec and what to write instead, or None."""
        if self.num_heads < 1 or not self.requests:
            return "it has no heads or no requests", "give at least h1 and one request, e.g. q1.kv64"
        if not 0 < self.sm_scale < float("inf"):
            return f"sm_scale is {self.sm_scale}", "a softmax scale is positive and finite"
        if _ID.fullmatch(self.id) is None:
            return "a number in it is negative or has too many digits", "check the id for a doubled digit"
        if max(self.num_q_tokens, self.num_kv_tokens) > MAX_TOKENS:
            return (
                f"{self.num_q_tokens} queries and {self.num_kv_tokens} keys; at most {MAX_TOKENS} of each are allowed",
                "check the id for a doubled digit",
            )
        if (self.form == "mha") != (self.page_size == 0):
            return f"form {self.form} with page size {self.page_size}", "mha needs ragged, the others pN"
        if self.phase not in FORM_PHASES[self.form]:
            return f"phase {self.phase} of form {self.form}", f"it has {', '.join(FORM_PHASES[self.form])}"
        if self._largest_tensor > MAX_ELEMENTS:
            return (
                f"a tensor of {self._largest_tensor} elements; at most {MAX_ELEMENTS} are allowed",
                "check the id for a doubled digit",
            )
        live = [r for r in self.requests if r.q_len and r.kv_len]
        rule = {
            "decode": ("every request has q_len 1", all(r.q_len == 1 for r in live)),
            "spec": ("every request has q_len 2 to 4", all(2 <= r.q_len <= 4 for r in live)),
            "prefill": ("every request has as many queries as keys", all(r.q_len == r.kv_len for r in live)),
            "prefix": ("every request has more keys than queries", all(r.q_len < r.kv_len for r in live)),
            "chunked": ("there are at least two requests, chunks of one prompt", len(self.requests) > 1),
            "mixed": ("there are at least two requests", len(self.requests) > 1),
            "append": (
                "one head is written, every new token is one of the keys, and neither full nor a scale is named",
                (self.num_heads, self.causal, self.sm_scale) == (1, True, SM_SCALE)
                and all(r.q_len <= r.kv_len for r in self.requests),
            ),
        }[self.phase]
        if not rule[1]:
            return f"phase {self.phase} means that {rule[0]}", "name the phase that fits, or mixed"
        return None

    @property
    def num_q_tokens(self) -> int:
        return sum(r.q_len for r in self.requests)

    @property
    def num_kv_tokens(self) -> int:
        return sum(r.kv_len for r in self.requests)

    @property
    def _largest_tensor(self) -> int:
        """Elements of the largest input or output, from above: all dims of a token as one tensor."""
        d = self.dims
        if self.form == "mha":
            per_head = d.qk_nope_head_dim + d.qk_rope_head_dim + d.v_head_dim
            return max(self.num_q_tokens, self.num_kv_tokens) * self.num_heads * per_head
        slots = sum(-(-r.kv_len // self.page_size) for r in self.requests) * self.page_size
        return max(self.num_q_tokens * self.num_heads, slots) * (d.kv_lora_rank + d.qk_rope_head_dim)

    @property
    def id(self) -> str:
        groups = [(len(list(g)), r) for r, g in groupby(self.requests)]
        tokens = [
            self.phase,
            self.form,
            f"h{self.num_heads}",
            "+".join(r.id if n == 1 else f"{n}x{r.id}" for n, r in groups),
            f"p{self.page_size}" if self.page_size else "ragged",
            self.dtype,
            self.regime,
        ]
        if not self.causal:
            tokens.append("full")
        if self.layout != "split":
            tokens.append(self.layout)
        if self.sm_scale != SM_SCALE:
            tokens.append(f"scale{self.sm_scale!r}")
        if self.dims != _DIMS:
            d = self.dims
            tokens.append(f"dims{d.kv_lora_rank}.{d.qk_rope_head_dim}.{d.qk_nope_head_dim}.{d.v_head_dim}")
        return "-".join([*tokens, f"s{self.seed}"])

    @classmethod
    def parse(cls, case_id: str) -> CaseSpec:
        """The spec of an id, of a suite or not. Raises UsageError naming the part that does not read."""
        match = _ID.fullmatch(case_id.strip())
        if match is None:
            raise UsageError(f"not a case id: {case_id!r}", _explain(case_id.strip()))
        part = match.groupdict()
        dims = MLADims(*map(int, part["dims"].split("."))) if part["dims"] else _DIMS
        return cls(
            phase=part["phase"],
            form=part["form"],
            num_heads=int(part["heads"]),
            requests=tuple(_parse_requests(part["requests"])),
            page_size=int(part["page"] or 0),
            dtype=part["dtype"],
            regime=part["regime"],
            seed=int(part["seed"]),
            causal=part["full"] is None,
            sm_scale=float(part["scale"]) if part["scale"] else SM_SCALE,
            dims=dims,
            layout=part["layout"] or "split",
        )

    def with_seed(self, seed: int) -> CaseSpec:
        return replace(self, seed=seed)


_REQUEST = r"(?:[1-9]\d{0,6}x)?q\d{1,8}\.kv\d{1,8}"
# The positional parts of an id, in order, with an example of each; an id is read against these.
_PARTS = (
    ("phase", r"(?P<phase>[a-z]+)", "decode"),
    ("form", r"(?P<form>[a-z]+)", "absorbed"),
    ("heads", r"h(?P<heads>[1-9]\d{0,4})", "h16"),
    (
        "requests",
        rf"(?P<requests>{_REQUEST}(?:\+{_REQUEST})*)",
        "4xq1.kv4096",
    ),
    ("page", r"(?:p(?P<page>[1-9]\d{0,5})|ragged)", "p64 or ragged"),
    ("dtype", r"(?P<dtype>[a-z0-9]+)", "bf16"),
    ("regime", r"(?P<regime>[a-z]+)", "normal"),
)
# The parts that may follow. The exponent of a float's repr holds a minus sign (1e-05), hence its own pattern.
_FLOAT = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_DIM = r"[1-9]\d{0,4}"
_LAST = (
    r"(?P<full>full)",
    r"(?P<layout>fused)",
    rf"scale(?P<scale>{_FLOAT})",
    rf"dims(?P<dims>{_DIM}\.{_DIM}\.{_DIM}\.{_DIM})",
    r"s(?P<seed>\d{1,18})",
)
_ID = re.compile(
    "-".join(pattern for _, pattern, _ in _PARTS)
    + "".join(f"(?:-{pattern})?" for pattern in _LAST[:-1])
    + f"-{_LAST[-1]}"
)


def _explain(case_id: str) -> str:
    """Which part of an id that does not read is the first to differ from its pattern."""
    given = re.split(r"(?<!\de)-", case_id)  # not at the minus sign of an exponent
    for (name, pattern, example), value in zip(_PARTS, given, strict=False):
        if re.fullmatch(pattern, value) is None:
            return f"{value!r} stands where the {name} is expected, like {example}"
    example = (
        "an id reads like decode-absorbed-h16-4xq1.kv4096-p64-bf16-normal-s0: mla-verify kernels --list prints them"
    )
    if len(given) < len(_PARTS):
        return f"the {_PARTS[len(given)][0]} and what follows it is missing; {example}"
    last = given[len(_PARTS) :]
    for value in last:
        if not any(re.fullmatch(pattern, value) for pattern in _LAST):
            return f"{value!r} is none of full, fused, scale0.25, dims512.64.128.128 and s0, with which an id ends"
    if not last or re.fullmatch(_LAST[-1], last[-1]) is None:
        return f"the seed is missing, as in {case_id}-s0"
    return f"it must end with full, fused, scale, dims and seed in this order, each at most once; {example}"


def _parse_requests(text: str) -> list[Request]:
    requests: list[Request] = []
    for item in text.split("+"):
        count, _, rest = item.rpartition("x")
        q_len, kv_len = rest[1:].split(".kv")
        if len(requests) + int(count or 1) > MAX_TOKENS:
            raise UsageError(f"{item}: more than {MAX_TOKENS} requests", "check the id for a doubled digit")
        requests.extend([Request(int(q_len), int(kv_len))] * int(count or 1))
    return requests
