"""The documents' tables are those that committed measurements give, and drafts are lossless in all
of these."""

import json
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from typing import Any

import pytest
from mrp_trainer.data.tasks import FAMILIES

from benchmarks import cost_model, longtext, quantized_cpu, tables
from benchmarks.frontier import DRAFTERS
from benchmarks.targets import TARGETS
from tests.support.places import ROOT


def printed(command: Any, *arguments: str) -> str:
    """What a command prints."""
    with redirect_stdout(StringIO()) as out:
        command.main([*arguments])
    return out.getvalue().strip()


@pytest.mark.parametrize(
    ("document", "table"),
    [
        ("MODEL_CARD.md", tables.heldout),
        ("hub_configs/sdar-tiny-mrp/README.md", tables.heldout),
        ("README.md", tables.summary),
        ("docs/results.md", tables.targets),
        ("docs/results.md", tables.charges),
        ("docs/results.md", tables.break_even),
        ("docs/results.md", tables.aims),
        ("docs/results.md", tables.batches),
        ("docs/results.md", tables.sampled),
        ("docs/results.md", tables.seeds),
        ("docs/results.md", tables.headline),
        ("docs/rules.md", tables.rules),
        ("benchmarks/README.md", tables.TABLES["undrafted"]),
        ("benchmarks/README.md", lambda: printed(cost_model)),
        ("docs/devices.md", lambda: printed(cost_model, "--memory")),
        ("docs/devices.md", lambda: quantized_cpu.table(tables.RESULTS / "quantized_cpu.jsonl")),
        (
            "benchmarks/README.md",
            lambda: cost_model.table(["H200"], ["30b-a3b"], [1, 4, 8, 16, 32, 64], [4, 8], 512),
        ),
        ("benchmarks/README.md", lambda: printed(longtext, "tables")),
        ("benchmarks/README.md", tables.provenance),
    ],
)
def test_a_quoted_table_is_what_the_command_prints(document: str, table: Any) -> None:
    assert f"\n{table()}\n" in (ROOT / document).read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_texts_are_their_targets(family: str) -> None:
    """For every target and way to draft, in float64."""
    drafted = [
        line for line in tables.frontier_lines() if line["family"] == family and "target" in line
    ]
    assert {line["texts_that_differ"] for line in drafted} == {0}
    assert {line["asked"]["dtype"] for line in drafted} == {"float64"}
    assert {(line["target"], line["decoding"]) for line in drafted} >= set(
        product(TARGETS, DRAFTERS)
    )


def test_the_soak_found_nothing() -> None:
    """In a million tokens or more of one commit, 200,000 of them with the slow decoder, as the
    documents say."""
    lines = [json.loads(line) for line in (tables.RESULTS / "soak.jsonl").read_text().splitlines()]
    (commit,) = {line["commit"] for line in lines if "commit" in line}
    runs = [line for line in lines if "mismatches" in line]
    assert 2 * len(runs) == len(lines), "a mismatch has a line of its own"
    assert not sum(run["mismatches"] for run in runs)
    tokens, calls = (sum(run[name] for run in runs) for name in ("tokens", "calls"))
    kinds, rules, drafts = Counter[str](), Counter[str](), Counter[str]()
    for run in runs:
        kinds.update(run["tokens_by_kind"])
        rules.update(run["tokens_drafted"])
        drafts.update(run["tokens_with"])
    assert tokens > 1_000_000
    assert kinds["reference"] > 200_000
    text = " ".join((ROOT / "docs/lossless.md").read_text().split())
    assert f"At commit {commit}" in text
    assert f"compared {tokens:,} tokens in {calls:,} calls, with 0 mismatches" in text
    assert f"{kinds['reference']:,} of them with the slow decoder" in text
    assert f"{kinds['mode']:,} between drafts and their targets" in text
    of_benchmarks = " ".join((ROOT / "benchmarks/README.md").read_text().split())
    least = min(count for rule, count in rules.items() if count)
    for number in (tokens, kinds["reference"], least, *drafts.values()):
        assert f"{number:,}" in of_benchmarks
