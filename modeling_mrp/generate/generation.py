"""`generate` for MRP models: arguments in, text and counts out."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import logits_process as kinds
from transformers.generation.streamers import BaseStreamer

from ..kernels.dispatch import PYTORCH, Dispatch, unusable
from ..model.offloading import fetched
from ..networks.cache import BlockCache, PassingReference, adapted_layers, adapters_of_rows, devices_of_layers, weights_seen
from ..networks.graphs import cache_for, release_graphs
from ..networks.layers import pack, plan_layers
from ..networks.networks import Networks
from ..networks.picker import TRUNCATIONS, Picker
from ..rules.bans import Bans
from ..rules.draft import UnscoredError
from ..rules.state import Counts, Row
from .budget import Amount, Fixed, budget_of
from .loop import Decoder, Mode
from .options import MRPGenerationConfig, check_ids, check_prompt, check_rows, logger, resolved, set_fields
from .output import MRPGenerateOutput, Progress, Stopping, Streams, output_of

# Recorded batches shrink to so many rows, whose rounds take the time of reading the weights: fewer would be no faster.
_LEAST_RECORDED = 4


class MRPGenerationMixin(GenerationMixin):
    """`generate` of an MRP model: transformers prepares everything, the loop decodes."""

    generation_config: MRPGenerationConfig

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | dict[str, Any] | None = None,
        streamer: BaseStreamer | Sequence[BaseStreamer] | None = None,
        custom_generate: Any = None,
        infill_ids: Tensor | None = None,
        past_key_values: BlockCache | None = None,
        **kwargs: Any,
    ) -> Tensor | MRPGenerateOutput:
        """Decode as `GenerationMixin.generate` does, block by block.

        Takes what `generate` takes (`max_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`, `eos_token_id`,
        `stop_strings` with `tokenizer`, `stopping_criteria`, `logits_processor`, `streamer`, `num_return_sequences`,
        `attention_mask` with padding on either side, ...) and every field of `DecodingOptions`, which describes them.

        Logits processors see the scores of masked positions, [positions, vocab], with the ids before each [positions, length]:
        the row's text, with what is revealed of its block, and `mask_token_id` where nothing is known yet. Under the target
        `sequential`, one token a step, that is all the text to the left; in other orders they do not see what is known to the
        right. `bad_words_ids` and `no_repeat_ngram_size` are kept in every order. Stopping criteria see the batch as it came,
        padding included, with as many tokens behind as the row in question has: [rows, prompt + n], `mask_token_id` where a
        slower row has no token yet; and no scores.

        Args:
            inputs: [rows, length] long, the prompts (or `input_ids`).
            generation_config: Options, or a dict of them; keyword arguments go before its fields.
            streamer: Receives the prompt without its padding, then finished blocks in order; of a single row. A list holds one
                for each row (after `num_return_sequences`), which ends as soon as its row does.
            custom_generate: As in transformers; the call is then passed on.
            infill_ids: [rows, n] long, what continues each row's prompt: `mask_token_id` where a token is to be generated, any
                other id is given and kept. The blocks before a mask, and its own, are what it is generated from. Rows with
                fewer are filled up with masks. Behind them the text goes on, if `max_new_tokens` (which counts given
                tokens too) leaves room; without a limit of length it ends there. A text ends at an eos behind the last given
                token, and none is generated before.
            past_key_values: Those of an earlier call's output, of the same model, weights and head. `input_ids` hold the
                whole conversation. Keys and values of the blocks that both begin with are not computed again, row by row as
                far as the ids agree: the text is the one without a cache. Prefill starts at the first block that any
                row lacks, in modes with the head also of the head's own, which only these modes add to. The
                cache is taken over, in place if it has the room, and used up; with `num_return_sequences` it is copied
                instead. The output carries the one to go on from.

        Returns:
            [rows, prompt + generated] long, or an `MRPGenerateOutput` with `return_dict_in_generate=True`.

        Raises:
            ValueError: for an unknown or unsupported option, a value out of range, or a prompt that cannot be decoded, before
                any work; for what a criterion or processor returns wrongly; for a position without a finite score.
        """
        if custom_generate is not None:
            kwargs |= set_fields({"infill_ids": infill_ids, "past_key_values": past_key_values})
            return super().generate(inputs, generation_config, custom_generate=custom_generate, streamer=streamer, **kwargs)
        config, others = resolved(self, generation_config, kwargs)
        prompt: Any = inputs if inputs is not None else others.get("input_ids")
        real = _real(prompt, others.get("attention_mask"), config, self.config)
        others["attention_mask"] = torch.ones_like(prompt)  # padding, on either side, is no affair of transformers
        config.pad_token_id = config.pad_id()
        if self.training and self.is_gradient_checkpointing:
            raise ValueError(
                "gradient checkpointing is on, under which layers in training mode keep no keys and values: call model.eval() "
                "before generate"
            )
        copies = config.num_return_sequences or 1
        check_adapters(self, len(prompt) * copies)
        streams = None if streamer is None else Streams(streamer, len(prompt) * copies)
        if past_key_values is not None:
            check_past(past_key_values, self, len(prompt))
        if infill_ids is not None:
            check_ids(infill_ids, None, self.config.vocab_size, "infill_ids", len(prompt))
            infill_ids = infill_ids.repeat_interleave(copies, 0)
            if config.max_new_tokens is None and config.max_length is None:
                config.max_new_tokens = infill_ids.shape[1]

        decode = partial(_decode, streams, real.repeat_interleave(copies, 0), infill_ids, past_key_values)
        with fetched(self.lm_head):
            return super().generate(inputs, generation_config=config, custom_generate=decode, **others)

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """Load the generation config as transformers does, which knows no other class than its own."""
        super().adjust_generation_fn(*args, **kwargs)
        self.generation_config = MRPGenerationConfig.from_dict(self.generation_config.to_dict())
        self.generation_config._original_object_hash = hash(self.generation_config)

    def _get_stopping_criteria(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """Leave out stop strings, which come back from the model's own config: there is a criterion for them already."""
        generation_config.stop_strings = None
        return super()._get_stopping_criteria(generation_config, *args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `ValueError`: this, and with it `generate_batch`, feeds a causal cache a token at a time."""
        raise ValueError(
            "generate_batch and continuous batching are not supported, as they make one token a step: pass all prompts to "
            "generate as one padded batch, in which no row waits for another"
        )

    def block_cache(self, batch_size: int, capacity: int, scratch: int, with_head: bool, fixed: bool = False) -> BlockCache:
        """Make an empty cache for `batch_size` rows of `capacity` tokens, with room for `scratch` tokens being scored.

        With `fixed`, attention reads powers of two of slots, as recorded forwards need.

        Raises:
            ValueError: for a `capacity` that is no multiple of the block size, or a head's layers where the model has no head.
        """
        if capacity % self.config.block_size:
            raise ValueError(f"capacity is {capacity}: it must be a multiple of the block size, {self.config.block_size}")
        if with_head and self.mrp_head is None:
            raise ValueError("with_head=True, but this checkpoint has no MRP head: pass with_head=False")
        heads, width, devices = self.config.num_key_value_heads, self.config.head_dim, devices_of_layers(self, with_head)
        key = self.model.layers[0].self_attn.k_proj.weight
        if (getattr(self, "_tp_size", None) or 1) > 1 and hasattr(key, "to_local"):
            heads = len(key.to_local()) // width
        head_layers = len(devices) - self.config.num_hidden_layers
        hidden_size = self.config.hidden_size if with_head or self.model.shifted else 0
        sizes = (batch_size, heads, width, devices, capacity, scratch)
        cache = BlockCache(*sizes, self.dtype, head_layers, hidden_size, fixed, self.model.shifted)
        cache.owner = PassingReference(self)
        return cache

    def release_graphs(self) -> None:
        """Free the recorded rounds that calls of `generate` on CUDA leave for the next, and the KV cache they write to."""
        release_graphs(self)


def _real(prompt: Any, attention_mask: Any, config: MRPGenerationConfig, ours: Any) -> Tensor:
    """Check a prompt, and tell which of its ids are real; without a mask `pad_token_id` is padding, if it is no eos."""
    real, pad = check_prompt(prompt, attention_mask, ours.mask_token_id, ours.vocab_size), config.pad_id()
    if attention_mask is None and config.pad_token_id is not None and pad not in config.eos_ids():
        return prompt != pad
    if attention_mask is None and len(prompt) > 1 and bool((prompt[:, [0, -1]] == pad).any()):
        logger.warning_once(f"pad_token_id {pad} is an eos, so that padding is taken for text: pass the attention_mask")
    return real


def _decode(
    streams: Streams | None,
    real: Tensor,
    infill_ids: Tensor | None,
    past: BlockCache | None,
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: MRPGenerationConfig,
    **others: Any,
) -> Tensor | MRPGenerateOutput:
    """Decode prompts for which `GenerationMixin.generate` has prepared everything."""
    config, block, device = generation_config, model.config.block_size, model.lm_head.weight.device
    input_ids, mode, new = input_ids.to(device), config.mode(block, len(input_ids)), config.max_length - input_ids.shape[1]
    picker, real = _picker(model, logits_processor, config, mode), real.to(device)
    if config.do_sample and config.seed is None and (getattr(model, "_tp_size", None) or 1) > 1:
        raise ValueError("seed is None, and each process of tensor parallelism would draw another text: pass a seed")
    check_rows(real, new, model.config.max_position_embeddings)
    if infill_ids is not None and infill_ids.shape[1] > new:
        raise ValueError(
            f"infill_ids hold {infill_ids.shape[1]} tokens a row, and max_new_tokens (or max_length) leaves room for {new}: "
            "raise it, or leave it unset"
        )
    mixed = mixed_tokens(getattr(model.config, "quantization_config", None))
    if mixed is not None and (mode.drafting is not None or len(input_ids) > 1):
        logger.warning_once(mixed)
    prompts = [ids[keep] for ids, keep in zip(input_ids, real, strict=True)]
    least = max(0, (config.min_length or 0) - input_ids.shape[1])
    rows = laid_out(prompts, infill_ids, new, config, least, model.config, picker.bans)
    for row in rows:
        row.counts = Counts(mode.width, mode.drafting is not None)
    progress = Progress(rows, config.output_logits, config.output_scores) if config.return_dict_in_generate else None
    criteria = [one for one in stopping_criteria if not isinstance(one, MaxLengthCriteria | EosTokenCriteria)]
    # Whatever `kernels` is: weights that move make caches of earlier calls useless.
    if picker.dispatch.forced or unusable(model.device, model.dtype) is None:
        pack(model)
    size = (len(rows), max(len(row.text) for row in rows), mode.width * block)
    with cache_for(model, config.graphs, past, *size, mode.uses_head) as (cache, graphs):
        reused = _reused(cache, rows, model, mode)
        if progress is not None:  # the cache is handed out
            parts = ("model", "mrp_head") if cache.head_layers else ("model",)
            cache.weights = {name: weights_seen(getattr(model, name)) for name in parts}
        plans = plan_layers(model, mode.uses_head, picker.dispatch)
        networks = Networks(model, cache, mode.uses_head, picker, plans, None if graphs is None else graphs.call)
        watches: list[Any] = [
            *([Stopping(criteria, rows, input_ids, config.pad_token_id)] if criteria else []),
            *([] if progress is None else [progress]),
            *([] if streams is None else [streams]),
        ]
        if streams is not None:
            streams.begin(prompts)
        drafting = mode.drafting
        budget = budget_of(model, mode, drafting.states, drafting.passes, drafting.paced) if drafting else Fixed(Amount())
        # What is recorded is not so for every size; adapters of rows are handed out by place.
        fewest = len(rows) if adapters_of_rows(model) else 1 if graphs is None else _LEAST_RECORDED
        decoder = Decoder(mode, networks, budget, watches, fewest)
        try:
            decoder.decode(rows, reused)
        except UnscoredError as error:
            cache.empty()  # what is not finite there is not gone on from
            raise ValueError(_unscored(error, rows[error.place], picker)) from None
        held = [row.held for row in rows]
        with_head = ([row.head_held for row in rows], held) if mode.uses_head else (cache.head_held, cache.hidden_held)
        cache.hold([row.text for row in rows], held, *with_head)
    return output_of(input_ids, rows, decoder, progress, cache, config.pad_token_id)


def _reused(cache: BlockCache, rows: Sequence[Row], model: Any, mode: Mode) -> list[int]:
    """Count the tokens of each row that have cached keys and values, and drop from the cache what the call will overwrite."""
    texts = [row.text for row in rows]
    reused = cache.reusable(texts, [row.state.start for row in rows], model.config.block_size, mode.uses_head)
    for row, same, of_head in zip(rows, reused, cache.head_held, strict=True):
        row.head_held = min(same, of_head) if mode.uses_head else 0
    # From here on the slots behind are overwritten, also by a call that does not come to its end.
    old = (cache.head_held, cache.hidden_held)
    cache.hold(texts, reused, *([min(pair) for pair in zip(reused, part, strict=True)] for part in old))
    return reused


def laid_out(
    prompts: list[Tensor], infill_ids: Tensor | None, new: int, config: MRPGenerationConfig, least: int, ours: Any, bans: Any
) -> list[Row]:
    """Lay out every row's text before the first step; a row starts in the block of its first mask.

    `prompts` are 1-D long, `infill_ids` [rows, n] long. At most `new` tokens follow a prompt; none of the first `least` is an
    eos. `ours` is the model's configuration, `bans` are `Bans` or None.
    """
    rows, eos, block_size, mask_id = [], frozenset(config.eos_ids()), ours.block_size, ours.mask_token_id
    given = [[] for _ in prompts] if infill_ids is None else infill_ids.tolist()
    for place, (prompt, infill, seed) in enumerate(zip(prompts, given, config.seeds(len(prompts)), strict=True)):
        text = prompt.tolist() + infill
        length, limit = len(prompt), len(prompt) + new
        given_end = length + max((at + 1 for at, token in enumerate(infill) if token != mask_id), default=0)
        text += [mask_id] * (-(-limit // block_size) * block_size - len(text))
        open_end = max((at + 1 for at in range(limit) if text[at] == mask_id), default=0)
        # Given tokens are kept, so that no text ends before the last of them.
        ends = (length, given_end, limit, open_end, max(length + least, given_end))
        rows.append(Row(place, text, block_size, mask_id, eos, *ends, seed, bans))
    return rows


def _unscored(error: UnscoredError, row: Row, picker: Picker) -> str:
    """Make the error for a position without a finite score, with the possible reasons."""
    dtype, reasons = picker.lm_head_weight.dtype, []
    if picker.processors:
        names = ", ".join(dict.fromkeys(type(processor).__name__ for processor in picker.processors))
        reasons.append(
            f"the logits processors ({names}), for which -inf and NaN bar a token, bar all: leave one a finite score"
        )
    if error.position < row.no_eos_before and row.eos:
        reasons.append("every eos_token_id is barred before min_new_tokens, min_length and given tokens: leave some id out")
    reasons.append("weights are NaN or infinite: load or train them again")
    reasons.append(f"{dtype} overflows, here or divided by temperature={picker.temperature}: load a wider dtype")
    return (
        f"row {row.place} has no token with a finite score at position {error.position}, {error.position - row.prompt} behind "
        f"its prompt. Either {'; or '.join(reasons)}"
    )


def _picker(model: Any, processors: LogitsProcessorList, config: MRPGenerationConfig, mode: Mode) -> Picker:
    """Sort transformers' list of processors into processors proper, temperature and truncation.

    The decoder itself keeps the minimum length, since transformers' own processors count columns of the padded batch.
    """
    temperature, ngram = 1.0, 0
    words: list[tuple[int, ...]] = []
    before, after = LogitsProcessorList(), LogitsProcessorList()
    for processor in processors:
        biased = processor.sequence_bias if isinstance(processor, kinds.SequenceBiasLogitsProcessor) else {}
        if outside := [one for ids in biased for one in ids if not 0 <= one < model.config.vocab_size]:
            raise ValueError(
                f"bad_words_ids or sequence_bias hold the id {outside[0]}, outside the vocabulary of "
                f"{model.config.vocab_size}: use this model's tokenizer"
            )
        if isinstance(processor, kinds.NoBadWordsLogitsProcessor):
            words += biased
        elif isinstance(processor, kinds.NoRepeatNGramLogitsProcessor):
            ngram = processor.ngram_size
        elif isinstance(processor, TemperatureLogitsWarper):
            temperature = float(processor.temperature)
        elif isinstance(processor, tuple(TRUNCATIONS)):
            after.append(processor)
        elif not isinstance(processor, kinds.MinLengthLogitsProcessor | kinds.MinNewTokensLengthLogitsProcessor):
            if not mode.rule.left_to_right and (several := [list(ids) for ids in biased if len(ids) > 1]):
                raise ValueError(
                    f"sequence_bias holds {several[0]}, of several tokens: all before its last one have to be known, so it "
                    "needs the target 'sequential' with one token a step. bad_words_ids, which forbid, work everywhere"
                )
            if not mode.rule.left_to_right and not type(processor).__module__.startswith("transformers."):
                logger.warning_once(
                    f"the logits processor {type(processor).__name__} sees what is known on the left of a position, and here "
                    "some of that comes later: what must hold for neighbours needs the target 'sequential', one token a step"
                )
            before.append(processor)
    check_unembedding(model.lm_head)
    dispatch = Dispatch(config.kernels)
    usable = dispatch.allows("they", model.lm_head.weight)
    sample, weight = bool(config.do_sample), model.lm_head.weight
    # No shortlist then: it is taken from the scores of one state, and a processor or a ban may raise or bar other tokens at the
    # states that follow.
    shaped = words or ngram or before
    few = mode.drafting.listed(len(weight), sample) if mode.drafting and type(weight) in (Tensor, nn.Parameter) else 0
    return Picker(
        *(weight, model.config.mask_token_id, temperature, sample, before or None),
        *(Bans(tuple(words), ngram) if words or ngram else None, after or None, tuple(config.eos_ids())),
        entropy=mode.rule.needs_entropy,
        likeliest=sample and mode.drafting is not None,
        shortlist=0 if shaped else few,
        dispatch=dispatch if usable else PYTORCH,
    )


def check_adapters(model: Any, rows: int) -> None:
    """Check the active adapters for a batch of `rows` rows.

    Raises:
        ValueError: for an adapter that needs a prompt read token by token, vectors before it, or a network beside the layers;
            for `adapter_names` of another number of rows.
    """
    of_rows = adapters_of_rows(model)
    if of_rows is not None and len(of_rows) != rows:
        raise ValueError(
            f"adapter_names holds {len(of_rows)} names for {rows} rows: give one for each row (after num_return_sequences)"
        )
    on = {
        name
        for layer in adapted_layers(model)
        if not layer.disable_adapters
        for name in (*layer.active_adapters, *(of_rows or ()))
    }
    configs = [config for name, config in (getattr(model, "peft_config", None) or {}).items() if name in on]
    refused = [one for one in configs if getattr(one, "alora_invocation_tokens", None) or one.peft_type == "SHADOW"]
    wrapper: Any = getattr(model.prepare_inputs_for_generation, "__self__", None)  # a peft model puts its own there
    if getattr(config := getattr(wrapper, "active_peft_config", None), "is_prompt_learning", False):
        refused.append(config)
    for config in refused:
        kind = config.peft_type.value
        raise ValueError(
            f"an adapter of type {'aLoRA (alora_invocation_tokens)' if kind == 'LORA' else kind} has no effect on generate, "
            "which decodes from ids alone, and not from the left: it acts on the prompt, behind an invocation or beside the "
            "layers. Train an adapter of the weights instead, such as LoRA, or decode without it under model.disable_adapter()"
        )


def check_past(past: Any, model: Any, rows: int) -> None:
    """Raise `ValueError` if a call with `rows` prompts cannot continue from a cache."""
    depth, why = 0 if model.mrp_head is None else len(model.mrp_head.layers), None
    ours = isinstance(past, BlockCache) and past.owner is not None and past.owner() is model
    if not ours:
        why = "are not those that generate(..., return_dict_in_generate=True) of this very model gave, or went through a pickle"
    elif past.rows != rows:
        why = f"hold {past.rows} rows, and input_ids have {rows}, not the same conversations in the same order"
    elif past.head_layers not in (0, depth):
        why = f"hold those of a head of {past.head_layers} layers, and the model's has {depth}"
    elif (was := (past.dtype, past.layer_devices)) != (now := (model.dtype, devices_of_layers(model, past.head_layers > 0))):
        why = f"have another dtype or other devices, {was}, than the model now, {now}"
    elif changed := [name for name, seen in past.weights.items() if seen != weights_seen(getattr(model, name))]:
        why = f"are older than the weights of {changed[0]}, which have changed"
    if why is not None:
        raise ValueError(f"past_key_values {why}: leave them unset")


def check_unembedding(lm_head: Any) -> None:
    """Raise `ValueError` for an `lm_head` that is divided, packed by bitsandbytes or adapted: its weight alone is read."""
    if hasattr(lm_head.weight, "to_local"):
        raise ValueError(
            "lm_head is divided among processes, and rows of it are read: leave it, and embed_tokens if these are tied, out of "
            "tp_plan"
        )
    if not lm_head.weight.is_floating_point():
        raise ValueError(
            f"lm_head is a {type(lm_head).__name__} with weights in {lm_head.weight.dtype}, which generate cannot read: keep "
            "it as it was, with 'lm_head' in llm_int8_skip_modules where that is given"
        )
    if hasattr(lm_head, "base_layer") and not (lm_head.merged or lm_head.disable_adapters):
        raise ValueError(
            f"lm_head has an adapter ({', '.join(lm_head.active_adapters)}), and its own weight is what is read: merge it with "
            "merge_and_unload() or merge_adapter(), or leave 'lm_head' out of target_modules"
        )


def mixed_tokens(quantization: Any) -> str | None:
    """Say how a `quantization_config` lets tokens of one forward change each other's results; None if it does not."""
    scales = getattr(scheme := getattr(quantization, "quant_type", None), "granularity", None)  # of torchao
    of_activations = scales[0] if isinstance(scales, list | tuple) else scales
    if getattr(quantization, "load_in_8bit", False) and quantization.llm_int8_threshold > 0:
        how = "LLM.int8 takes columns with an activation above llm_int8_threshold out of int8 for all tokens of a forward"
        remedy = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
    elif "DynamicActivation" in type(scheme).__name__ and type(of_activations).__name__ == "PerTensor":
        how, remedy = "torchao's PerTensor scales the activations of all tokens of a forward alike", "granularity=PerRow()"
    else:
        return None
    return (
        f"{how}: drafted text may differ from its target's, and the text of a row from what it is in another batch. Load with "
        f"{remedy} for the same text"
    )
