"""`generate` for MRP models: the options, their validation, and what comes out. The loop itself is in `decoding_mrp`."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
)
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from .cache_mrp import BlockCache
from .decoding_mrp import Counts, Decoder, Rows
from .sampling_mrp import Picker
from .strategies_mrp import (
    Direct,
    Dynamic,
    EntropyBound,
    Remask,
    RereadRemask,
    ResidualRemask,
    SelfSpec,
    Sequential,
    Spec,
    Static,
)

_STRATEGIES: dict[str, Callable[["MRPGenerationConfig"], Static]] = {
    "static": lambda options: Static(),
    "dynamic": lambda options: Dynamic(options.confidence_threshold),
    "sequential": lambda options: Sequential(),
    "entropy_bound": lambda options: EntropyBound(options.entropy_threshold),
    "self_spec": lambda options: SelfSpec(options.num_draft_states, options.draft_branches),
    "mrp_direct": lambda options: Direct(options.mrp_steps),
    "mrp_spec": lambda options: Spec(options.num_draft_states, options.draft_branches),
    "mrp_remask": lambda options: _REMASKS[options.remask_rule](options),
}
_REMASKS: dict[str, Callable[["MRPGenerationConfig"], Remask]] = {
    "reread": lambda options: RereadRemask(options.confidence_threshold),
    "threshold": lambda options: Remask(options.confidence_threshold),
    "residual": lambda options: ResidualRemask(options.confidence_threshold, options.residual_delta),
}
DECODINGS = tuple(_STRATEGIES)
REMASK_RULES = tuple(_REMASKS)

# Options of `generate` whose meaning rests on one token per forward, one hypothesis per row, or a second model, and the
# values that switch them off.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "cache_implementation": (None,),
    "use_cache": (None, True),
    "watermarking_config": (None,),
    "exponential_decay_length_penalty": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "prefill_chunk_size": (None,),
}
# What else `generate` may be given, beside the fields of the generation config.
_ARGUMENTS = ("input_ids", "attention_mask", "logits_processor", "stopping_criteria", "tokenizer", "synced_gpus")
# Values of our own options that are left open everywhere.
_DEFAULTS: dict[str, Any] = {
    "decoding": "static",
    "confidence_threshold": 0.9,
    "entropy_threshold": 0.35,
    "mrp_steps": 1,
    "num_draft_states": 4,
    "draft_branches": 3,
    "remask_rule": "reread",
    "residual_delta": 1.0,
}
_TRUNCATIONS = (
    TopKLogitsWarper,
    TopPLogitsWarper,
    TopHLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)


class MRPGenerationConfig(GenerationConfig):
    """A `GenerationConfig` plus the options of block-diffusion decoding.

    As with every generation config, None leaves an option to the model's own config, and then to the default in brackets.

    Args:
        decoding: `static`, `dynamic`, `sequential`, `entropy_bound` (backbone alone), `self_spec` (lossless, no head
            needed), `mrp_direct`, `mrp_spec` (lossless) or `mrp_remask` [`static`].
        denoising_steps: Steps per block [`block_size`, one token a step].
        confidence_threshold: tau of `dynamic` and `mrp_remask`, a probability [0.9].
        entropy_threshold: Bound of `entropy_bound`, in nats [0.35].
        mrp_steps: Unverified head reveals after each backbone step of `mrp_direct` [1].
        num_draft_states: K, the states a row may submit per round in `mrp_spec` and `self_spec`; 1 drafts nothing, though the
            next block's first state rides behind a clean one in every mode [4].
        draft_branches: How many followers of a state are considered in drafting; 1 drafts a chain [3].
        remask_rule: Which reveals `mrp_remask` takes back: `reread` (the least believed one at a time, then echoes of the
            others), `threshold` (published) or `residual` (released code) [`reread`].
        residual_delta: Largest residual logit that the `residual` rule lets stand [1.0].
        seed: An int s gives row i the seed s + i; a list gives one per row [one per row from torch's generator].
    """

    def __init__(self, **kwargs: Any) -> None:
        self.decoding: Any = kwargs.pop("decoding", None)
        self.denoising_steps: Any = kwargs.pop("denoising_steps", None)
        self.confidence_threshold: Any = kwargs.pop("confidence_threshold", None)
        self.entropy_threshold: Any = kwargs.pop("entropy_threshold", None)
        self.mrp_steps: Any = kwargs.pop("mrp_steps", None)
        self.num_draft_states: Any = kwargs.pop("num_draft_states", None)
        self.draft_branches: Any = kwargs.pop("draft_branches", None)
        self.remask_rule: Any = kwargs.pop("remask_rule", None)
        self.residual_delta: Any = kwargs.pop("residual_delta", None)
        self.seed: Any = kwargs.pop("seed", None)
        super().__init__(**kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is saved: the options that are set."""
        return {name: value for name, value in super().to_diff_dict().items() if value is not None}

    def check(self, block_size: int, has_head: bool) -> None:
        """Fills in defaults, then raises `ValueError`, with value and remedy, for the first option that cannot be honoured."""
        self.update(**_DEFAULTS, defaults_only=True)
        if not isinstance(self.decoding, str) or self.decoding not in _STRATEGIES:
            raise ValueError(f"decoding is {self.decoding!r}: choose one of {', '.join(DECODINGS)}")
        if self.decoding.startswith("mrp_") and not has_head:
            raise ValueError(
                f"decoding={self.decoding!r} needs an MRP head, and this checkpoint has none: load one with a head, "
                "or use 'self_spec', which is lossless and needs no head"
            )
        if self.denoising_steps is not None:
            _require(
                self, "denoising_steps", int, lambda v: 1 <= v <= block_size, f"an int from 1 to block_size ({block_size})"
            )
        _require(self, "confidence_threshold", float, lambda v: 0 <= v <= 1, "a probability from 0 to 1")
        _require(self, "entropy_threshold", float, lambda v: v >= 0, "a number of nats, 0 or more")
        _require(self, "mrp_steps", int, lambda v: v >= 1, "an int of 1 or more")
        _require(self, "num_draft_states", int, lambda v: v >= 1, "an int of 1 or more")
        _require(self, "draft_branches", int, lambda v: v >= 1, "an int of 1 or more")
        _require(self, "residual_delta", float, lambda v: v > 0, "a positive number of logits")
        if self.remask_rule not in REMASK_RULES:
            raise ValueError(f"remask_rule is {self.remask_rule!r}: choose one of {', '.join(REMASK_RULES)}")
        if self.temperature is not None:
            _require(
                self,
                "temperature",
                float,
                lambda v: 0 < v < float("inf"),
                "a positive number (greedy decoding is do_sample=False)",
            )
        seeds = self.seed if isinstance(self.seed, list) else [self.seed]
        if any(not (s is None or (isinstance(s, int) and not isinstance(s, bool) and 0 <= s < 1 << 62)) for s in seeds):
            raise ValueError(f"seed is {self.seed!r}: use None, an int from 0 to 2**62, or a list of one such int per row")
        for name, off in _UNSUPPORTED.items():
            if getattr(self, name, None) not in off:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not supported: block-diffusion decoding follows one hypothesis per row "
                    f"through its own rounds. Leave {name} unset"
                )

    def schedule(self, block_size: int) -> Tensor:
        """[block_size] long: how many positions each denoising step of a block reveals, then zeros."""
        steps = self.denoising_steps or block_size
        counts = torch.zeros(block_size, dtype=torch.long)
        counts[:steps] = block_size // steps
        counts[: block_size % steps] += 1
        return counts


def _require(config: MRPGenerationConfig, name: str, kind: type, holds: Callable[[Any], bool], wanted: str) -> None:
    value = getattr(config, name)
    allowed = (int, float) if kind is float else (int,)
    if not isinstance(value, allowed) or isinstance(value, bool) or not holds(value):
        raise ValueError(f"{name} is {value!r}: it must be {wanted}")


@dataclass
class MRPGenerateStats(ModelOutput):
    """What a `generate` call cost.

    Attributes:
        forwards: Forwards of the whole batch by role: `prefill`, `denoise`, `verify` (backbone) and `head`.
        row_forwards: [rows] long, backbone forwards in which each row took part.
        row_head_forwards: [rows] long, the same for the head.
        drafted: [rows] long, drafted states that were submitted.
        accepted: [rows] long, drafted states that were right.
        revoked: [rows] long, reveals that `mrp_remask` took back.
        accepted_lengths: [rows, n] long, how many rounds accepted 0, 1, 2, ... states (the first is never a draft; those that
            were scored in vain a round earlier count).
    """

    forwards: dict[str, int] | None = None
    row_forwards: Tensor | None = None
    row_head_forwards: Tensor | None = None
    drafted: Tensor | None = None
    accepted: Tensor | None = None
    revoked: Tensor | None = None
    accepted_lengths: Tensor | None = None


@dataclass
class MRPGenerateOutput(ModelOutput):
    """What `generate` returns with `return_dict_in_generate=True`.

    Attributes:
        sequences: [rows, prompt + generated] long, padded with `pad_token_id` behind each row's end.
        tokens_per_forward: [rows] float, generated tokens over the backbone forwards in which the row took part.
        reveal_step: [rows, generated] long, the denoising step of the row that committed each token; -1 in padding.
        token_logprobs: [rows, generated] float32, log-probability of each token when committed; 0 in padding.
        stats: `MRPGenerateStats`.
    """

    sequences: Tensor | None = None
    tokens_per_forward: Tensor | None = None
    reveal_step: Tensor | None = None
    token_logprobs: Tensor | None = None
    stats: MRPGenerateStats | None = None


class MRPGenerationMixin(GenerationMixin):
    """`generate` of an MRP model: transformers prepares everything, the rounds of `Decoder` decode."""

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        assistant_model: Any = None,
        custom_generate: Any = None,
        negative_prompt_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | MRPGenerateOutput:
        """Decodes as `GenerationMixin.generate` does, block by block.

        Takes what `generate` takes (`max_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`, `eos_token_id`,
        `stop_strings` with `tokenizer`, `stopping_criteria`, `logits_processor`, `streamer`, `num_return_sequences`,
        `attention_mask` with padding on either side, ...) and every field of `MRPGenerationConfig`.

        Logits processors see the scores of masked positions, [positions, vocab], with the row's committed ids
        [positions, length]: the blocks before the current one.

        Returns:
            [rows, prompt + generated] long, or an `MRPGenerateOutput` with `return_dict_in_generate=True`.

        Raises:
            ValueError: for an unknown or unsupported option, a value out of range, or a prompt that cannot be decoded.
        """
        if custom_generate is not None:
            return super().generate(inputs, generation_config, custom_generate=custom_generate, streamer=streamer, **kwargs)
        if assistant_model is not None:
            raise ValueError("assistant_model is not supported: the model's own MRP head drafts. Use decoding='mrp_spec'")
        if negative_prompt_ids is not None:
            raise ValueError("negative_prompt_ids are not supported: leave them unset")
        config = MRPGenerationConfig()
        if generation_config is not None:
            if unknown := sorted(k for k in vars(generation_config) if not k.startswith("_") and not hasattr(config, k)):
                raise ValueError(f"generation_config has unknown fields {unknown}: check their spelling, or leave them unset")
            config.update(**generation_config.to_dict())
        model_kwargs = config.update(**kwargs)
        config.update(**self.generation_config.to_dict(), defaults_only=True)
        if "eos_token_id" in kwargs and kwargs["eos_token_id"] is None:
            config.eos_token_id = []  # None as an argument means no eos; left as None, the model's own would come back
        config.check(self.config.block_size, self.config.has_head)
        if unused := sorted(name for name, value in model_kwargs.items() if value is not None and name not in _ARGUMENTS):
            raise ValueError(
                f"{', '.join(unused)}: not used or not supported by generate here. Check the spelling, or leave it unset"
            )
        if config.stop_strings is not None:  # transformers would lose the tokenizer on the way to a custom loop
            if (tokenizer := model_kwargs.pop("tokenizer", None)) is None:
                raise ValueError(f"stop_strings={config.stop_strings!r} need the tokenizer: pass tokenizer=... to generate")
            criteria = StoppingCriteriaList(model_kwargs.pop("stopping_criteria", None) or [])
            criteria.append(StopStringCriteria(tokenizer, config.stop_strings))
            model_kwargs["stopping_criteria"] = criteria
            config.stop_strings = None
        if (mask_id := self.config.mask_token_id) in _eos_ids(config):
            raise ValueError(f"eos_token_id holds the mask id {mask_id}, which is never picked: leave it out")
        prompt = inputs if inputs is not None else model_kwargs.get("input_ids")
        self._check_prompt(prompt, model_kwargs.get("attention_mask"), config)
        copies = 1 if config.num_return_sequences is None else config.num_return_sequences
        if not isinstance(copies, int) or isinstance(copies, bool) or copies < 1:
            raise ValueError(f"num_return_sequences is {copies!r}: it must be an int of 1 or more")
        expanded = len(prompt) * copies
        if streamer is not None and expanded > 1:
            raise ValueError(f"a streamer takes one row, and the batch has {expanded}: stream one prompt at a time")

        def decode(
            model: Any,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: MRPGenerationConfig,
            tokenizer: Any = None,
            **model_kwargs: Any,
        ) -> Tensor | MRPGenerateOutput:
            return _decode(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)

        with _either_padding_side():
            return super().generate(inputs, generation_config=config, custom_generate=decode, streamer=streamer, **model_kwargs)

    def block_cache(self, batch_size: int, capacity: int, scratch: int, with_head: bool) -> BlockCache:
        """An empty cache for `batch_size` rows of `capacity` tokens, with room for `scratch` tokens being scored."""
        config = self.config
        layers = list(self.model.layers) + (list(self.mrp_head.layers) if with_head else [])
        devices = [layer.self_attn.k_proj.weight.device for layer in layers]
        return BlockCache(batch_size, config.num_key_value_heads, config.head_dim, devices, capacity, scratch, self.dtype)

    def _check_prompt(self, prompt: Tensor | None, attention_mask: Tensor | None, config: MRPGenerationConfig) -> None:
        if prompt is None:
            raise ValueError("generate needs input_ids (inputs_embeds are not supported): pass a [rows, length] tensor of ids")
        if prompt.dim() != 2 or prompt.shape[0] == 0 or prompt.shape[1] == 0:
            raise ValueError(f"input_ids have shape {list(prompt.shape)}: pass at least one row with at least one token")
        real = torch.ones_like(prompt, dtype=torch.bool)
        if attention_mask is not None:
            if attention_mask.dim() != 2 or attention_mask.shape != prompt.shape:
                raise ValueError(
                    f"attention_mask has shape {list(attention_mask.shape)} for input_ids of {list(prompt.shape)}: "
                    "generate takes a 2-D mask of the same shape (a 4-D mask works with forward only)"
                )
            real = attention_mask.bool()
        if bool(((prompt == self.config.mask_token_id) & real).any()):
            raise ValueError(
                f"the prompt holds the mask id {self.config.mask_token_id}: infilling is not supported. Remove the masks; "
                "generate continues the prompt"
            )
        outside = ((prompt < 0) | (prompt >= self.config.vocab_size)) & real
        if bool(outside.any()):
            raise ValueError(
                f"the prompt holds the id {int(prompt[outside][0])}, outside the vocabulary of {self.config.vocab_size}: "
                "use this model's tokenizer"
            )
        new = config.max_new_tokens
        if new is not None and (not isinstance(new, int) or isinstance(new, bool) or new < 1):
            raise ValueError(f"max_new_tokens is {new!r}: it must be an int of 1 or more")


def _check_rows(real: Tensor, new_tokens: int, max_positions: int) -> None:
    """Checks the attention mask that transformers was given or inferred, [rows, length] bool, and the room for the text."""
    empty = ~real.any(-1)
    if bool(empty.any()):
        raise ValueError(f"row {int(empty.nonzero()[0])} has no token (its attention_mask is all zeros): drop the row")
    holes = (real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0] > 1
    if bool(holes.any()):
        raise ValueError(
            f"attention_mask of row {int(holes.nonzero()[0])} has holes: a row's tokens must be contiguous, with padding on "
            "one side or both"
        )
    longest = int(real.sum(-1).max())
    if longest + new_tokens > max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {new_tokens} new ones make {longest + new_tokens}, which exceeds "
            f"max_position_embeddings={max_positions}: shorten the prompt or lower max_new_tokens (or max_length)"
        )


@contextmanager
def _either_padding_side() -> Iterator[None]:
    """Holds back transformers' advice to pad on the left: positions are absolute here, so either side gives the same text."""
    log = logging.getLogger("transformers.generation.utils")

    def keep(record: logging.LogRecord) -> bool:
        return "right-padding was detected" not in record.getMessage()

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def _decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: MRPGenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> Tensor | MRPGenerateOutput:
    """What `GenerationMixin.generate` calls with everything prepared."""
    device = model.lm_head.weight.device
    input_ids = input_ids.to(device)
    mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(device).bool()
    new = config.max_length - input_ids.shape[1]
    _check_rows(real, new, model.config.max_position_embeddings)
    criteria = [c for c in stopping_criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
    stream = _Stream(streamer, model.config.block_size) if streamer is not None else None
    decoder = Decoder(
        model,
        _STRATEGIES[config.decoding](config),
        _picker(model, logits_processor, config),
        [ids[keep] for ids, keep in zip(input_ids, real, strict=True)],
        new,
        config.schedule(model.config.block_size).to(device),
        _eos_ids(config),
        _seeds(config, len(input_ids)).to(device),
        max(0, (config.min_length or 0) - input_ids.shape[1]),
        (lambda ids: any(bool(torch.as_tensor(c(ids, None)).all()) for c in criteria)) if criteria else None,
        stream.on_round if stream is not None else None,
    )
    rows, counts = decoder.run()
    if stream is not None:
        stream.end(rows)
    return _output(input_ids, rows, counts, config)


def _picker(model: Any, processors: LogitsProcessorList, config: MRPGenerationConfig) -> Picker:
    """Sorts transformers' list into processors, temperature and truncation.

    Some of transformers' own processors count columns of the padded batch. The ids shown here have no padding, so
    the minimum length is kept by the decoder itself and the repetition penalty starts at the first token.
    """
    temperature = 1.0
    before, after = LogitsProcessorList(), LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, TemperatureLogitsWarper):
            temperature = float(processor.temperature)
        elif isinstance(processor, _TRUNCATIONS):
            after.append(processor)
        elif isinstance(processor, RepetitionPenaltyLogitsProcessor) and torch.is_tensor(processor.prompt_ignore_length):
            before.append(RepetitionPenaltyLogitsProcessor(processor.penalty))
        elif not isinstance(processor, MinLengthLogitsProcessor | MinNewTokensLengthLogitsProcessor):
            before.append(processor)
    return Picker(
        model.lm_head.weight,
        model.config.mask_token_id,
        temperature,
        bool(config.do_sample),
        before or None,
        after or None,
        tuple(_eos_ids(config)),
    )


def _eos_ids(config: MRPGenerationConfig) -> list[int]:
    eos = config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _seeds(config: MRPGenerationConfig, rows: int) -> Tensor:
    if isinstance(config.seed, list):
        if len(config.seed) != rows:
            raise ValueError(
                f"seed lists {len(config.seed)} values for {rows} rows: give one per row (after num_return_sequences)"
            )
        return torch.tensor(config.seed, dtype=torch.long)
    if config.seed is not None:
        return config.seed + torch.arange(rows)
    return torch.randint(1 << 62, (rows,)) if config.do_sample else torch.zeros(rows, dtype=torch.long)


class _Stream:
    """Feeds a streamer: finished blocks in order, and drafts to a streamer that has `put_draft`."""

    def __init__(self, streamer: BaseStreamer, block_size: int) -> None:
        self.streamer = streamer
        self.block_size = block_size
        self.sent: int | None = None

    def on_round(self, rows: Rows) -> None:
        self._put(rows, int(rows.start[0]))
        if hasattr(self.streamer, "put_draft") and bool(rows.active[0]):
            begin = max(int(rows.start[0]), int(rows.prompt_length[0]))
            end = min(int(rows.start[0]) + self.block_size, int(rows.limit[0]))
            self.streamer.put_draft(rows.tokens[:1, begin:end].cpu())

    def end(self, rows: Rows) -> None:
        self._put(rows, int(rows.stop[0]))
        self.streamer.end()

    def _put(self, rows: Rows, upto: int) -> None:
        begin = self.sent if self.sent is not None else int(rows.prompt_length[0])
        upto = min(upto, int(rows.stop[0]))
        if upto > begin:
            self.streamer.put(rows.tokens[0, begin:upto].cpu())
            self.sent = upto


def _output(input_ids: Tensor, rows: Rows, counts: Counts, config: MRPGenerationConfig) -> Tensor | MRPGenerateOutput:
    generated = rows.stop - rows.prompt_length
    columns = torch.arange(int(generated.max()), device=input_ids.device)
    inside = columns < generated[:, None]
    at = (rows.prompt_length[:, None] + columns).clamp(max=rows.tokens.shape[1] - 1)
    pad = config.pad_token_id
    if pad is None:
        pad = next(iter(_eos_ids(config)), 0)
    sequences = torch.cat([input_ids, rows.tokens.gather(1, at).where(inside, torch.tensor(pad, device=at.device))], 1)
    if not config.return_dict_in_generate:
        return sequences
    return MRPGenerateOutput(
        sequences=sequences,
        tokens_per_forward=generated / counts.row_forwards,
        reveal_step=rows.reveal_step.gather(1, at).where(inside, torch.tensor(-1, device=at.device)),
        token_logprobs=rows.logprob.gather(1, at).where(inside, torch.tensor(0.0, device=at.device)),
        stats=MRPGenerateStats(**vars(counts)),
    )


__all__ = ["DECODINGS", "MRPGenerateOutput", "MRPGenerateStats", "MRPGenerationConfig", "MRPGenerationMixin"]
