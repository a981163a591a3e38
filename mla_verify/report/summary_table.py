"""The table of a summary: one letter for each verdict, in a string for each case and kernel, a place for each seed.

    {"seeds": "0-9", "named": false, "cases": {"decode-absorbed-h16-q1.kv64-p64-bf16-normal": {"kernel": "PPPPPPPPPP"}}}

A case of an --inputs file has no seed and no spec: its group has seeds "" and says phase and dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from mla_verify.against import is_against
from mla_verify.cases import CaseSpec
from mla_verify.errors import UsageError
from mla_verify.results import CaseResult, Verdict

# R is a FAIL without a comparison: the kernel broke a rule, its numbers were not looked at.
_LETTERS = {
    "P": Verdict.PASS,
    "F": Verdict.FAIL,
    "R": Verdict.FAIL,
    "W": Verdict.WRONG_SHAPE,
    "E": Verdict.ERROR,
    "C": Verdict.CRASH,
    "T": Verdict.TIMEOUT,
    "U": Verdict.UNSUPPORTED,
    "N": Verdict.NOT_RUN,
}
_COMPARED = "PF"
_SEEDED = re.compile(r"(.+)-s(\d{1,18})")


@dataclass(frozen=True)
class Pair:
    """One case on one kernel, and the letter of its verdict."""

    case: str  # id
    kernel: str
    letter: str
    phase: str
    dtype: str
    named: bool  # the case was named on the command line, so that some kernel has to decide it

    @classmethod
    def of(cls, result: CaseResult, named: bool) -> Pair:
        compared = any(not is_against(comparison) for comparison in result.comparisons)
        letter = next(letter for letter, verdict in _LETTERS.items() if verdict is result.verdict)
        letter = "R" if letter == "F" and not compared else letter
        return cls(result.case, result.kernel, letter, result.phase, result.dtype, named)

    @property
    def verdict(self) -> Verdict:
        return _LETTERS[self.letter]

    def elements(self, lse: bool) -> int:
        """Elements of out, and of the LSE where one is returned, that were compared with what they must be.

        Of a cache write those of the written rows. A case of an --inputs file counts for none: its id does not tell.
        """
        template, seed = _split(self.case)
        return _elements(template, lse) if seed is not None and self.letter in _COMPARED else 0


@cache
def _elements(template: str, lse: bool) -> int:
    spec = CaseSpec.parse(f"{template}-s0")
    d = spec.dims
    nope = d.kv_lora_rank if spec.phase == "queries" else d.qk_nope_head_dim
    width = {
        "absorbed": d.kv_lora_rank,
        "mha": d.v_head_dim,
        "layer": d.v_head_dim,
        "write": d.kv_lora_rank + d.qk_rope_head_dim,
        "concat": nope + d.qk_rope_head_dim,
    }[spec.form]
    tokens = spec.num_q_tokens
    if spec.regime in ("repeated", "outside"):  # every fourth has no row of its own (write_inputs.py)
        tokens -= tokens // 4
    return tokens * spec.num_heads * (width + lse)


@cache
def _phase_and_dtype(template: str) -> tuple[str, str]:
    spec = CaseSpec.parse(f"{template}-s0")
    return spec.phase, spec.dtype


def _split(case: str) -> tuple[str, int | None]:
    """Id without its seed, and the seed; None of a case that has none."""
    match = None if case.startswith("inputs-") else _SEEDED.fullmatch(case)
    return (match[1], int(match[2])) if match else (case, None)


def table_of(pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """The groups of the table, in the order in which they first occur."""
    rows: dict[tuple[str, str, bool, str, str], dict[int | None, str]] = {}
    for pair in pairs:
        template, seed = _split(pair.case)
        facts = ("", "") if seed is not None else (pair.phase, pair.dtype)
        rows.setdefault((template, pair.kernel, pair.named, *facts), {})[seed] = pair.letter
    groups: dict[tuple[str, bool, str, str], dict[str, dict[str, str]]] = {}
    for (template, kernel, named, phase, dtype), letters in rows.items():
        seeds = sorted(seed for seed in letters if seed is not None)
        text = "".join(letters[seed] for seed in (seeds or (None,)))
        groups.setdefault((_ranges(seeds), named, phase, dtype), {}).setdefault(template, {})[kernel] = text
    return [
        {"seeds": seeds, "named": named, **({"phase": phase, "dtype": dtype} if phase else {}), "cases": cases}
        for (seeds, named, phase, dtype), cases in groups.items()
    ]


def pairs_of(table: Iterable[Mapping[str, Any]]) -> Iterator[Pair]:
    """What `table_of` was given, in the table's order. Raises UsageError, KeyError or ValueError for what is none."""
    for group in table:
        seeds: list[int | None] = [*_parse_ranges(group["seeds"])] or [None]
        for template, kernels in group["cases"].items():
            if seeds == [None]:
                phase, dtype = group["phase"], group["dtype"]
            else:
                phase, dtype = _phase_and_dtype(template)
            for kernel, letters in kernels.items():
                if len(letters) != len(seeds) or not set(letters) <= set(_LETTERS):
                    raise UsageError(
                        f"{template} of {kernel} has the verdicts {letters!r} for {len(seeds)} seeds",
                        f"one letter for each seed, of {' '.join(_LETTERS)}",
                    )
                for seed, letter in zip(seeds, letters, strict=True):
                    case = template if seed is None else f"{template}-s{seed}"
                    yield Pair(case, kernel, letter, phase, dtype, bool(group["named"]))


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _parse_ranges(text: str) -> Iterator[int]:
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
