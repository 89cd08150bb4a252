"""The registry of capabilities whose pairs are tried (`tests/support/pairs.py`): an entry says how
it changes a case, and what refuses it."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import PUBLISHED, REMASK_RULES
from modeling_mrp.kernels.dispatch import triton
from modeling_mrp.networks import graphs
from modeling_mrp.rules.sources import Candidates
from tests.support.devices import FIRST, SECOND, SMALL, place, small_device, spread, two_devices
from tests.support.pairs import MASK, PAD, Capability, Options, Result, Run, Trial, base_of, padded
from tests.support.random_cases import Row, Sways, given_in
from tests.support.tape import TapeRecorder
from tests.support.watches import Blocks, Drafts, Watch, assert_asked, assert_streamed

LORA = LoraConfig(
    task_type="CAUSAL_LM",
    target_modules=r".*layers\.\d+\.self_attn\.[qv]_proj",
    init_lora_weights=False,
)


def fixed(**options: Any) -> Callable[[Trial], Options]:
    """Return a function that returns options."""
    return lambda _: options


def sampled(name: str, *values: float) -> Capability:
    """Make an entry of an option of sampling."""
    return Capability(
        name, options=lambda trial: {"do_sample": True, name: trial.rng.choice(values)}
    )


def argument(name: str, *values: Any) -> Capability:
    """Make an entry of an argument that leaves the text."""
    return Capability(
        name, arguments=lambda trial, *_: {name: values[trial.seeds[0] % len(values)]}
    )


def ids_of(trial: Trial, count: int) -> list[int]:
    return trial.rng.sample(range(1, 50), count)


# -------------------------------------------------------------------------------------------------
# modes and options

NEEDS_HEAD = "needs an MRP head, and this model has none.*attach_head"
MODES = [
    *(
        Capability(mode, "mode", options=fixed(decoding=mode))
        for mode in ("static", "dynamic", "sequential", "entropy_bound")
    ),
    *(Capability(mode, "mode", options=fixed(decoding=mode)) for mode in PUBLISHED),
    Capability(
        "mrp_direct",
        "mode",
        options=lambda trial: {
            "decoding": "mrp_direct",
            "mrp_steps": trial.rng.randint(1, min(3, trial.block)),
        },
        without={"no head": NEEDS_HEAD, "drafts": "target is 'mrp_direct': choose one of"},
    ),
    Capability(
        "mrp_remask",
        "mode",
        options=lambda trial: {
            "decoding": "mrp_remask",
            "remask_rule": trial.rng.choice(REMASK_RULES),
        },
        without={"no head": NEEDS_HEAD, "drafts": "target is 'mrp_remask': choose one of"},
    ),
]


def sided(side: str) -> Callable[[Trial], None]:
    def begin(trial: Trial) -> None:
        trial.side = side

    return begin


def many(count: int) -> Callable[[Trial], None]:
    """Return a function that lets a trial have so many rows."""

    def begin(trial: Trial) -> None:
        rng = trial.rng
        trial.prompts = [
            trial.prompts[row % len(trial.prompts)][: rng.randint(1, 9)] for row in range(count)
        ]
        trial.seeds = [rng.randrange(1 << 62) for _ in range(2 * count)]

    return begin


ROWS = [
    Capability("padding on the right", "padding", begin=sided("right")),
    Capability("padding on both sides", "padding", begin=sided("both")),
    Capability("a row alone", "rows", begin=many(1)),
    Capability("a batch of 6", "rows", begin=many(6)),
]


def infilled(trial: Trial) -> None:
    """Let rows go on with given tokens and masks."""
    rng, most = trial.rng, trial.options["max_new_tokens"]
    count = rng.randint(1, most)
    trial.infill = [
        [rng.choice((MASK, rng.randrange(1, 50))) for _ in range(count)] for _ in trial.prompts
    ]


def copied(trial: Trial) -> None:
    trial.copies = 2


SEVERAL = r"sequence_bias holds \[.*\], of several tokens.*'sequential' with one token a step"
TEXT = [
    sampled("temperature", 0.3, 1.7),
    sampled("top_k", 1, 5),
    sampled("top_p", 0.5, 0.9),
    sampled("min_p", 0.05),
    sampled("typical_p", 0.8),
    sampled("epsilon_cutoff", 0.02),
    sampled("eta_cutoff", 0.05),
    sampled("top_h", 0.4),
    Capability(
        "repetition_penalty",
        options=lambda trial: {"repetition_penalty": trial.rng.choice((0.7, 2.0))},
    ),
    Capability(
        "no_repeat_ngram_size",
        options=lambda trial: {"no_repeat_ngram_size": trial.rng.choice((1, 2))},
    ),
    Capability(
        "bad_words_ids",
        options=lambda trial: {"bad_words_ids": [[one] for one in ids_of(trial, 9)]},
    ),
    Capability(
        "bad words of several tokens",
        options=lambda trial: {"bad_words_ids": [ids_of(trial, 2) for _ in range(60)]},
        apart=("bad_words_ids",),
    ),
    Capability("suppress_tokens", options=lambda trial: {"suppress_tokens": ids_of(trial, 20)}),
    Capability(
        "sequence_bias",
        "bias",
        options=lambda trial: {"sequence_bias": [[[one], 4.0] for one in ids_of(trial, 4)]},
    ),
    Capability(
        "sequence_bias of several tokens",
        "bias",
        options=lambda trial: {
            "sequence_bias": [[ids_of(trial, 2), 3.0] for _ in range(40)],
            **({} if "mode" in trial.slots else {"decoding": "sequential"}),
        },
        without=dict.fromkeys(
            [*(mode.name for mode in MODES if mode.name != "sequential"), "denoising_steps"],
            SEVERAL,
        ),
    ),
    Capability(
        "logits_processor",
        options=lambda trial: {"logits_processor": [Sways(trial.rng.choice((0.1, 1.0)))]},
    ),
    Capability("remove_invalid_values", options=fixed(remove_invalid_values=True)),
    Capability(
        "renormalize_logits", options=fixed(renormalize_logits=True), apart=("logits_processor",)
    ),
    Capability("many eos", options=fixed(eos_token_id=list(range(1, 20)))),
    Capability("min_new_tokens", options=fixed(min_new_tokens=2, eos_token_id=list(range(1, 20)))),
    Capability(
        "stop_strings", "stops", options=lambda trial: {"stops": ("strings", ids_of(trial, 12))}
    ),
    Capability(
        "stopping_criteria",
        "stops",
        options=lambda trial: {"stops": ("criterion", ids_of(trial, 12))},
    ),
    Capability(
        "denoising_steps",
        options=lambda trial: {"denoising_steps": trial.rng.randint(1, min(2, trial.block))},
    ),
    Capability(
        "one new token", "length", options=fixed(max_new_tokens=1), apart=("min_new_tokens",)
    ),
    Capability(
        "many new tokens", "length", options=lambda trial: {"max_new_tokens": 3 * trial.block + 1}
    ),
    Capability("infill_ids", begin=infilled),
    Capability("num_return_sequences", begin=copied, options=fixed(do_sample=True)),
]

# -------------------------------------------------------------------------------------------------
# models


def eager(_: Trial, model: Any) -> Any:
    base_of(model).set_attn_implementation("eager")
    return model


EXPERTS: Options = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
LLADA2: Options = {
    **EXPERTS,
    "num_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
LLADA2 |= {"first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "num_hidden_layers": 2}


def by_calls_alone(trial: Trial) -> None:
    """Leave out the slow reference, which does not know what such models do."""
    trial.slow = False


def no_slow_head(trial: Trial) -> None:
    """Leave out the slow reference where the head decides: its rotation is of whole heads."""
    trial.slow = not trial.mode.startswith("mrp_")


SHAPES = [
    Capability("block of 1", "block", shape={"block_size": 1}),
    Capability("block of 16", "block", shape={"block_size": 16}),
    Capability("no head", "head", shape={"num_nextn_predict_layers": 0}),
    Capability("head of 3 layers", "head", shape={"num_nextn_predict_layers": 3}),
    Capability("tied embeddings", shape={"tie_word_embeddings": True}),
    Capability("attention bias", shape={"attention_bias": True}),
    # Experts are counted by torch.histc, which the stand-in for a device lacks for whole numbers.
    Capability(
        "sdar_moe",
        "family",
        apart=("a small device",),
        shape={"family": "sdar_moe", "num_experts": 4, **EXPERTS},
    ),
    Capability(
        "llada2_moe",
        "family",
        apart=("a small device",),
        shape={"family": "llada2_moe", **LLADA2},
        begin=no_slow_head,
    ),
    Capability("fast_dllm_v2", "family", shape={"family": "fast_dllm_v2"}, begin=by_calls_alone),
    Capability("stable_diffcoder", "family", shape={"family": "stable_diffcoder"}),
]


def in_float32(_: Trial, model: Any) -> Any:
    return model if model.dtype == torch.float32 else model.float()  # what is quantized is not cast


def rounded(_: Trial, model: Any) -> Any:
    """Round to bfloat16 all but the rotary frequencies, which stay as they are in a cast."""
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in name:
                weight.copy_(weight.bfloat16())
    return model


def quantized(config: Callable[[], Any]) -> Callable[[Trial, Any], Any]:
    """Return a function that saves a model in float32 and loads it quantized."""

    def loaded(trial: Trial, model: Any) -> Any:
        model.float().save_pretrained(trial.folder / "whole")
        made: Any = MRPForCausalLM.from_pretrained(
            trial.folder / "whole", quantization_config=config()
        )
        return made.eval()

    return loaded


def torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def nf4() -> Any:
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


# what loads or moves weights, which are loaded quantized already
KEPT_ELSEWHERE = ("place", "saved")
WEIGHTS = [
    Capability("float32", "dtype", weights=in_float32),
    Capability(
        "to bfloat16 and back",
        "dtype",
        weights=rounded,
        model=lambda _, model: model.bfloat16().double(),
    ),
]
if find_spec("torchao"):
    WEIGHTS.append(Capability("torchao int8", "dtype", KEPT_ELSEWHERE, weights=quantized(torchao)))
if find_spec("bitsandbytes"):
    WIDE: Options = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
        "moe_intermediate_size": 64,  # groups are of 64
    }
    WEIGHTS.append(
        Capability("bitsandbytes nf4", "dtype", KEPT_ELSEWHERE, shape=WIDE, weights=quantized(nf4))
    )


def adapted(trial: Trial, model: Any) -> Any:
    """Give a model an active LoRA of backbone and head, and another one."""
    torch.manual_seed(trial.rng.randrange(1 << 16))
    made: Any = get_peft_model(model, LORA, autocast_adapter_dtype=False)
    made.add_adapter("other", LORA, autocast_adapter_dtype=False)
    for name, weight in made.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.bfloat16().to(made.dtype)
    return made.eval()


@contextmanager
def switched_off(trial: Trial) -> Iterator[None]:
    with trial.tested.disable_adapter():
        yield


def another(_: Trial, model: Any) -> Any:
    model.set_adapter("other")
    return model


def of_rows(trial: Trial) -> None:
    """Name an adapter for each row."""
    trial.slow = False
    trial.adapters = [trial.rng.choice(("default", "other", "__base__")) for _ in trial.prompts]


def merged(_: Trial, model: Any) -> Any:
    return model.merge_and_unload()


QUANTIZED = ("torchao int8", "bitsandbytes nf4")  # whose merged weights are rounded again
ADAPTERS = [
    Capability("LoRA", "adapter", weights=adapted),
    Capability(
        "another LoRA",
        "adapter",
        weights=lambda trial, model: another(trial, adapted(trial, model)),
    ),
    Capability("LoRA merged", "adapter", QUANTIZED, weights=adapted, model=merged),
    Capability("LoRA switched off", "adapter", model=adapted, around=switched_off),
    Capability("a LoRA for each row", "adapter", weights=adapted, begin=of_rows, apart=("score",)),
]

# -------------------------------------------------------------------------------------------------
# ways to the same text


def drafted(name: str) -> Capability:
    without = {"no head": NEEDS_HEAD} if name == "mrp_spec" else {}
    return Capability(
        name,
        "drafts",
        arguments=lambda trial, *_: {
            "decoding": name,
            "target": trial.mode,
            "num_draft_states": 2 + trial.seeds[0] % 5,
        },
        without=without,
    )


class Guesses:
    """A source of drafts that proposes the same tokens, likely or not, at every column."""

    def propose(self, row: Any, state: Any, parent: Any) -> Candidates:
        tokens = {column: [(3, 0.9), (5 + column % 9, 0.4)] for column in state.free}
        return Candidates(tokens, [float(column % 3) for column in range(len(state.ids))])


SOURCES = [
    Capability(
        "prompt lookup",
        "lookup",
        arguments=lambda trial, *_: {
            "prompt_lookup_num_tokens": 1 + trial.seeds[0] % 9,
            "max_matching_ngram_size": 1 + trial.seeds[0] % 3,
        },
    ),
    Capability(
        "a source of one's own",
        "drafts",
        ("cache",),  # whose first call has a mode of its own
        arguments=lambda trial, *_: {
            "decoding": "self_spec",
            "target": trial.mode,
            "num_draft_states": 2 + trial.seeds[0] % 7,
            "draft_sources": [Guesses()],
        },
    ),
]


def in_way(way: str) -> Capability:
    """Make an entry of a way in which options are given."""

    def call(trial: Trial, run: Run) -> Run:
        if way == "own":
            trial.tested = copy.deepcopy(trial.tested)
        trial.generate = lambda given: trial.tested.generate(**given_in(way, trial.tested, given))
        return run

    return Capability(f"options: {way}", "way", call=call)


def by_length(trial: Trial, prompts: list[list[int]], _: int) -> Options:
    width = padded(prompts, trial.side)["input_ids"].shape[1]
    return {"max_new_tokens": None, "max_length": width + trial.options["max_new_tokens"]}


def one_seed(trial: Trial) -> None:
    first = trial.seeds[0] // 2
    trial.seeds = [first + row for row in range(len(trial.seeds))]


def streaming(kind: type[Blocks]) -> Capability:
    def check(trial: Trial, result: Result) -> Callable[[list[Row]], None]:
        def compare(rows: list[Row]) -> None:
            for streamer, prompt, row in zip(
                result.given["streamer"], result.prompts, rows, strict=True
            ):
                assert_streamed(streamer.events, prompt, row["tokens"], row["steps"])

        return compare

    return Capability(
        f"streamer: {kind.__name__}",
        "streamer",
        arguments=lambda trial, prompts, rows: {"streamer": [kind() for _ in range(rows)]},
        check=check,
    )


def watched(trial: Trial, result: Result) -> Callable[[list[Row]], None]:
    (watch,) = (one for one in result.given["stopping_criteria"] if isinstance(one, Watch))
    ids = result.given["input_ids"].repeat_interleave(trial.copies, 0).tolist()

    def compare(rows: list[Row]) -> None:
        assert_asked(watch.seen, ids, [row["tokens"] for row in rows], MASK, PAD)

    return compare


def with_scores(name: str) -> Capability:
    """Make an entry of `output_scores` or `output_logits`: a column says just what was drawn, with
    its log-probability."""

    def check(trial: Trial, result: Result) -> Callable[[list[Row]], None]:
        columns = [column.tolist() for column in getattr(result.out, name.removeprefix("output_"))]

        def compare(rows: list[Row]) -> None:
            assert len(columns) == len(result.rows[0]["tokens"])
            for number, row in enumerate(rows):
                for column, (token, step) in enumerate(
                    zip(row["tokens"], row["steps"], strict=True)
                ):
                    numbers = torch.tensor(columns[column][number], dtype=torch.float64)
                    assert numbers[token].isfinite()
                    if step < 0:
                        assert numbers.isfinite().sum() == 1
                    if not trial.options.get("do_sample") and name == "output_scores" and step >= 0:
                        assert numbers.argmax() == token

        return compare

    return Capability(name, arguments=lambda *_: {name: True}, check=check, apart=("ids alone",))


def going_on(kind: str) -> Capability:
    """Make an entry of a cache that a call continues: `continued`, `edited`, `copied`, `in advance`
    or `interrupted`."""

    def call(trial: Trial, run: Run) -> Run:
        rng, mode = trial.rng, trial.options.get("sequence_bias") and trial.mode
        mode = mode or rng.choice(("static", "dynamic", trial.mode, "self_spec"))
        new, cut, tail = rng.randint(1, 2 * trial.block), rng.randint(1, 9), rng.randrange(1, 50)

        def runs(prompts: list[list[int]], copies: int | None = None, **more: Any) -> Result:
            first: Options = {
                "infill_ids": None,
                "decoding": mode,
                "return_dict_in_generate": True,
                "max_new_tokens": new,
            }
            first |= {"max_length": None, "min_new_tokens": None}
            if kind == "in advance":
                with_head = base_of(trial.tested).mrp_head is not None
                past = base_of(trial.tested).block_cache(
                    len(prompts), 64 + -64 % trial.block, 64, with_head=with_head
                )
                first["past_key_values"] = past
            begun = run([prompt[:cut] for prompt in prompts], copies=1, **first)
            longer = [
                [*prompt, *(token for token in row["tokens"] if token != MASK), tail]
                for prompt, row in zip(begun.prompts, begun.rows, strict=True)
            ]
            if kind == "edited":
                for row in longer[::2]:
                    row[len(row) // 2] = tail
            past = begun.out.past_key_values
            if kind == "copied":
                kept, past = past, copy.deepcopy(past)
                run(longer, copies, past_key_values=kept, **more)
            if kind == "interrupted":
                with suppress(Interrupted):
                    run(
                        longer,
                        copies,
                        past_key_values=past,
                        **{**more, "criteria": [Raises(rng.randint(1, 3))]},
                    )
            return run(longer, copies, past_key_values=past, **more)

        return runs

    return Capability(f"cache {kind}", "cache", call=call)


class Interrupted(Exception):
    """What breaks a call off."""


class Raises(transformers.StoppingCriteria):
    """Raises at a call."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left <= 0:
            raise Interrupted
        return torch.zeros(len(input_ids), dtype=torch.bool)


def interrupted(trial: Trial, run: Run) -> Run:
    """Break a call off, and call again."""

    def runs(prompts: list[list[int]], copies: int | None = None, **more: Any) -> Result:
        with suppress(Interrupted):
            run(prompts, copies, **{**more, "criteria": [Raises(2)]})
        return run(prompts, copies, **more)

    return runs


def twice(_: Trial, run: Run) -> Run:
    def runs(prompts: list[list[int]], *args: Any, **more: Any) -> Result:
        run(prompts, *args, **more)
        return run(prompts, *args, **more)

    return runs


def in_threads(_: Trial, run: Run) -> Run:
    """Make the same call in three threads at once."""

    def runs(prompts: list[list[int]], *args: Any, **more: Any) -> Result:
        with ThreadPoolExecutor(3) as pool:
            first, *others = [
                call.result()
                for call in [pool.submit(run, prompts, *args, **more) for _ in range(3)]
            ]
        assert all(other.rows[0]["tokens"] == first.rows[0]["tokens"] for other in others)
        assert all(len(other.rows) == len(first.rows) for other in others)
        return first

    return runs


@contextmanager
def taped(_: Trial) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(graphs.RECORDERS, "cpu", TapeRecorder)
        yield
    graphs._KEPT.clear()
    TapeRecorder.tapes.clear()


@contextmanager
def interpreted(_: Trial) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modeling_mrp.networks.picker.LIKELIEST", 4)
        patch.setattr("modeling_mrp.kernels.round_layers._HEADS", 1024)
        yield


@contextmanager
def in_chunks(_: Trial) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modeling_mrp.networks.networks.PREFILL_CHUNK", 16)
        yield


def compiled(_: Trial, model: Any) -> Any:
    base_of(model).model.compile()
    if base_of(model).mrp_head is not None:
        base_of(model).mrp_head.compile()
    return model


def places_of(model: Any, first: Any, second: Any) -> dict[str, Any]:
    """Give the first layer and the head another place than the rest."""
    places = dict.fromkeys(
        ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), first
    )
    places |= {
        f"model.layers.{layer}": second if layer == 0 else first
        for layer in range(len(model.model.layers))
    }
    return places | ({"mrp_head": second} if model.mrp_head is not None else {})


@contextmanager
def over_two(trial: Trial) -> Iterator[None]:
    base = base_of(trial.tested)
    with two_devices():
        spread(base, places_of(base, FIRST, SECOND))
        yield


@contextmanager
def on_small(trial: Trial) -> Iterator[None]:
    place(base_of(trial.tested), SMALL)
    with small_device(), sdpa_kernel(SDPBackend.MATH):
        yield


def itself(_: Trial, model: Any) -> Any:
    return model


def reloaded(kind: str) -> Callable[[Trial, Any], Any]:
    """Return a function that saves a model and loads it; an adapter goes to a folder of its own."""

    def loaded(trial: Trial, model: Any) -> Any:
        folder, adapter = trial.folder / "saved", trial.folder / "adapter"
        base, active = model, None
        if isinstance(model, PeftModel):
            active = model.active_adapter
            model.save_pretrained(adapter)
            if kind == "head":
                base_of(model).backbone_source = (str(folder), None)
                base_of(model).save_pretrained(trial.folder / "head", head_only=True)
            base = model.unload()
        base.save_pretrained(folder, **({"max_shard_size": "20KB"} if kind == "shards" else {}))
        options: Options = {"dtype": base.dtype}
        if kind == "head":
            base.backbone_source = (str(folder), None)
            base.save_pretrained(trial.folder / "head", head_only=True)
            folder = trial.folder / "head"
        if kind in ("disk", "cpu"):
            places = places_of(base, "cpu" if kind == "disk" else torch.device("cpu"), kind)
            options |= {"device_map": places, "offload_folder": trial.folder / "spilled"}
        made: Any = MRPForCausalLM.from_pretrained(folder, **options).eval()
        if active is None:
            return made
        where = {"default": adapter, "other": adapter / "other"}
        made = PeftModel.from_pretrained(made, where["default"], autocast_adapter_dtype=False)
        made.load_adapter(where["other"], "other", autocast_adapter_dtype=False)
        made.set_adapter(active)
        return made.eval()

    return loaded


def scored(trial: Trial, result: Result) -> Callable[[list[Row]], None]:
    """Score the texts as a batch, which has to be as each alone."""
    texts = [
        [*prompt, *row["tokens"]] for prompt, row in zip(result.prompts, result.rows, strict=True)
    ]
    logprobs, inputs = (
        base_of(trial.tested).score(**padded(texts, trial.side)),
        padded(texts, trial.side),
    )
    found = torch.tensor(logprobs.logprobs.tolist(), dtype=torch.float64)

    def compare(_: list[Row]) -> None:
        for row, text in enumerate(texts):
            alone = base_of(trial.plain).score(torch.tensor([text])).logprobs[0].double()
            real = inputs["attention_mask"][row].bool()
            torch.testing.assert_close(
                found[row, real], alone, rtol=0, atol=1e-5 if alone.dtype == torch.float64 else 1e-2
            )

    return compare


UNMERGED = r"Merge adapters first \(merge_and_unload\)"
UNSAVED = dict.fromkeys(
    ("LoRA", "another LoRA", "LoRA switched off", "a LoRA for each row"), UNMERGED
)
UNSAVED["no head"] = "the model has no MRP head"
UNKNOWN = (
    "graphs is True, but weights are of the kind .*, and where those lie is not known: .*leave "
    "graphs unset"
)
# On the stand-ins for devices torch makes indices of a list of numbers, as these have, where no
# mode sees it.
BY_LISTS = ("bias", "a LoRA for each row")
SAME = [
    drafted("self_spec"),
    drafted("mrp_spec"),
    *SOURCES,
    argument("num_draft_states", 1, 3, 9, "auto"),
    argument("draft_branches", 1, 2, 5),
    argument("draft_passes", 2, 3),
    argument("draft_shortlist", 1, 9, 99),
    *map(in_way, ("dict", "theirs", "ours", "own")),
    Capability("max_length", arguments=by_length),
    Capability(
        "max_batch_size",
        arguments=lambda trial, *_: {"max_batch_size": 1 + trial.seeds[0] % 2},
        apart=("cache", "a LoRA for each row"),
    ),
    Capability("one seed", begin=one_seed, arguments=lambda trial, *_: {"seed": trial.seeds[0]}),
    Capability(
        "int32 ids",
        arguments=lambda trial, prompts, _: {
            "input_ids": padded(prompts, trial.side)["input_ids"].int()
        },
    ),
    Capability(
        "no attention_mask", arguments=lambda *_: {"attention_mask": None}, apart=("cache",)
    ),
    streaming(Blocks),
    streaming(Drafts),
    Capability(
        "a watching criterion", arguments=lambda *_: {"stopping_criteria": [Watch()]}, check=watched
    ),
    with_scores("output_scores"),
    with_scores("output_logits"),
    Capability("ids alone", arguments=lambda *_: {"return_dict_in_generate": False}),
    *map(going_on, ("continued", "edited", "copied", "in advance", "interrupted")),
    Capability("interrupted", call=interrupted),
    Capability("twice", call=twice),
    Capability("threads", call=in_threads, apart=("place", "options: own", "kernels interpreted")),
    Capability(
        "graphs taped",
        around=taped,
        arguments=lambda *_: {"graphs": True},
        without={
            **dict.fromkeys(QUANTIZED, UNKNOWN),
            **dict.fromkeys(
                ("two devices", "a small device"), "graphs is True, but the model is on"
            ),
            **dict.fromkeys(
                ("offloaded to disk", "offloaded to the host"),
                "graphs is True, but the model lies on several devices",
            ),
        },
    ),
    Capability("prefill in chunks", around=in_chunks),
    Capability(
        "inference mode",
        around=lambda _: torch.inference_mode(),
        apart=("a small device", "two devices"),  # the stand-in for a device has no such mode
    ),
    Capability("compiled", model=compiled),
    Capability("eager attention", model=eager),
    Capability("deep copy", model=lambda _, model: copy.deepcopy(model)),
    Capability("saved whole", "saved", model=reloaded("whole")),
    Capability("saved in shards", "saved", model=reloaded("shards")),
    Capability("head saved alone", "saved", model=reloaded("head"), without=UNSAVED),
    Capability("offloaded to disk", "place", model=reloaded("disk"), apart=("saved", "adapter")),
    Capability("offloaded to the host", "place", model=reloaded("cpu"), apart=("saved", "adapter")),
    Capability("two devices", "place", BY_LISTS, model=itself, around=over_two),
    Capability(
        "a small device",
        "place",
        ("dtype", *BY_LISTS),
        weights=in_float32,
        model=itself,
        around=on_small,
    ),
    Capability("score", check=scored),
]
UNFUSED = (
    "kernels is True, but the kernels of its layers cannot be used: .*use kernels=None or "
    "kernels=False"
)
if triton is not None:
    SAME.append(
        Capability(
            "kernels interpreted",
            apart=("place", "length", "a batch of 6", "block of 16"),
            shape={"num_hidden_layers": 1},
            weights=in_float32,
            options=fixed(max_new_tokens=2),
            arguments=lambda *_: {"kernels": True},
            around=interpreted,
            without={
                "to bfloat16 and back": "there are no kernels for torch.float64",
                "family": UNFUSED,
                "compiled": UNFUSED,
                "eager attention": UNFUSED,
            },
        )
    )

REGISTRY = [*MODES, *ROWS, *TEXT, *SHAPES, *WEIGHTS, *ADAPTERS, *SAME]
BY_NAME = {one.name: one for one in REGISTRY}
assert len(BY_NAME) == len(REGISTRY), "two of one name"


def pair_named(first: str, second: str) -> tuple[Capability, Capability]:
    """Return a pair by names, in the registry's order."""
    found = [one for one in REGISTRY if one.name in (first, second)]
    return found[0], found[1]


__all__ = ["BY_NAME", "REGISTRY", "pair_named"]
