"""The measurement of a served model: what it makes of counts. The engine itself is started by make test-serving."""

from benchmarks.server import Measured
from benchmarks.serving import compared


def turn(lengths: list[int], forwards: int, token: int = 5) -> Measured:
    """A turn whose answers have so many tokens."""
    return Measured([{"output_ids": [token] * length} for length in lengths], 1.0, forwards)


def test_turns_are_counted_together() -> None:
    """30 tokens over 12 forwards, against 30 over 30."""
    stock, mrp = [turn([6, 4], 10)] * 3, [turn([6, 4], forwards) for forwards in (5, 4, 3)]
    assert compared(stock, mrp) == {"tokens_per_forward": [1.0, 2.5], "ratio": 2.5, "texts_that_differ": 0, "texts": 2}
    assert compared([turn([8], 8)], [turn([4], 2, token=7)])["texts_that_differ"] == 1
