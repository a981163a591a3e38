"""A context of 131,072 tokens fits: the reference works in blocks."""

from benchmarks.measure import memory_of_long_context


def test_128_heads_over_131072_keys_take_under_4_gib_beyond_their_inputs() -> None:
    assert memory_of_long_context()["gib_beyond_inputs"] < 4
