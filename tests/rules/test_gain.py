"""How much a round drafts: by a table of costs, from the chances of drafts and what came of earlier
ones."""

import json
import math
from itertools import permutations
from typing import Any

import pytest
import torch

from modeling_mrp import MRPForCausalLM, MRPGenerationConfig
from modeling_mrp.generate.loop import Drafting, Mode, draft_amount
from modeling_mrp.networks.predicted import STATES, Rates, costs_at, predicted_costs
from modeling_mrp.rules.costs import RoundCosts, interpolated
from modeling_mrp.rules.draft import Node, accept, build_draft
from modeling_mrp.rules.gain import Amount, Calibration, ExpectedGain, Fixed, expected_steps
from modeling_mrp.rules.reveal import RULES, CheckedRule, Sequential, Static, sigmoid
from tests.support.handmade import A, B, C, D, M, row, says, state
from tests.support.helpers import LIVELY, PROMPTS, generate

FREE = {"states": [1, 1024], "backbone": [1.0, 1.0], "head": [1e-6, 1e-6]}
ACCEPTANCE = 0.75
STEEP = {"states": [1, 2, 1024], "backbone": [1.0, 2.0, 1024.0], "head": [1.0, 2.0, 1024.0]}


def draft(chances: list[float], depths: list[int], ids: Any = (M, M, M, M)) -> list[Node]:
    """Make nodes of equal states with these chances, the row's own state first."""
    nodes = [Node(state(list(ids)), -1, None)]
    for chance, depth in zip(chances, depths, strict=True):
        nodes.append(Node(state(list(ids)), -1, None, chance=chance, depth=depth))
    return nodes


def gain(costs: dict[str, Any], passes: int = 0, states: int = 8) -> ExpectedGain:
    return ExpectedGain(states, passes, RoundCosts.from_dict(costs), ACCEPTANCE)


def test_costs_between_and_beyond_what_is_measured() -> None:
    assert [interpolated((2, 4), (3.0, 5.0), states) for states in (1, 2, 3, 4, 8)] == [
        3.0,
        3.0,
        4.0,
        5.0,
        10.0,
    ]
    costs = RoundCosts((1, 8), (1.0, 8.0), (0.5, 4.0), 0.25)
    assert costs.of_round(1, 4, 0) == 4.0 + 4 * 0.25
    assert costs.of_head(1, 4, 1) == 1.5  # of the three drafts that it reads
    assert costs.of_round(2, 4, 1) == 8.0 + 8 * 0.25 + 3.0
    assert RoundCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"states": [1, 2], "backbone": [1.0]},
        {"states": [2, 1], "backbone": [1.0, 1.0]},
        {"states": [1, 2], "backbone": [1.0, 0.0]},
        {"states": [1, 2], "backbone": [1.0, "2"]},
        {"states": [1, 2], "backbone": [1.0, float("nan")]},
        {"states": [1, 2], "backbone": [1.0, 2.0], "head": [1.0]},
        {"states": [1], "backbone": [1.0], "speed": 3},
    ],
)
def test_tables_that_are_none_are_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="round_costs is"):
        MRPGenerationConfig(round_costs=table)


def test_a_draft_has_as_many_states_as_are_worth_their_cost() -> None:
    nodes = draft([0.9, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1], [1] * 7)
    linear = {"states": [1, 64], "backbone": [1.0, 64.0]}
    gentle = {"states": [1, 64], "backbone": [1.0, 1 + 63 * 0.3]}
    assert gain(FREE).plan([nodes]) == Amount(8)
    assert gain(linear).plan([nodes]) == Amount(1)
    assert gain(gentle).plan([nodes]) == Amount(3)
    assert gain(gentle, states=2).plan([nodes]) == Amount(2)
    # a row that has ended costs what the others cost
    assert gain(gentle).plan([nodes, [], [], []]) == Amount(1)


def test_the_head_runs_where_that_is_worth_its_passes() -> None:
    nodes = draft([0.9, 0.8, 0.7], [1, 2, 3])
    assert gain(FREE, passes=1).plan([nodes]).passes == 1
    assert gain({**FREE, "head": [1.0, 1.0]}, passes=1).plan([nodes]).passes == 0
    amount = Amount(8, 1)
    steep = gain({**STEEP, "head": [1e-6, 1e-6, 1e-6]}, passes=1)
    assert steep.cut(amount, [nodes]) == 1, "what the head has read may be worth no state"
    assert gain(FREE, passes=1).cut(amount, [nodes]) == 4
    assert Fixed(8, 1).cut(amount, [nodes]) == 8


def test_only_a_share_of_additional_steps_counts() -> None:
    """A second state that makes 0.675 steps more, of which 0.574 count, is not worth 0.62 of a
    forward; it is worth 0.5."""
    nodes = draft([0.9], [1])
    more = {"states": [1, 64], "backbone": [1.0, 1 + 63 * 0.62]}
    less = {"states": [1, 64], "backbone": [1.0, 1 + 63 * 0.5]}
    assert gain(more).plan([nodes]) == Amount(1)
    assert gain(less).plan([nodes]) == Amount(2)
    assert 0.9 * ACCEPTANCE > 0.62 > ExpectedGain.COUNTED * 0.9 * ACCEPTANCE > 0.5


def test_amounts_are_compared_by_cost() -> None:
    """In whatever order they come, as passes of a head come after all states. Two states
    make 1.25 steps per cost, and four 1.75, of which 1.41 count; held against four, two would seem
    better."""
    choices = [(1.0, 1.0, Amount(1)), (4.0, 7.0, Amount(4)), (2.0, 2.5, Amount(2, 1))]
    for order in permutations(choices):
        assert gain(FREE)._best([*order]) == Amount(4)


def test_rows_that_end_a_block_wait_where_that_pays() -> None:
    """Their first state of the next block is a second one for all rows."""
    clean = [Node(state([A, B, C, D]), -1, None), Node(state([M] * 4, 8), 0, None)]
    open_rows = [draft([], []) for _ in range(3)]
    for slope, states in ((1.0, 1), (0.1, 2)):
        table = {"states": [4, 8], "backbone": [1.0, 1.0 + slope]}
        assert gain(table).plan([clean, *open_rows]).states == states
    assert gain(STEEP).plan([clean]).states == 2
    assert Fixed().plan([clean, *open_rows]) == Amount(2)
    assert Fixed().plan(open_rows) == Amount(1)


def test_chances_are_corrected_by_what_came_of_drafts() -> None:
    calibration = Calibration(decay=0.5)
    assert calibration.factors(2) == [1.0, 0.5, 0.25]
    for _ in range(300):
        nodes = draft([0.8, 0.4], [1, 2])
        nodes[1].accepted = _ % 2 == 0
        calibration.learn([nodes], [nodes])
    first, second, third = calibration.factors(3)[1:]
    assert first == pytest.approx(0.5 / 0.8, abs=0.03)
    assert second < 0.05
    assert third == second / 2


def test_a_power_flattens_chances() -> None:
    """Of drafts with a chance of 0.09 and 0.81, as 0.3 and 0.9, and so does what is learned."""
    flat = Calibration(1.0, power=0.5)
    nodes = draft([0.09, 0.81], [1, 1])
    assert expected_steps([nodes], flat, [1, 2, 3]) == pytest.approx([1.0, 1.3, 2.2])
    flat.learn([nodes], [nodes])
    assert flat.predicted == pytest.approx([1.2])


def test_a_chance_of_more_than_one_counts_as_one() -> None:
    """More may be accepted than stale chances promise, of which the head is no part."""
    calibration = Calibration(1.0)
    for _ in range(100):
        nodes = draft([0.3], [1])
        nodes[1].accepted = True
        calibration.learn([nodes], [nodes])
    assert calibration.factors(1)[1] > 2
    assert expected_steps([draft([0.3, 0.9], [1, 1])], calibration, [1, 2, 3]) == pytest.approx(
        [1.0, 1.0 + 0.3 * calibration.factors(1)[1], 2.0 + 0.3 * calibration.factors(1)[1]]
    )


def test_each_rule_says_how_good_stale_drafts_are() -> None:
    """A rule object of the caller's, too; and a call starts from it."""
    nodes = draft([1.0], [1])
    table = {"states": [1, 64], "backbone": [1.0, 1 + 63 * 0.6]}
    for name, states in (("sequential", 2), ("entropy_bound", 1)):
        made = RULES[name].from_options(MRPGenerationConfig(entropy_threshold=0.35), 4)
        for rule in (made, CheckedRule(made)):
            mode = Mode(rule, drafting=Drafting(8, 1, by_gain=True))
            assert draft_amount(mode, None, None, table).plan([nodes]) == Amount(states)


def test_from_left_to_right_a_draft_is_as_likely_as_its_tokens() -> None:
    """Its order is certain. Where a token has no probability at all, it is drafted all the same."""
    of = row(width=4)
    scores = says([0, -2, -math.inf, 4], [10, 11, 12, 13])
    nodes = build_draft(_begun(of, scores), Sequential((1,)), 4, 1, {})
    expected = [1.0, sigmoid(2.0)]
    expected += [expected[-1] * 0.5, expected[-1] * 0.5 * sigmoid(-28.0)]
    assert [node.chance for node in nodes] == pytest.approx(expected)
    chances = [node.chance for node in build_draft(of, Static((1,)), 2, 1, {})]
    assert chances[1] > 0.9


def _begun(of: Any, scores: Any) -> Any:
    of.state = state([M, M, M, M])
    of.source = scores
    return of


def test_the_path_marks_the_nodes_that_it_reached() -> None:
    of = row(width=4)
    of.state = state([M, M, M, M])
    scores = says([0, 3, 2, 1], [10, 11, 12, 13])
    nodes = [
        Node(of.state, -1, None),
        Node(state([M, M, 12, M], 4), -1, None, chance=0.5, depth=1),
        Node(state([M, 11, M, M], 4), -1, None, chance=0.5, depth=1),
    ]
    accept(of, Static((1, 1, 1, 1)), nodes, [scores] * 3, True)
    assert [node.accepted for node in nodes] == [False, False, True]


def test_where_nothing_pays_nothing_is_drafted(random_model: MRPForCausalLM) -> None:
    """And a call's counts are a function of the call."""
    options: dict[str, Any] = {**LIVELY, "max_new_tokens": 24, "seed": 3}
    alone = generate(random_model, PROMPTS[:1], decoding="sequential", **options)
    options |= {"decoding": "mrp_spec", "target": "sequential", "num_draft_states": "auto"}
    steep = generate(
        random_model,
        PROMPTS[:1],
        **options,
        round_costs=STEEP,
    )
    assert steep.sequences.equal(alone.sequences)
    assert int(steep.stats.drafted.sum()) == 0
    assert steep.stats.forwards["head"] == 0
    free = [
        generate(
            random_model,
            PROMPTS[:1],
            **options,
            round_costs=FREE,
        )
        for _ in range(2)
    ]
    assert free[0].sequences.equal(alone.sequences)
    assert int(free[0].stats.drafted.sum()) > 12
    for name in ("row_forwards", "row_head_forwards", "drafted", "accepted"):
        assert getattr(free[0].stats, name).equal(getattr(free[1].stats, name))


def test_a_table_travels_with_the_config(random_model: MRPForCausalLM, tmp_path: Any) -> None:
    random_model.generation_config.round_costs = STEEP
    try:
        random_model.save_pretrained(tmp_path)
        loaded = MRPForCausalLM.from_pretrained(tmp_path)
        assert loaded.generation_config.round_costs == STEEP
        drafted = generate(
            loaded, PROMPTS[:1], decoding="mrp_spec", num_draft_states="auto", max_new_tokens=8
        )
        assert int(drafted.stats.drafted.sum()) == 0
    finally:
        random_model.generation_config.round_costs = None


def test_predicted_costs_of_published_shapes() -> None:
    """A 4B model at an H200's rates: a forward reads its weights, until operations take longer."""
    config = MRPForCausalLM.config_class(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        block_size=16,
        num_nextn_predict_layers=3,
    )
    costs = costs_at(config, Rates(4.3e12, 0.6 * 989e12, 0.0), 2, 16)
    assert costs.states == STATES
    assert 1.5e-3 < costs.backbone[0] < 2.1e-3
    by_states = dict(zip(costs.states, costs.backbone, strict=True))
    assert by_states[4] < 1.02 * by_states[1]
    assert by_states[64] > 2 * by_states[1]
    assert costs.head[0] < 0.15 * costs.backbone[0]
    for states, others in ((1, 8), (8, 64)):
        assert by_states[states] <= by_states[others]


def test_costs_are_predicted_for_the_weights_at_hand(random_model: MRPForCausalLM) -> None:
    weight = random_model.lm_head.weight
    narrow, wide = (
        predicted_costs(random_model.config, weight.detach().to(dtype))
        for dtype in (torch.float32, torch.float64)
    )
    assert narrow.head
    assert all(one < other for one, other in zip(narrow.backbone, wide.backbone, strict=True))
