"""Summaries of several runs of one source -> one summary: kernels of different machines, parts of a suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mla_verify.errors import UsageError
from mla_verify.report.summary import Summary, limited
from mla_verify.report.summary_kernels import KernelFacts
from mla_verify.report.summary_table import pairs_of, table_of


def merge_summaries(summaries: Sequence[Summary], commit: str | None = None) -> Summary:
    """Several runs as one. commit: that of the source, where the runs could not tell.

    Raises UsageError when they are of different sources, or have a pair of case and kernel in common.
    """
    hashes = {summary.package_hash for summary in summaries}
    commits = {c for c in (commit, *(summary.commit for summary in summaries)) if c is not None}
    for what, values in (("package hash", hashes), ("commit", commits)):
        if len(values) > 1:
            raise UsageError(
                f"the summaries are of more than one {what}: {', '.join(map(str, values))}", "merge runs of one source"
            )
    if not summaries:
        raise UsageError("no summary to merge", "name one or more files")
    counts = Counter((pair.case, pair.kernel) for summary in summaries for pair in summary.pairs)
    twice = next((key for key, count in counts.items() if count > 1), None)
    if twice:
        raise UsageError(f"{twice[1]} on {twice[0]} is in more than one summary", "merge runs that share no pair")
    kernels: dict[str, KernelFacts] = {}
    for summary in summaries:
        for name, facts in summary.kernels.items():
            kernels[name] = kernels[name].merged(name, facts) if name in kernels else facts
    return Summary(
        environments=tuple(environment for summary in summaries for environment in summary.environments),
        package_hash=hashes.pop(),
        commit=commits.pop() if commits else None,
        interrupted=any(summary.interrupted for summary in summaries),
        open_questions=tuple(question for summary in summaries for question in summary.open_questions),
        unpaired=tuple(dict.fromkeys(case for summary in summaries for case in summary.unpaired)),
        pairs=tuple(pairs_of(table_of(pair for summary in summaries for pair in summary.pairs))),
        kernels=kernels,
        why=limited(why for summary in summaries for why in summary.why),
    )
