"""The measurement of a served model: what it makes of counts. The engine itself is started by make test-serving."""

from benchmarks.server import Measured
from benchmarks.serving import compared, line


def turn(lengths: list[int], seconds: float, forwards: int, token: int = 5) -> Measured:
    """A turn whose answers have so many tokens."""
    return Measured([{"output_ids": [token] * length} for length in lengths], seconds, forwards)


def test_a_turn_is_counted() -> None:
    assert line(turn([6, 4], 2.5, 8)) == {
        "tokens": 10,
        "forwards": 8,
        "tokens_per_forward": 1.25,
        "seconds": 2.5,
        "tokens_per_second": 4.0,
    }


def test_turns_are_compared_pair_by_pair() -> None:
    stock = [turn([6, 4], 4.0, 10), turn([6, 4], 6.0, 10), turn([6, 4], 8.0, 10)]
    mrp = [turn([6, 4], 2.0, 5), turn([6, 4], 2.0, 4), turn([6, 4], 8.0, 3)]
    assert compared(stock, mrp) == {
        "tokens_per_forward_ratio": 2.5,  # 30 tokens over 12 forwards, against 30 over 30
        "tokens_per_second_ratio": 2.0,  # of 2, 3 and 1
        "tokens_per_second_ratio_range": [1.0, 3.0],
        "texts_that_differ": 0,
        "texts": 2,
    }


def test_speed_is_of_tokens_where_texts_differ() -> None:
    told = compared([turn([8], 4.0, 8)], [turn([4], 1.0, 2, token=7)])
    assert told["tokens_per_second_ratio"] == 2.0  # 2 tokens a second against 4
    assert told["texts_that_differ"] == 1
