"""Numbers by hand, and files of results: complete lines only, and lines of other weights or code
are not taken."""

import ast
import json
import math
import re
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mrp_trainer.evaluate import provenance
from mrp_trainer.evaluate.acceptance import (
    acceptance_by_depth,
    mean_accepted_length,
    measure_acceptance,
)
from mrp_trainer.evaluate.command import shortlist_of
from mrp_trainer.evaluate.cost import pass_units
from mrp_trainer.evaluate.decoded import Decoded
from mrp_trainer.evaluate.intervals import ratio_of_sums, wilson
from mrp_trainer.evaluate.provenance import deciding, digests
from mrp_trainer.evaluate.results import ResultsFile
from transformers import PreTrainedTokenizerFast

import modeling_mrp
from benchmarks import tables
from benchmarks.common import embedded_weights, header, read_lines
from tests.support.helpers import generate
from tests.support.places import ROOT
from tests.support.random_cases import make_model


def made(**given: Any) -> Decoded:
    """Two problems, of which only some fields matter."""
    return Decoded(**{**dict.fromkeys(one.name for one in fields(Decoded)), **given})


def test_rates_by_hand() -> None:
    """10 of 12 offers at depth 1, none of 1 at depth 2, nothing behind. Problem 1 alone has a
    second draft."""
    decoded = made(
        offered_at_depth=np.array([[8, 1, 0], [4, 0, 0]]),
        accepted_at_depth=np.array([[6, 0, 0], [4, 0, 0]]),
        rounds=[8, 4],
        accepted=[6, 4],
    )
    first, second = acceptance_by_depth(decoded)
    assert (first[0], first[1].value) == (12, pytest.approx(10 / 12))
    assert (first[1].low, first[1].high) == (0.75, 1.0), "both draws problem 0, or both problem 1"
    assert (second[0], second[1].value) == (1, 0)
    length = mean_accepted_length(decoded)
    assert length is not None
    assert (length.value, length.low, length.high) == (pytest.approx(22 / 12), 14 / 8, 2)
    assert mean_accepted_length(made(rounds=[0, 0], accepted=[0, 0])) is None
    decoded = made(ids=[[1] * 6, [1] * 2], row_forwards=[3, 1], row_head_forwards=[1, 3])
    assert (decoded.tokens_per_forward, decoded.head_forwards_per_token) == (8 / 4, 4 / 8)


def test_measured_as_counted(id_tokenizer: PreTrainedTokenizerFast) -> None:
    """The numbers are those of `generate`'s own counts; nothing is drawn, and no gradient is
    left."""
    drafter, rows = make_model(3, block_size=8), [[1, 2, 3, 4, 5], [9, 8, 7]]
    torch.nn.init.normal_(
        drafter.mrp_head.norm.weight, std=0.05, generator=torch.Generator().manual_seed(0)
    )
    stats = generate(
        drafter, rows, decoding="mrp_spec", num_draft_states=5, max_new_tokens=12
    ).stats
    expected = {
        "mean_accepted_length": 1 + int(stats.accepted.sum()) / int(stats.accepted_lengths.sum()),
        "tokens_per_forward": 24 / int(stats.row_forwards.sum()),
        "first_draft_acceptance": int(stats.accepted_at_depth[:, 0].sum())
        / int(stats.offered_at_depth[:, 0].sum()),
    }
    assert 1 < expected["mean_accepted_length"] < 5
    before = torch.get_rng_state()
    for size in (1, 16):
        assert measure_acceptance(
            drafter, id_tokenizer, rows, 12, size, num_draft_states=5
        ) == pytest.approx(expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in drafter.parameters())
    with pytest.raises(ValueError, match="no prompt to decode"):
        measure_acceptance(drafter, id_tokenizer, [])


def test_intervals() -> None:
    """The ends of Wilson's are the shares p that the observed one is z standard errors of p away
    from. Of 20 ones and 180 zeros the sum over a resample is binomial(200, 0.1), whose 2.5 %
    quantiles are 12 and 29, to one problem. A ratio of sums is no mean of ratios: of 10 / 1 and 10
    / 9 resamples are 20 / 2, 20 / 10 and 20 / 18."""
    for right, count in ((1, 7), (8, 10), (250, 500)):
        found = wilson(right, count)
        for p in (found.low, found.high):
            assert abs(right / count - p) == pytest.approx(
                1.959963984540054 * math.sqrt(p * (1 - p) / count)
            )
        assert found.low < found.value < found.high
    for over, under, expected, off in (
        ([1] * 20 + [0] * 180, [1] * 200, (12 / 200, 20 / 200, 29 / 200), 1 / 200),
        ([10, 10], [1, 9], (20 / 18, 2, 10), 1e-9),
    ):
        ratio = ratio_of_sums(over, under)
        assert ratio is not None
        assert (ratio.low, ratio.value, ratio.high) == pytest.approx(expected, abs=off)


def test_a_cut_line_is_removed_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    results = ResultsFile(path, "asked")
    results.add({"asked": 1, "tau": 0.5, "value": 3})
    results.add({"asked": 1, "tau": 0.7, "value": 4})
    first, second = path.read_bytes().splitlines(keepends=True)
    for length in range(1, len(second)):
        path.write_bytes(first + second[:length])
        again = ResultsFile(path, "asked")
        assert [line["value"] for line in again.lines] == [3]
        assert path.read_bytes() == first
    again.add({"asked": 2, "tau": 0.7, "value": 5})
    assert [json.loads(line)["value"] for line in path.read_text().splitlines()] == [3, 5]
    assert (again.find(asked=1, tau=0.5), again.find(asked=1, tau=0.7)) == (again.lines[0], None)


ALONE = {"asked": 1, "mode": "static", "head_per_token": 0.0}
DRAFTED = {"asked": 1, "mode": "mrp_spec", "head_per_token": 0.3}


@pytest.mark.parametrize(
    ("part", "taken", "whose"),
    [
        ("backbone", [], "that of sdar-tiny-mrp"),
        ("head", [ALONE], "that of sdar-tiny-mrp"),
        ("deciding", [], "today's"),
    ],
)
def test_lines_of_other_weights_or_code_are_measured_again(
    tmp_path: Path, part: str, taken: list[Any], whose: str
) -> None:
    """But for modes without a head where only the head is another; tables refuse them until that is
    done. A line belongs to the nearest header before it."""
    path, today = tmp_path / "tiny_sweep.jsonl", {**embedded_weights(), "deciding": deciding()}
    old = {
        "benchmark": "sweep",
        **today,
        part: "0123456789ab",
        "options": {"count": 200, "batch_size": [1, 8], "before": None},
    }
    path.write_text("".join(json.dumps(line) + "\n" for line in (old, ALONE, DRAFTED)))
    what = "deciding code" if part == "deciding" else part
    told = f"{path}: measured with the {what} 0123456789ab, and {whose} is {today[part]}: "
    told += f"measure again with sweep and {old['options']}"
    if part == "deciding":
        told += ", or show with benchmarks.confirm that the counts are the same"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        read_lines(path)
    results = ResultsFile(path, "asked")
    results.begin({"benchmark": "sweep", **today})
    assert [line for line in (ALONE, DRAFTED) if results.find(mode=line["mode"])] == taken
    results.add(DRAFTED)
    results.add(DRAFTED)
    assert results.find(mode="mrp_spec") == DRAFTED
    assert [json.loads(line) for line in path.read_text().splitlines()][3:] == [
        results.header,
        DRAFTED,
        DRAFTED,
    ]
    assert read_lines(path) == [*taken, DRAFTED, DRAFTED]


def test_digests_change_with_their_part_alone(tmp_path: Path) -> None:
    """Of backbone, head, and what decides: a rule's code changes that; layout, comments, docstrings
    and other modules do not."""
    model = make_model().float()
    before = digests(model)
    assert digests(model.to(torch.float64)) == before, "the same weights, computing in float64"
    for part, tensor in (("head", model.mrp_head.norm.weight), ("backbone", model.lm_head.weight)):
        with torch.no_grad():
            tensor.view(-1)[0] += 1e-3
        after = digests(model)
        assert {name for name in after if after[name] != before[name]} == {part}
        before = after
    model.detach_head()
    assert digests(model) == {**before, "head": None}
    copy = Path(shutil.copytree(Path(modeling_mrp.__file__).parent, tmp_path / "a"))
    reveal = copy / "rules" / "reveal.py"
    reveal.write_text('"""Rules."""\n# of reveals\n' + reveal.read_text().split('"""', 2)[2])
    loop = copy / "generate" / "loop.py"
    loop.write_text(ast.unparse(ast.parse(loop.read_text())))
    (copy / "bundle.py").write_text("")
    assert deciding(copy) == deciding()
    other = Path(shutil.copytree(copy, tmp_path / "b"))
    (other / "rules" / "draft.py").write_text((copy / "rules" / "draft.py").read_text() + "1 + 1\n")
    assert deciding(other) != deciding()


def test_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say commit, weights and options; nothing is written beside the results while the code
    has changes."""
    model = make_model()
    said = provenance.header(
        "sweep", SimpleNamespace(model=str(ROOT / "hub_configs"), count=3), model
    )
    assert said.items() >= digests(model).items()
    assert said["options"] == {"model": "hub_configs", "count": 3}
    checkout = (ROOT / ".git").exists()
    assert (
        re.fullmatch(r"[0-9a-f]{7,}( with changes)?", said["commit"])
        if checkout
        else said["commit"] is None
    )
    monkeypatch.setattr(provenance, "commit", lambda: "0123abc with changes")
    path = tmp_path / "benchmarks" / "results" / "new.jsonl"
    path.parent.mkdir(parents=True)
    (printed := tmp_path / "1").symlink_to(path)  # as of a shell's redirection
    with pytest.raises(
        ValueError,
        match="the code has changes that no commit holds: commit them first, or name another",
    ):
        header("host", SimpleNamespace(), printed=printed)
    with pytest.raises(ValueError, match="the code has changes"):
        ResultsFile(path, "asked").begin(provenance.header("mrp evaluate", SimpleNamespace()))
    assert header("soak", SimpleNamespace(output=tmp_path / "new.jsonl"))["deciding"] == deciding()


def test_every_committed_result_says_what_it_measured() -> None:
    """Also those that no table shows; training logs are none."""
    for path in sorted(tables.RESULTS.glob("*.jsonl")):
        if not path.stem.endswith("_log"):
            current = path.stem.startswith("tiny") and "seed" not in path.stem
            assert read_lines(path, current=current), path
            first = json.loads(path.read_text().splitlines()[0])
            assert first["commit"], path
            assert "with changes" not in first["commit"], path


def test_a_head_pass_is_charged_for_the_list_that_it_read() -> None:
    """Vocabularies of more than 16,384 tokens have a shortlist by default, which has to be known to
    charge a pass; `auto` is charged as its largest K."""
    large, small = make_model(vocab_size=20_000, mask_token_id=19_999), make_model()
    drafted = {"decoding": "mrp_spec", "target": "static", "num_draft_states": 4}
    assert shortlist_of(large, drafted) == 16
    assert shortlist_of(small, drafted) == 0
    assert shortlist_of(large, {**drafted, "set": {"draft_shortlist": 0}}) == 0
    assert shortlist_of(large, {**drafted, "set": {"draft_shortlist": 5}}) == 5
    assert shortlist_of(large, {"decoding": "mrp_direct"}) == 0
    assert shortlist_of(large, {"decoding": "static"}) == 0
    line = {"tokens_per_forward": 2.0, "head_per_token": 0.5}
    whole = pass_units({**line, "draft_shortlist": 0, "num_draft_states": 4})
    of_auto = pass_units({**line, "draft_shortlist": 16, "num_draft_states": "auto"})
    assert whole == pytest.approx(0.229, abs=0.005)
    assert of_auto == pass_units({**line, "draft_shortlist": 16, "num_draft_states": 8})
    assert of_auto < 0.7 * whole
