"""A rule is one class: with a name it is an option of `generate` with options of its own, and an
object of any rule, given to `generate`, is drafted like the rest."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

import modeling_mrp.generate.option_table as option_table
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.rules.options import COUNT, Option
from modeling_mrp.rules.reveal import RULES, Columns, RevealRule, Static
from modeling_mrp.rules.state import Scores, State
from tests.support.random_cases import make_model

PROMPTS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


@dataclass(frozen=True)
class Strided(RevealRule):
    """Reveal the leftmost column and those `stride` behind it, every other step; remember which
    step it is."""

    stride: int = 2

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        count = 0 if memo is None else memo
        columns = state.free[:: self.stride] if count % 2 else state.free[:1]
        return columns, count + 1


@dataclass(frozen=True)
class Guessing(Strided):
    """The same, and guesses what it does."""

    def likely(self, state: State, log_odds: Any, count: int) -> Any:
        """See `RevealRule`."""
        return [(state.free[:1], 0.5), (state.free[:: self.stride], 0.4)][:count]


@pytest.mark.parametrize("rule", [Strided(3), Guessing(2)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_an_object_is_drafted_losslessly(rule: RevealRule, sample: bool) -> None:
    model = make_model(3)
    options: dict[str, Any] = {
        "max_new_tokens": 21,
        "do_sample": sample,
        "seed": 4,
        "return_dict_in_generate": True,
    }
    alone = model.generate(PROMPTS, decoding=rule, **options)
    for mode, states in (("self_spec", 3), ("self_spec", 8), ("mrp_spec", 4), ("mrp_spec", "auto")):
        drafted = model.generate(
            PROMPTS, decoding=mode, target=rule, num_draft_states=states, **options
        )
        assert drafted.sequences.equal(alone.sequences)
        assert drafted.reveal_step.equal(alone.reveal_step)
        if states != "auto":
            assert drafted.stats.drafted.sum() > 0
    by_config = MRPGenerationConfig(decoding=rule, **options)
    assert model.generate(PROMPTS, by_config).sequences.equal(alone.sequences)


def test_an_object_of_a_known_rule_gives_its_text() -> None:
    model = make_model(3)
    of_name = model.generate(PROMPTS, decoding="static", denoising_steps=2, max_new_tokens=12)
    assert model.generate(PROMPTS, decoding=Static((2, 2)), max_new_tokens=12).equal(of_name)


class Unhashable(Strided):
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Wrong(RevealRule):
    """Returns some columns, whatever is masked, or guesses them."""

    columns: Any
    guesses: bool = False

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        return state.free[:1] if self.guesses else self.columns, memo

    def likely(self, state: State, log_odds: Any, count: int) -> Any:
        """See `RevealRule`."""
        return [(self.columns, 1.0)]


@pytest.mark.parametrize("columns", [(), (4,), (-1,), (1, 1), None, 1, "0", (0, 9)], ids=repr)
def test_columns_that_cannot_be_revealed_are_refused(columns: Any) -> None:
    """Whatever a rule returns: no round is without end, and no text has a token beside the
    block."""
    model, said = make_model(), r"returned the columns .* can be revealed: return a tuple"
    with pytest.raises(ValueError, match=f"^Wrong.reveal {said}"):
        model.generate(PROMPTS, decoding=Wrong(columns), max_new_tokens=8)
    options = {"target": Wrong(columns, guesses=True), "num_draft_states": 4}
    with pytest.raises(ValueError, match=f"^Wrong.likely {said}"):
        model.generate(PROMPTS, decoding="self_spec", max_new_tokens=8, **options)


def test_a_rule_without_a_hash_and_a_class_are_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"cannot be hashed .*frozen dataclass"):
        model.generate(PROMPTS, decoding=Unhashable(), max_new_tokens=4)
    with pytest.raises(ValueError, match=r"^target is .*, of type ABCMeta: choose one of"):
        model.generate(PROMPTS, decoding="self_spec", target=Strided, max_new_tokens=4)


def test_a_config_with_an_object_is_not_saved(tmp_path: Any) -> None:
    """Nothing is written, neither of the config nor of a model that has it."""
    model, said = make_model(), r"^decoding is Strided\(stride=2\), an object: pass it to generate"
    model.generation_config.decoding = Strided()
    for save in (model.save_pretrained, model.generation_config.save_pretrained):
        with pytest.raises(ValueError, match=said):
            save(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*"))


@pytest.fixture
def table() -> Iterator[Any]:
    """The table of options with another rule, whose class alone was written."""
    stride = Option("stride", 9, COUNT, "distance of columns that go together")

    @dataclass(frozen=True)
    class Named(Guessing, name="named"):
        options: ClassVar[tuple[Option, ...]] = (stride,)
        built: int = field(default=0)

        @classmethod
        def from_options(cls, options: Any, block_size: int) -> "Named":
            return cls(options.stride, block_size)

    try:
        yield importlib.reload(option_table)
    finally:
        del RULES["named"]
        del option_table.DecodingOptions.stride
        importlib.reload(option_table)


def test_a_name_is_taken_once() -> None:
    """A second class of that name would decode in place of the first."""
    known = dict(RULES)
    with pytest.raises(TypeError, match=r"^the reveal rule Other is named 'static', as"):
        type("Other", (Static,), {}, name="static")
    assert known == RULES


def test_a_named_rule_declares_its_options(table: Any) -> None:
    """Name, default, range and help are in the table, for `decoding` and as a target; a default
    that no block of this size allows breaks nothing."""
    assert table.TARGETS[-1] == "named"
    assert "named" in table.DECODINGS
    option = {option.name: option for option in table.OPTIONS}["stride"]
    assert (option.default, option.modes) == (9, ("named",))
    assert option.help == "distance of columns that go together"
    with pytest.raises(ValueError, match=r"^stride is 0: it must be an int of 1 or more$"):
        option.check(0, 4)
    option.check(9, 4)

    class Config(table.DecodingOptions):  # type: ignore[name-defined,misc]
        stride = 5

    rule = table.rule_of("named", Config(), 4)
    assert (rule.stride, rule.built) == (5, 4)
