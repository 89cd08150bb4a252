"""The cache of a call and of the next: its room, what is gone on from, what does not fit, and rows
that leave it early."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mrp_trainer.heads import with_new_head
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.generation import StoppingCriteria

from modeling_mrp import MRPForCausalLM
from modeling_mrp.networks import graphs
from modeling_mrp.networks.cache import BlockCache
from tests.support.helpers import MASK, PROMPTS, generate, left_padded, random_ids, says_all, texts
from tests.support.random_cases import make_model
from tests.support.tape import TapeRecorder

ROWS, HEADS, WIDTH = 3, 2, 8


def new_cache(rows: int = ROWS) -> BlockCache:
    return make_model().block_cache(rows, 12, 8, with_head=False)


def test_what_can_be_reused() -> None:
    """The longest common prefix in whole blocks, as far as it is held; with the head as far as that
    can read it, too."""
    cache = new_cache()
    text = list(range(1, 13))
    changed = [*text[:9], 99, *text[10:], 5, 6]

    def cut(texts: list[list[int]], upto: list[int], with_head: bool) -> list[int]:
        cache.hold([text, text, text], [12, 8, 12], [4, 8, 0], [8, 8, 0])
        return cache.cut(texts, upto, 4, with_head)

    assert cut([text, text, changed], [12, 12, 12], False) == [12, 8, 8]
    assert cut([text, text, changed], [12, 12, 12], True) == [8, 8, 0]
    assert cut([text[:6], [], changed], [6, 0, 12], False) == [4, 0, 8]
    assert cut([text, text, changed], [7, 4, 12], False) == cache.held == [4, 4, 8]
    assert (cache.head_held, cache.hidden_held) == ([4, 4, 0], [4, 4, 0])
    cache.empty()
    assert cache.cut([text] * 3, [12] * 3, 4, False) == [0, 0, 0]


def test_a_copy_of_more_rows() -> None:
    """Each row is there as many times, the copies one after the other."""
    cache = new_cache()
    known = torch.arange(ROWS * HEADS * 4 * WIDTH, dtype=torch.float64).view(ROWS, HEADS, 4, WIDTH)
    cache.target(0, 4)
    cache.update(known, -known, 1)
    cache.hold([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], [4, 4, 0], [4, 0, 0], [4, 4, 0])
    bigger = new_cache(2 * ROWS)
    bigger.fill_from(cache)
    assert bigger.held == [4, 4, 4, 4, 0, 0]
    assert bigger.head_held == [4, 4, 0, 0, 0, 0]
    assert bigger.ids[:3] == [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]]
    bigger.target(0, 4)
    assert torch.equal(bigger.read[1][0], known.repeat_interleave(2, 0))
    assert cache.held == [4, 4, 0]


def decode(model: MRPForCausalLM, rows: list[list[int]], **options: Any) -> Any:
    """The output, which the mask id pads: it is never generated."""
    return model.generate(
        **left_padded(rows), pad_token_id=MASK, return_dict_in_generate=True, **options
    )


@pytest.mark.parametrize("decoding", ["static", "mrp_spec"])
def test_what_is_prefilled(
    random_model: MRPForCausalLM, decoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward a block of 4. Of 20 tokens and 3 more row 0 kept 16 and row 1, which was changed
    at token 5, kept 4: blocks 4 to 20 are computed for both, but row 0 takes part from block 16 on.
    Without the head's layers in the cache, a mode with the head prefills all."""
    monkeypatch.setattr("modeling_mrp.networks.networks.PREFILL_CHUNK", 4)
    prompts = [[*range(1, 9)], [*range(11, 19)]]
    first = decode(random_model, prompts, max_new_tokens=12)
    assert first.stats.forwards == {"prefill": 3, "denoise": 11, "verify": 0, "head": 0}
    said = [[*row, 7, 8, 9] for row in first.sequences.tolist()]
    said[1][5] = 55
    out = decode(
        random_model,
        said,
        past_key_values=first.past_key_values,
        decoding=decoding,
        max_new_tokens=5,
    )
    if decoding == "static":
        assert out.stats.forwards["prefill"] == 5
        assert out.stats.row_forwards.tolist() == [2 + 4, 5 + 4]
    else:
        assert out.stats.forwards["prefill"] == 6
        assert (
            out.past_key_values is not first.past_key_values,
            out.past_key_values.head_layers,
        ) == (True, 2)


def test_a_cache_with_room_is_used_in_place(random_model: MRPForCausalLM) -> None:
    """A cache made in advance, in inference mode or not, serves the whole conversation; one that is
    too small is replaced by a bigger one."""
    roomy, said = random_model.block_cache(2, 64, 16, with_head=True), [PROMPTS[0], PROMPTS[2]]
    size = roomy.nbytes
    for mode in ("mrp_spec", "static", "mrp_remask"):
        out = decode(random_model, said, past_key_values=roomy, decoding=mode, max_new_tokens=10)
        assert (out.past_key_values is roomy, roomy.nbytes) == (True, size)
        said = [[token for token in row if token != MASK] for row in out.sequences.tolist()]
    with torch.inference_mode():
        small = decode(random_model, said, max_new_tokens=3).past_key_values
    out = decode(random_model, said, past_key_values=small, max_new_tokens=30)
    assert out.sequences.equal(decode(random_model, said, max_new_tokens=30).sequences)
    assert out.past_key_values.capacity == 72 > small.capacity  # 40 + 30 tokens in whole blocks
    wider = decode(
        random_model,
        said,
        past_key_values=out.past_key_values,
        decoding="self_spec",
        num_draft_states=5,
    )
    assert wider.past_key_values.scratch == 20 > out.past_key_values.scratch
    longer = decode(
        random_model, said, past_key_values=wider.past_key_values, max_new_tokens=40
    ).past_key_values
    assert (wider.past_key_values.capacity, longer.capacity, longer.scratch) == (72, 80, 20)


def in_float32(model: Any) -> BlockCache:
    """A cache in float32 of a model that then is float64 again."""
    made: BlockCache = model.float().block_cache(1, 32, 8, False)
    model.double()
    return made


CHANGED = "weights of model, which have changed"
# What changes a model or gives another cache, and what is said of it.
MISFITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another kind": (
        lambda _: DynamicCache(),
        r"are not those that generate\(..., return_dict_in_generate=True\)",
    ),
    "another model": (
        lambda _: decode(make_model(), [[1, 2]]).past_key_values,
        "of this very model gave",
    ),
    "other rows": (
        lambda model: decode(model, [[1], [2]]).past_key_values,
        "hold 2 rows, and input_ids have 1, .*same order",
    ),
    "another dtype": (in_float32, "another dtype .*float32.* now, .*float64"),
    "written to": (
        lambda model: model.model.layers[0].mlp.up_proj.weight.detach().add_(1),
        CHANGED,
    ),
    "assigned": (
        lambda model: model.load_state_dict(make_model(1).state_dict(), assign=True),
        CHANGED,
    ),
    "another head": (
        lambda model: with_new_head(model, 2),
        "weights of mrp_head, which have changed",
    ),
    "a deeper head": (
        lambda model: with_new_head(model, 3),
        "weights of mrp_head, which have changed",
    ),
    "another adapter": (lambda model: model.set_adapter("other"), CHANGED),
    "a scaled adapter": (
        lambda model: model.base_model.model.model.layers[0].mlp.up_proj.set_scale("default", 0.5),
        CHANGED,
    ),
    "adapters off": (lambda model: model.base_model.disable_adapter_layers(), CHANGED),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_cache_that_does_not_fit_is_refused(misfit: str) -> None:
    """Going on from what other weights computed would give another text, and nobody would know. No
    cache keeps its model."""
    model: Any = make_model()
    if "adapter" in misfit:
        lora = LoraConfig(target_modules=r"model\.layers.*up_proj", init_lora_weights=False)
        model = get_peft_model(model, lora)
        model.add_adapter("other", lora)
        model.set_adapter("default")
    options: dict[str, Any] = {
        "decoding": "mrp_spec",
        "max_new_tokens": 8,
        "return_dict_in_generate": True,
    }
    first = model.generate(torch.tensor([PROMPTS[0]]), **options)
    out = model.generate(first.sequences, past_key_values=first.past_key_values, **options)
    change, said = MISFITS[misfit]
    made = change(model)
    past = made if isinstance(made, Cache) else out.past_key_values
    with pytest.raises(ValueError, match=f"{said}.*leave them unset"):
        model.generate(out.sequences, past_key_values=past, max_new_tokens=5)
    gone = out.past_key_values.owner
    del model, made
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("decoding", ["mrp_spec", "mrp_remask"])
@pytest.mark.parametrize(("early", "first"), [(1, [1, 2, 3, 4, 5]), (0, [*range(1, 38)])])
def test_a_row_that_left_its_batch_early_goes_on_beside_one_that_did_not(
    early: int, first: list[int], decoding: str
) -> None:
    """What the head has read of the one lies beside memory of the other that nobody has written: it
    must not count. Where the other one takes its place, all that it holds must come back, be it
    more than any other row does."""
    model, prompts = make_model(5, block_size=4), [first, [9, 8, 7]]
    options: dict[str, Any] = {
        "decoding": decoding,
        "num_draft_states": 3,
        "do_sample": True,
        "top_k": 0,
        "seed": 2,
    }
    both = texts(model, prompts, max_new_tokens=24, eos_token_id=None, **options)
    eos = next(token for token in both[early][:6] if token not in both[1 - early])
    out = generate(model, prompts, max_new_tokens=24, eos_token_id=eos, **options)
    both[early], both[1 - early] = both[early][:8], both[1 - early] + [40] * 3
    changed = [prompt + text for prompt, text in zip(prompts, both, strict=True)]
    options |= {"max_new_tokens": 12, "eos_token_id": None}
    assert texts(model, changed, past_key_values=out.past_key_values, **options) == texts(
        model, changed, **options
    )


GIVEN: dict[str, Any] = {"eos_token_id": None, "return_dict_in_generate": True}


class EndsAt(StoppingCriteria):
    """Ends row i behind its i-th limit of new tokens, as it counts columns of the batch as it was
    given; or interrupts it."""

    def __init__(self, prompt: int, limits: list[int], interrupts: int = 99) -> None:
        self.prompt, self.limits, self.interrupts, self.shapes = (
            prompt,
            limits,
            interrupts,
            set[int](),
        )

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shapes.add(len(input_ids))
        new = input_ids.shape[1] - self.prompt
        if new > self.interrupts:
            raise KeyboardInterrupt
        return torch.tensor([new >= limit for limit in self.limits])


@pytest.mark.parametrize("mode", ["static", "mrp_spec", "mrp_remask"])
def test_rows_that_have_ended_are_not_computed(mode: str) -> None:
    """They leave by halves: of 5 rows that end behind 4, 40, 8, 12 and 24 tokens forwards hold 5,
    then 3, 2 and 1."""
    model, ends, sizes = make_model(3), EndsAt(6, [4, 40, 8, 12, 24]), list[int]()

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes.append(
            len(next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value)))
        )

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    options: dict[str, Any] = {"decoding": mode, "max_new_tokens": 40, "stopping_criteria": [ends]}
    out: Any = model.generate(random_ids(1, 5, 6), **options, **GIVEN)
    assert ends.shapes == {5}, "criteria see the batch as it was given"
    assert sizes == sorted(sizes, reverse=True)
    assert {5, 1} <= set(sizes) <= {5, 3, 2, 1}
    assert mode == "mrp_spec" or len(set(sizes)) == 4
    assert out.stats.slot_forwards == sum(sizes)
    assert [(steps >= 0).sum().item() for steps in out.reveal_step] == ends.limits


def test_recorded_rounds_keep_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine rows five, though one alone goes on at last: fewer would be no faster."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", TapeRecorder)
    ends = EndsAt(6, [4, 40, 8, 12, 24, 4, 4, 4, 4])
    options: dict[str, Any] = {"graphs": True, "stopping_criteria": [ends], "max_new_tokens": 40}
    stats: Any = generate(
        make_model(3), random_ids(1, 9, 6).tolist(), **options, eos_token_id=None
    ).stats
    assert 5 <= stats.slot_forwards / sum(stats.forwards.values()) < 9


def test_a_call_that_breaks_off_leaves_its_cache_in_order() -> None:
    """Though rows had changed their places: what was stored before an interruption is gone on from,
    for every row; behind an error nothing is, as what is not finite lies there."""
    model, prompts = make_model(3), random_ids(2, 4, 9)
    given = {"decoding": "mrp_spec", **GIVEN}
    cache = model.generate(prompts, max_new_tokens=1, **given).past_key_values
    assert min(cache.held) == 8
    given |= {"max_new_tokens": 30}
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            prompts,
            past_key_values=cache,
            stopping_criteria=[EndsAt(9, [3, 30, 30, 3], 20)],
            **given,
        )
    assert min(cache.held) == 8
    again = model.generate(prompts, past_key_values=cache, **given)
    assert again.sequences.equal(model.generate(prompts, **given).sequences)
    cache, fails = again.past_key_values, says_all(float("nan"), 9 + 20)
    with pytest.raises(ValueError, match="row 1 has no token with a finite score"):
        model.generate(
            prompts,
            past_key_values=cache,
            stopping_criteria=[EndsAt(9, [3, 30, 3, 3])],
            **given,
            **fails,
        )
    assert (cache.rows, cache.held) == (4, [0] * 4)
