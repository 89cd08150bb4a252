"""Random models, batches and options, their decodes, and comparisons of two decodes: for tests and
`benchmarks.soak`."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)

from modeling_mrp import MRPConfig, MRPForCausalLM, MRPGenerationConfig
from modeling_mrp.generate.option_table import DRAFTING, PUBLISHED, REMASK_RULES, TARGETS
from modeling_mrp.generate.options import OPTION_NAMES
from modeling_mrp.rules.options import COUNT, NATS, POSITIVE, PROBABILITY, STEPS, Option, Values
from modeling_mrp.rules.reveal import RULES
from tests.support.reference import Row as SlowRow
from tests.support.reference import reference_decode

Row = dict[str, Any]
MASK, VOCAB = 60, 64
# to give options, the last in the model's own config
WAYS = ("arguments", "dict", "theirs", "ours", "own")
# Modes that do not draft, in such numbers that about half of the cases have rules from papers.
MODES = (
    *2 * ("static", "dynamic", "sequential", "entropy_bound", "mrp_direct", "mrp_remask"),
    *PUBLISHED,
)


def make_model(seed: int = 0, **overrides: Any) -> MRPForCausalLM:
    """Make a float64 model with random weights, large enough that its logits, and the head's
    changes to them, vary."""
    options: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 4,
        "mask_token_id": 60,
        "num_nextn_predict_layers": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = MRPForCausalLM(MRPConfig(**{**options, **overrides}))
    if model.mrp_head is not None:
        torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3)
    model = model.double().eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.num_draft_states = 4  # fixed, so that counts are the same in every run
    return model


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of one word for each id; transformers tokenises "abcdef" to learn how words
    join."""
    words = {f"w{i:02d}": i for i in range(VOCAB - 2)} | {"abcdef": VOCAB - 2, "[UNK]": VOCAB - 1}
    backend = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def batch_of(prompts: Sequence[list[int]], side: str = "left") -> dict[str, Tensor]:
    """Make ids and attention mask of prompts, padded on the `left` or `right`."""
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        pad = [0] * (width - len(prompt))
        ids.append(pad + prompt if side == "left" else prompt + pad)
        ones = [1] * len(prompt)
        mask.append(pad + ones if side == "left" else ones + pad)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def dampened(model: MRPForCausalLM, factor: float) -> MRPForCausalLM:
    """Scale attention outputs of a model by a factor, so that a reveal changes little and drafts
    are often right."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= factor
    return model


def random_case_model(rng: random.Random) -> MRPForCausalLM:
    """Make a model of random weights whose drafts are nearly always wrong or, if its attention is
    dampened, often right."""
    seed = rng.randrange(1 << 16)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    layers = {
        "num_hidden_layers": rng.choice((1, 2)),
        "num_nextn_predict_layers": rng.choice((1, 2)),
    }
    block_size = rng.choice((4, 4, 8, 8, 16, 32))
    model = make_model(seed, block_size=block_size, **shape, **layers)
    assert model.mrp_head is not None
    calm = rng.choice((1.0, 0.3, 0.05))
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3 * calm)
    return dampened(model, calm)


class Sways(LogitsProcessor):
    """Favours tokens by all ids before a position, masks too; scores some tokens NaN, and lifts
    scores of -inf.

    Lifted scores are never equal: which of two equal ones a top-p keeps is an accident of sorting.
    """

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`."""
        weights = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device) % 7
        tokens = torch.arange(scores.shape[1], device=scores.device)
        ranks = ((input_ids * weights).sum(1, keepdim=True) + 5 * tokens) % 11
        lifted = torch.where(scores == -torch.inf, 1 + tokens / 97, scores)
        return (lifted + self.strength * ranks).masked_fill(ranks == 10, torch.nan)


class StopsBehind(StoppingCriteria):
    """Ends a row's text after any of some tokens."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = torch.tensor(ids)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See `StoppingCriteria`."""
        return torch.isin(input_ids[:, -1], self.ids.to(input_ids.device))


def random_processors(rng: random.Random, left_to_right: bool) -> dict[str, Any]:
    """Draw options for logits processors, often none; else some for transformers' and one of our
    own."""
    ids = rng.sample(range(1, 50), 6)
    biased = ids[:2] if left_to_right else ids[:1]  # else the token before may not be known yet
    kinds: dict[str, Any] = {
        "repetition_penalty": rng.choice((0.7, 1.3, 2.0)),
        "no_repeat_ngram_size": rng.choice((2, 3)),
        "bad_words_ids": [[ids[0]], ids[1:3], ids[3:6]],
        "suppress_tokens": ids,
        "sequence_bias": [[biased, rng.choice((-4.0, 4.0))], [ids[3:4], 2.0]],
        "logits_processor": [Sways(rng.choice((0.1, 1.0)))],
        "remove_invalid_values": True,
        "renormalize_logits": True,
    }
    chosen = rng.sample(list(kinds), rng.choice((0, 0, 0, 1, 2, 3)))
    if "logits_processor" in chosen:  # a NaN of `Sways` would make all of a position's scores NaN
        kinds.pop("renormalize_logits")
    return {name: kinds[name] for name in chosen if name in kinds}


# By kind of values, some that a rule's option may take in blocks of any size.
SOME_VALUES: dict[Values, tuple[Any, ...]] = {
    COUNT: (1, 2, 3, 9),
    STEPS: (1,),
    NATS: (0.0, 0.2, 2.0, 12.0),
    POSITIVE: (0.25, 1.0, 2.0, 9.0),
    PROBABILITY: (0.0, 0.02, 0.05, 0.2, 0.9),
}


def options_of_rules() -> dict[str, Option]:
    """Return the options that rules declare, by name."""
    return {option.name: option for rule in RULES.values() for option in rule.options}


def random_options(rng: random.Random, block: int, mode: str) -> dict[str, Any]:
    """Draw the options that change the text of a mode."""
    options: dict[str, Any] = {
        "mrp_steps": rng.randint(1, 3),
        "remask_rule": rng.choice(REMASK_RULES),
        "residual_delta": rng.choice((0.2, 1.0)),
        "max_new_tokens": rng.randint(1, 2 * min(block, 16) + 3),
        "denoising_steps": rng.choice((None, None, 1, 2, 3, rng.randint(1, block))),
        "confidence_threshold": rng.choice((0.0, 0.02, 0.05, 0.2, 0.9)),
        "low_threshold": rng.choice((None, 0.0, 0.02, 0.05, 0.2)),
        "entropy_threshold": rng.choice((0.0, 2.0, 5.0, 12.0)),
        "factor": rng.choice((0.5, 1.0, 2.0, 3.0, 9.0)),
        "eos_token_id": rng.choice((None, [3, 5], list(range(1, 12)), rng.sample(range(50), 25))),
    }
    for name, option in options_of_rules().items():
        if name not in options:
            options[name] = rng.choice((None, *SOME_VALUES[option.values]))
    if rng.random() < 0.3 and options["eos_token_id"]:
        options["min_new_tokens"] = rng.randint(1, options["max_new_tokens"])
    if rng.random() < 0.5:
        options |= {
            "do_sample": True,
            "temperature": rng.choice((0.3, 0.7, 1.0, 1.7)),
            "top_k": rng.choice((0, 0, 1, 5, 50)),
            "top_p": rng.choice((1.0, 1.0, 0.5, 0.9)),
            **rng.choice(
                (
                    {},
                    {},
                    {},
                    {"min_p": 0.05},
                    {"typical_p": 0.8},
                    {"epsilon_cutoff": 0.02},
                    {"eta_cutoff": 0.05},
                )
            ),
            **rng.choice(({}, {}, {}, {}, {"top_h": 0.4})),
        }
    return options | random_processors(
        rng, mode == "sequential" and options["denoising_steps"] in (None, block)
    )


def random_drafting(rng: random.Random, block: int) -> dict[str, Any]:
    """Draw drafting options, which do not change the text; twelve states of 32 tokens would take
    the slow decoder seconds."""
    width = rng.randint(1, 12 if block < 32 else 6)
    return {
        "num_draft_states": rng.choice((width, width, width, "auto")),
        "draft_branches": rng.randint(1, 6),
        "draft_passes": rng.randint(1, width),
        "draft_shortlist": rng.choice((0, 0, 1, 9, 99)),
        "prompt_lookup_num_tokens": rng.choice((0, 0, 1, 5, 20)),
        "max_matching_ngram_size": rng.choice((1, 2, 3)),
        "draft_next_block": rng.random() < 0.5,
    }


def random_prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Draw prompts of one token or more."""
    return [[rng.randrange(1, 50) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def random_infill(rng: random.Random, rows: int, most: int) -> Tensor | None:
    """Draw given tokens and masks that continue each prompt, sometimes whole blocks of either;
    mostly return None."""
    if rng.random() < 0.6:
        return None
    count = rng.choice((most, rng.randint(1, most)))  # to the limit, too
    pattern = []
    for _ in range(rows):
        share, ids = rng.random(), list[int]()
        while len(ids) < count:
            run = rng.randint(1, 9)
            ids += (
                [MASK] * run if rng.random() < share else [rng.randrange(1, 50) for _ in range(run)]
            )
        pattern.append(ids[:count])
    return torch.tensor(pattern)


def given_in(way: str, model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that give the same options in one of `WAYS`; "own" changes the model's own
    config."""
    if way == "arguments":
        return given
    fields = {name: value for name, value in given.items() if name in OPTION_NAMES}
    others = {name: value for name, value in given.items() if name not in OPTION_NAMES}
    if way == "own":
        model.generation_config = MRPGenerationConfig(**fields)
        return others
    kinds: dict[str, Any] = {"dict": dict, "theirs": GenerationConfig, "ours": MRPGenerationConfig}
    return {"generation_config": kinds[way](**fields), **others}


class Case:
    """A random batch with its decoding mode and options, all functions of the case's name.

    Args:
        name: Seed of all random choices.
        sizes: Numbers of rows that the batch may have.
        modes: Modes that the case may have.

    Attributes:
        mode: The mode that decides the text: a target, or a mode that refines.
        options: Further options that change the text, processors included.
        stops: Tokens after which a criterion or a stop string ends a text; mostly none.
        prompts, infill, seeds: Of each row.
        calls: Number of decodes so far.
    """

    def __init__(self, name: str, sizes: Sequence[int], modes: Sequence[str] = MODES) -> None:
        self.rng = rng = random.Random(name)
        self.modes = modes
        self.model = random_case_model(rng)
        block = self.model.config.block_size
        self.prompts = random_prompts(rng, rng.choice(sizes), rng.choice((2 * block + 3, 9)))
        self.seeds = [rng.randrange(1 << 62) for _ in self.prompts]
        self.stops = rng.sample(range(1, 50), rng.choice((1, 6))) if rng.random() < 0.2 else []
        self.calls = 0
        self.ask()

    def ask(self) -> None:
        """Draw mode, options and infill for the prompts."""
        rng = self.rng
        self.mode = rng.choice(self.modes)
        self.options = random_options(rng, self.model.config.block_size, self.mode)
        self.infill = random_infill(rng, len(self.prompts), self.options["max_new_tokens"])

    def drafted(self) -> dict[str, Any]:
        """Draw the options of a mode that drafts for the case's mode; return an empty dict if none
        does."""
        if self.mode not in TARGETS:
            return {}
        drafting = random_drafting(self.rng, self.model.config.block_size)
        return {"decoding": self.rng.choice(DRAFTING), "target": self.mode, **drafting}

    def stopping(self) -> dict[str, Any]:
        """Draw the options that end texts at `stops`: stop strings or a criterion."""
        if not self.stops:
            return {}
        strings = {
            "stop_strings": [f"w{id:02d}" for id in self.stops],
            "tokenizer": word_tokenizer(),
        }
        return self.rng.choice((strings, {"stopping_criteria": [StopsBehind(self.stops)]}))

    def decode(
        self,
        order: Sequence[int] | None = None,
        criteria: Sequence[StoppingCriteria] = (),
        way: str = "arguments",
        **options: Any,
    ) -> tuple[list[Row], Any]:
        """Decode all rows, or the rows in `order`, with more criteria and options given in one of
        `WAYS`; return each row's tokens, steps and log-probabilities, and the whole output."""
        self.calls += 1
        places = range(len(self.prompts)) if order is None else order
        inputs: dict[str, Any] = batch_of(
            [self.prompts[i] for i in places], self.rng.choice(("left", "right"))
        )
        given = {
            "decoding": self.mode,
            **self.options,
            **self.stopping(),
            "seed": [self.seeds[i] for i in places],
            **options,
        }
        if criteria:
            given["stopping_criteria"] = [*given.get("stopping_criteria", []), *criteria]
        infill = None if self.infill is None else self.infill[list(places)]
        own, given = self.model.generation_config, given_in(way, self.model, given)
        try:
            out: Any = self.model.generate(
                **inputs, infill_ids=infill, return_dict_in_generate=True, **given
            )
        finally:
            self.model.generation_config = own
        new = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        parts = zip(new, out.reveal_step.tolist(), out.token_logprobs, strict=True)
        return [
            {"tokens": tokens, "steps": steps, "logprobs": logprobs}
            for tokens, steps, logprobs in parts
        ], out

    def by_reference(self, row: int, **options: Any) -> SlowRow:
        """Decode a row by the slow decoder."""
        self.calls += 1
        given = {"decoding": self.mode, "seed": self.seeds[row], **self.options, **options}
        if self.stops:
            given["stop"] = lambda ids: ids[-1] in self.stops
        return reference_decode(
            self.model,
            self.prompts[row],
            () if self.infill is None else self.infill[row].tolist(),
            **given,
        )

    def go_on(self, rows: Sequence[Row], longest: int) -> None:
        """Extend prompts by cut answers and further tokens, sometimes change a token; draw mode,
        options and infill anew."""
        rng = self.rng
        for place, row in enumerate(rows):
            answer = [
                token
                for token in row["tokens"][: rng.randint(0, len(row["tokens"]))]
                if token != MASK
            ]
            said = [
                *self.prompts[place],
                *answer,
                *(rng.randrange(1, 50) for _ in range(rng.randint(0, 5))),
            ][:longest]
            if rng.random() < 0.2:
                said[rng.randrange(len(said))] = rng.randrange(1, 50)
            self.prompts[place] = said
        self.ask()


def of_slow(told: SlowRow) -> Row:
    """Convert a row of the slow decoder to the results of a decode."""
    return {
        "tokens": told.tokens,
        "steps": told.reveal_step,
        "logprobs": torch.tensor(told.logprobs),
    }


def assert_same_text(a: Row, b: Row, case: Any, atol: float = 1e-5) -> None:
    """Assert that two rows are equal, up to the padding that a row may have in a batch;
    log-probabilities up to `atol`."""
    count = min(len(a["steps"]), len(b["steps"]))
    assert a["tokens"][:count] == b["tokens"][:count], case
    assert a["steps"][:count] == b["steps"][:count], case
    assert all(step == -1 for step in a["steps"][count:] + b["steps"][count:]), case
    torch.testing.assert_close(
        a["logprobs"][:count].double(), b["logprobs"][:count].double(), rtol=0, atol=atol
    )
