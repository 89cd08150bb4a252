"""The table of a head trained by the published recipe beside the embedded one, in both loops."""

from pathlib import Path

from test_result_weights import write

from benchmarks import tables


def test_the_table(tmp_path: Path) -> None:
    """A line that was measured again counts; two processes write their families in any order."""
    cells = [("published", "released", 2.0), ("published", "mrp_spec", 3.0), ("embedded", "released", 2.5)]
    lines = [
        {
            "family": family,
            "num_draft_states": 4,
            "head": head,
            "decoding": loop,
            "tokens_per_forward": speed,
            "tokens_per_forward_95": [speed - 0.1, speed + 0.1],
            "over_published": speed / 2,
            "over_published_95": [speed / 2 - 0.1, speed / 2 + 0.1],
            "head_per_token": 0.0,
            "texts_that_differ": 1,
        }
        for family in ("code", "math")
        for head, loop, speed in [*cells, ("embedded", "mrp_spec", 5.0), ("embedded", "mrp_spec", 4.0)]
    ]
    write(tmp_path / "tiny_published_head.jsonl", lines)
    head, _, row, code = tables.published_head(tmp_path).splitlines()
    columns = "released, published head | released, embedded head | mrp_spec, published head | mrp_spec, embedded head"
    assert head == f"| family | K | {columns} | tokens / forward | texts that differ |"
    assert code == row.replace("math", "code")
    assert row == (
        "| math | 4 | 2.00 (1.90-2.10) | 2.50 (1.25x, 1.15-1.35) | 3.00 (1.50x, 1.40-1.60) | 4.00 (2.00x, 1.90-2.10) | "
        "2.00, 2.50, 3.00, 4.00 | 4 |"
    )
