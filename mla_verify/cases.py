"""CaseSpec: one case, as a value. Its id is readable and reproduces it: `CaseSpec.parse(spec.id) == spec`.

decode-absorbed-h16-4xq1.kv4096-p64-bf16-normal-s0
mixed-absorbed-h16-q1.kv33+2xq1.kv0+q5.kv100-p16-fp16-needle-full-scale0.25-s3
prefill-mha-h16-q257.kv257-ragged-fp32-normal-fused-s0
append-write-h1-q768.kv1000-p64-bf16-rows-s0
keys-concat-h128-q768.kv768-ragged-bf16-rows-s0
prefix-layer-h16-q17.kv300-p64-bf16-normal-s0
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from mla_verify.case_ids import CASE_ID, explain
from mla_verify.dims import MLADims
from mla_verify.errors import UsageError, did_you_mean
from mla_verify.formats import DTYPES
from mla_verify.forms import (
    ATTENTION_PHASES,
    CONCAT_PHASES,
    FORM_LAYOUTS,
    FORM_PHASES,
    FORM_REGIMES,
    FORMS,
    LAYOUTS,
    PHASES,
    RAGGED_FORMS,
    REGIMES,
    WRITE_REGIMES,
)

__all__ = [
    "ATTENTION_PHASES",
    "CONCAT_PHASES",
    "FORMS",
    "FORM_LAYOUTS",
    "FORM_PHASES",
    "FORM_REGIMES",
    "LAYOUTS",
    "MAX_ELEMENTS",
    "MAX_TOKENS",
    "PHASES",
    "RAGGED_FORMS",
    "REGIMES",
    "SM_SCALE",
    "WRITE_REGIMES",
    "CaseSpec",
    "Request",
]

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
    page_size: int  # 0 for RAGGED_FORMS
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
            ("regime", self.regime, FORM_REGIMES.get(self.form, ())),
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
        if CASE_ID.fullmatch(self.id) is None:
            return "a number in it is negative or has too many digits", "check the id for a doubled digit"
        if max(self.num_q_tokens, self.num_kv_tokens) > MAX_TOKENS:
            return (
                f"{self.num_q_tokens} queries and {self.num_kv_tokens} keys; at most {MAX_TOKENS} of each are allowed",
                "check the id for a doubled digit",
            )
        if (self.form in RAGGED_FORMS) != (self.page_size == 0):
            needed = "ragged" if self.form in RAGGED_FORMS else "pages, as in p64"
            return f"form {self.form} with page size {self.page_size}", f"{self.form} needs {needed}"
        if self.layout not in FORM_LAYOUTS[self.form]:
            there = ", ".join(FORM_LAYOUTS[self.form])
            return f"layout {self.layout} of form {self.form}", f"it has {there}"
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
            **dict.fromkeys(
                CONCAT_PHASES,
                (
                    "every request has as many queries as keys, and neither full nor a scale is named",
                    (self.causal, self.sm_scale) == (True, SM_SCALE)
                    and all(r.q_len == r.kv_len for r in self.requests),
                ),
            ),
        }[self.phase]
        if not rule[1]:
            hint = "name the phase that fits, or mixed" if self.phase in ATTENTION_PHASES else "write the id so"
            return f"phase {self.phase} means that {rule[0]}", hint
        return None

    @property
    def num_q_tokens(self) -> int:
        return sum(r.q_len for r in self.requests)

    @property
    def num_scores(self) -> int:
        """Query times key times head, masked ones included."""
        return self.num_heads * sum(r.q_len * r.kv_len for r in self.requests)

    @property
    def num_kv_tokens(self) -> int:
        return sum(r.kv_len for r in self.requests)

    @property
    def num_bytes(self) -> int:
        """Of the largest input or output, from above, without the room that a far layout leaves before it."""
        return self._largest_tensor * (4 if self.dtype == "fp32" else 2)

    @property
    def _largest_tensor(self) -> int:
        """Elements of the largest input or output, from above: all dims of a token as one tensor."""
        d = self.dims
        if self.form == "concat":
            keys = d.qk_nope_head_dim + max(d.qk_rope_head_dim, d.v_head_dim)  # v lies beside k_nope in layout fused
            per_head = keys if self.phase == "keys" else d.kv_lora_rank + d.qk_rope_head_dim
            return self.num_q_tokens * self.num_heads * per_head
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
        match = CASE_ID.fullmatch(case_id.strip())
        if match is None:
            raise UsageError(f"not a case id: {case_id!r}", explain(case_id.strip()))
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

    def alone(self, request: int) -> CaseSpec | None:
        """One request as a case of its own, of a phase that can be one; None for more queries than keys."""
        q_len, kv_len = self.requests[request].q_len, self.requests[request].kv_len
        phase = self.phase
        if phase in ("chunked", "mixed"):
            if q_len > kv_len:
                return None
            phase = "decode" if q_len == 1 else "prefill" if q_len == kv_len else "prefix"
        return replace(self, phase=phase, requests=(self.requests[request],))

    def with_seed(self, seed: int) -> CaseSpec:
        return replace(self, seed=seed)


def _parse_requests(text: str) -> list[Request]:
    requests: list[Request] = []
    for item in text.split("+"):
        count, _, rest = item.rpartition("x")
        q_len, kv_len = rest[1:].split(".kv")
        if len(requests) + int(count or 1) > MAX_TOKENS:
            raise UsageError(f"{item}: more than {MAX_TOKENS} requests", "check the id for a doubled digit")
        requests.extend([Request(int(q_len), int(kv_len))] * int(count or 1))
    return requests
