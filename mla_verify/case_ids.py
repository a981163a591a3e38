"""How the id of a case reads: its parts, and which of them is wrong in an id that does not."""

from __future__ import annotations

import re

from mla_verify.forms import LAYOUTS

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
    rf"(?P<layout>{'|'.join(LAYOUTS[1:])})",
    rf"scale(?P<scale>{_FLOAT})",
    rf"dims(?P<dims>{_DIM}\.{_DIM}\.{_DIM}\.{_DIM})",
    r"s(?P<seed>\d{1,18})",
)
CASE_ID = re.compile(
    "-".join(pattern for _, pattern, _ in _PARTS)
    + "".join(f"(?:-{pattern})?" for pattern in _LAST[:-1])
    + f"-{_LAST[-1]}"
)


def explain(case_id: str) -> str:
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
            known = f"full, {', '.join(LAYOUTS[1:])}, scale0.25, dims512.64.128.128 and s0"
            return f"{value!r} is none of {known}, with which an id ends"
    if not last or re.fullmatch(_LAST[-1], last[-1]) is None:
        return f"the seed is missing, as in {case_id}-s0"
    return f"it must end with full, layout, scale, dims and seed in this order, each at most once; {example}"
