"""The method `generate` of MRP models: from arguments to text and counts."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import logits_process as kinds
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.streamers import BaseStreamer

from ..constraints.languages import Language
from ..kernels.dispatch import PYTORCH, Dispatch
from ..model.compat import CACHE_NAME, chosen_cache
from ..model.loading import describe_token_mixing, weights_on_device
from ..networks.cache import BlockCache, check_past
from ..networks.graphs import release_graphs
from ..networks.inspection import (
    adapters_of_rows,
    check_weights,
    decide,
    fingerprint,
    prompt_adapter,
    weight_versions,
)
from ..networks.networks import networks_for
from ..networks.picker import LIKELIEST, TRUNCATIONS, Picker
from ..rules.bans import Bans
from ..rules.draft import UnscoredError
from ..rules.sources import CheckedSource, DraftSource
from ..rules.state import Counts, Row
from ..versions import tested_versions
from .batching import ContinuousBatchingManager, Limits
from .constrain import languages_by_row
from .loop import Decoder, Mode, draft_amount
from .option_table import ids_in
from .options import MRPGenerationConfig, check_ids, check_rows, logger, resolved, set_fields
from .output import (
    CountsEnd,
    MRPGenerateOutput,
    Progress,
    Stopping,
    Streams,
    by_request,
    output_of,
)
from .processors import CONTRACT, InOrder, why_in_order
from .request import Call, unscored

# Processors that act at a column of the batch. The options that make them are not supported. Given
# as objects they are right without padding, since each row's processors see the row's own text.
_OF_COLUMNS = (
    kinds.ForcedBOSTokenLogitsProcessor,
    kinds.ForcedEOSTokenLogitsProcessor,
    kinds.ExponentialDecayLengthPenalty,
    kinds.SuppressTokensAtBeginLogitsProcessor,
)

_AT_ONCE = 16  # default number of rows of `generate_batch`


class MRPGenerationMixin(GenerationMixin):
    """Adds `generate` and `generate_batch` to an MRP model, and methods for continuous batching,
    caches and CUDA graphs. transformers prepares the inputs, and this package's loop decodes
    them."""

    @tested_versions()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | dict[str, Any] | None = None,
        streamer: BaseStreamer | Sequence[BaseStreamer] | None = None,
        custom_generate: Any = None,
        infill_ids: Tensor | None = None,
        past_key_values: BlockCache | None = None,
        cache: BlockCache | None = None,
        draft_sources: Sequence[DraftSource] | None = None,
        **kwargs: Any,
    ) -> Tensor | MRPGenerateOutput:
        """Decode prompts block by block. The keyword arguments are those of
        `GenerationMixin.generate` and the fields of `DecodingOptions`.

        Logits processors get the logits of masked positions, [positions, vocab], and the ids before
        each position, [positions, length]. These ids are the row's text with the revealed tokens of
        its block, and `mask_token_id` where no token is known yet. A processor that remembers its
        calls or depends on the row is supported under `sequential` only. There, it is called once
        for each token, with all rows.

        Stopping criteria get the prompts of all rows as given, each followed by n tokens, where n
        is the number of tokens of the row that is being checked. A row with fewer tokens is filled
        up with masks. The `scores` of a criterion are None.

        Args:
            inputs: int64 [rows, length], the prompts; `input_ids` is another name of this argument.
                `attention_mask` has 0 at padding, which may be on either side.
            generation_config: Options, or a dict of them. Keyword arguments override its fields.
            streamer: For a single row, an object that receives the prompt without padding, and then
                finished blocks in order. For several rows (after `num_return_sequences`), a list of
                one streamer per row; each ends as soon as its row does.
            custom_generate: As for transformers' own `generate`, which handles a call with this
                argument.
            infill_ids: int64 [rows, n], the continuation of each prompt. It has `mask_token_id`
                where a token is to be generated; other ids are kept. Fill shorter rows up with
                masks. Generation continues after column n if `max_new_tokens`, which also counts
                given tokens, leaves room. Without a limit of length it ends there. No eos is
                generated before the last given token.
            past_key_values: The cache in the output of an earlier call, made by the same model with
                the same weights and head. `input_ids` must hold the whole conversation. The prefix
                on which a row's ids agree with the cache is not computed again. The text is the
                same as without a cache. The call overwrites the cache, or copies it if it is too
                small or if `num_return_sequences` is set. So continue from the cache in the new
                output instead.
            cache: Another name of `past_key_values`, which transformers uses from 5.24 on.
            draft_sources: Objects that propose tokens for drafts in addition to scores
                (`DraftSource`), with 'self_spec' or 'mrp_spec'. They affect the speed, never the
                text.

        Returns:
            int64 [rows, prompt + generated], or an `MRPGenerateOutput` with
            `return_dict_in_generate=True`.

        Raises:
            ValueError: for an invalid or unsupported argument, before any forward; for a malformed
                result of a criterion or processor; for a position at which the picked token has no
                finite logit.

        Example:
            >>> from modeling_mrp import MRPForCausalLM
            >>> from mrp_trainer import embedded_checkpoint
            >>> from transformers import AutoTokenizer
            >>> model = MRPForCausalLM.from_pretrained(embedded_checkpoint())
            >>> tokenizer = AutoTokenizer.from_pretrained(
            ...     embedded_checkpoint(), config=model.config
            ... )
            >>> task = "Sum the numbers of a list that are even, each plus 5."
            >>> chat = [{"role": "user", "content": task}]
            >>> how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            >>> inputs = tokenizer.apply_chat_template(chat, **how)
            >>> ids = model.generate(**inputs, decoding="mrp_spec", max_new_tokens=64)
            >>> new = ids[0, inputs["input_ids"].shape[1] :]
            >>> print(tokenizer.decode(new, skip_special_tokens=True))
            def number(number):
                return sum(5 + n for n in number if n % 2 == 0)
        """
        cache = chosen_cache(cache, past_key_values)
        if custom_generate is not None:
            kwargs |= set_fields(
                {"infill_ids": infill_ids, CACHE_NAME: cache, "draft_sources": draft_sources}
            )
            return super().generate(
                inputs,
                generation_config,
                custom_generate=custom_generate,
                streamer=streamer,
                **kwargs,
            )
        if draft_sources is not None:
            kwargs["draft_sources"] = draft_sources
        with torch.no_grad(), weights_on_device(self.lm_head):
            call = self._prepared(inputs, generation_config, infill_ids, cache, **kwargs)
            return _decode(self, call, streamer, cache)

    def _prepared(
        self,
        inputs: Tensor | None,
        generation_config: GenerationConfig | dict[str, Any] | None = None,
        infill_ids: Tensor | None = None,
        cache: BlockCache | None = None,
        **kwargs: Any,
    ) -> Call:
        """Check the arguments of `generate`, and make the `Call` that decodes them."""
        config, others = resolved(self, generation_config, kwargs)
        vocab_size, mask_id = self.config.vocab_size, self.config.mask_token_id
        sources = [
            CheckedSource(each, vocab_size, mask_id) for each in others.pop("draft_sources", ())
        ]
        prompt: Any = inputs if inputs is not None else others.get("input_ids")
        mask, pad = others.get("attention_mask"), config.pad_id()
        real = check_ids(prompt, mask, self.config)
        if mask is None and config.pad_token_id is not None and pad not in config.eos_ids():
            real = prompt != pad
        elif mask is None and len(prompt) > 1 and bool((prompt[:, [0, -1]] == pad).any()):
            logger.warning_once(
                f"pad_token_id {pad} is an eos, so that padding is taken for text: pass the "
                "attention_mask"
            )
        # this package handles padding, on either side, and hides it from transformers
        others["attention_mask"] = torch.ones_like(prompt)
        config.pad_token_id = pad
        if self.training and self.is_gradient_checkpointing:
            raise ValueError(
                "gradient checkpointing is on, and layers in training keep no keys and values: "
                "call model.eval()"
            )
        copies = config.num_return_sequences or 1
        model_key = fingerprint(self)
        if prompt_adapter(self) is None:
            decide(self, model_key, "readable", partial(check_weights, self))
        else:
            check_weights(self)
        names = adapters_of_rows(self)
        if names is not None and len(names) != len(prompt) * copies:
            raise ValueError(
                f"adapter_names holds {len(names)} names for {len(prompt) * copies} rows: give one "
                "per row (after num_return_sequences)"
            )
        if cache is not None:
            check_past(cache, self, len(prompt), model_key)
        languages: list[Language | None] = []
        tokenizer = others.pop("tokenizer", None)
        if config.is_constrained:
            for language in languages_by_row(config, tokenizer, len(prompt), vocab_size, mask_id):
                languages += [language] * copies
        if infill_ids is not None:
            check_ids(infill_ids, None, self.config, len(prompt))
            infill_ids = infill_ids.repeat_interleave(copies, 0)
            if config.max_new_tokens is None and config.max_length is None:
                config.max_new_tokens = infill_ids.shape[1]
        rows_real = real.repeat_interleave(copies, 0)
        prepare: Any = partial(
            _prepare, model_key, rows_real, infill_ids, cache, sources, languages
        )
        call: Any = super().generate(
            inputs, generation_config=config, custom_generate=prepare, **others
        )
        return call

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """Set `self.generation_config` as transformers does when it loads a model, but as an
        `MRPGenerationConfig`. The arguments are those of transformers' method of this name."""
        super().adjust_generation_fn(*args, **kwargs)
        self.generation_config: MRPGenerationConfig = MRPGenerationConfig.from_dict(
            self.generation_config.to_dict()
        )

    def _get_stopping_criteria(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> StoppingCriteriaList:
        """Make the stopping criteria, except the criterion for stop strings, which `resolved` has
        already made."""
        generation_config.stop_strings = None
        return super()._get_stopping_criteria(generation_config, *args, **kwargs)

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | dict[str, Any] | None = None,
        *,
        progress_bar: bool = False,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """Decode prompts in one batch; each prompt joins the batch as soon as a row is free.

        Each text equals that of `generate` for its prompt alone. With `do_sample`, a prompt has the
        seed that its row would have in a batch of all prompts.

        Args:
            inputs: The ids of each prompt, without padding.
            generation_config: As for `generate`; `max_batch_size` is 16 by default.
            progress_bar: Whether to show the number of complete texts.
            **kwargs: Further options and arguments of `generate`.

        Returns:
            A dict from names to transformers' `GenerationOutput`. The names are "req_0", "req_1"
            and so on, in the order of the prompts. Each output has `prompt_ids`, `generated_tokens`
            including the eos, and `logprobs`, the log-probabilities of these tokens when they were
            revealed. With `num_return_sequences`, the names of a prompt's further texts end in
            "__child#1" and so on.

        Raises:
            ValueError: as from `generate`, before any forward.
        """
        prompts = [list(ids) for ids in inputs]
        if not prompts:
            return {}
        for index, ids in enumerate(prompts):
            if not ids:
                raise ValueError(f"inputs hold no id in prompt {index}: leave it out")
        if kwargs.get("infill_ids") is not None:
            raise ValueError(
                "infill_ids: what is given stands among what is generated, so pass them to "
                "generate, which has max_batch_size, too"
            )
        config, _ = resolved(self, generation_config, dict(kwargs))
        if config.max_batch_size is None:
            kwargs["max_batch_size"] = _AT_ONCE
        texts = len(prompts) * (config.num_return_sequences or 1)
        width = max(map(len, prompts))
        padded = [[ids[0]] * (width - len(ids)) + ids for ids in prompts]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        with tqdm(total=texts, disable=not progress_bar, unit="text") as bar:
            output: Any = self.generate(
                torch.tensor(padded, device=self.device),
                generation_config,
                streamer=[CountsEnd(bar) for _ in range(texts)] if progress_bar else None,
                attention_mask=torch.tensor(mask, device=self.device),
                return_dict_in_generate=True,
                **kwargs,
            )
        return by_request(prompts, output)

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | dict[str, Any] | None = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> ContinuousBatchingManager:
        """Make a manager that decodes requests as they arrive. Each request joins a batch between
        two rounds.

        Args:
            generation_config: Default options, which each request may override. `max_batch_size`,
                16 by default, is the number of texts that are decoded at the same time.
            continuous_batching_config: transformers' `ContinuousBatchingConfig`. These fields are
                supported: `max_requests_per_batch` (in place of `max_batch_size`),
                `max_batch_tokens` (the number of prompt tokens that are computed between two
                rounds, 512 by default), `max_queue_size`, and `num_blocks` and `page_size` (whose
                product is the number of tokens in all caches together).
            workload_hints: Ignored.

        Raises:
            ValueError: for options that `generate` refuses, and for other fields of
                `continuous_batching_config` that are set.
        """
        config, _ = resolved(self, generation_config, {})
        limits = Limits.of(continuous_batching_config, config.max_batch_size, self.config)
        return ContinuousBatchingManager(self, self._prepared, generation_config, limits)

    def block_cache(
        self, batch_size: int, capacity: int, scratch: int, with_head: bool
    ) -> BlockCache:
        """Make an empty cache for `batch_size` rows of `capacity` tokens, with room to score
        `scratch` tokens per row. With `with_head`, the cache also has the head's layers.

        Raises:
            ValueError: for a `capacity` that is not a multiple of the block size, or for
                `with_head` if the model has no head.
        """
        if capacity % self.config.block_size:
            raise ValueError(
                f"capacity is {capacity}: it must be a multiple of the block size, "
                f"{self.config.block_size}"
            )
        if with_head and self.mrp_head is None:
            raise ValueError(
                "with_head=True, but this checkpoint has no MRP head: pass with_head=False"
            )
        return BlockCache(self, batch_size, capacity, scratch, with_head)

    def release_graphs(self) -> None:
        """Free the CUDA graphs that calls of `generate` keep for later calls, and also the KV cache
        to which the graphs write."""
        release_graphs(self)


def _prepare(
    model_key: Hashable,
    real: Tensor,
    infill_ids: Tensor | None,
    past: BlockCache | None,
    sources: Sequence[DraftSource],
    languages: Sequence[Language | None],
    model: Any,
    input_ids: Tensor,
    logits_processor: kinds.LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: MRPGenerationConfig,
    **others: Any,
) -> Call:
    """Make the `Call` that decodes prompts. `_prepared` binds the first six arguments, and
    `GenerationMixin.generate` passes the others."""
    config, block, device = generation_config, model.config.block_size, model.lm_head.weight.device
    width = input_ids.shape[1]
    at_once = min(config.max_batch_size or len(input_ids), len(input_ids))
    if at_once < len(input_ids):
        _check_waiting(past, adapters_of_rows(model))
    input_ids, mode, new = (
        input_ids.to(device),
        config.mode(block, at_once),
        config.max_length - width,
    )
    is_constrained = any(language is not None for language in languages)
    picker = _picker(model, logits_processor, config, mode, is_constrained)
    real = real.to(device)
    if config.do_sample and config.seed is None and (model.tp_size or 1) > 1:
        raise ValueError(
            "seed is None, and each process of tensor parallelism would draw another text: pass a "
            "seed"
        )
    check_rows(real, new, model.config.max_position_embeddings)
    if not real.all() and (
        columns := [one for one in logits_processor if isinstance(one, _OF_COLUMNS)]
    ):
        raise ValueError(
            f"the logits processor {type(columns[0]).__name__} acts at a column, where padded rows "
            "have other tokens: pass prompts of one length, or one prompt at a time"
        )
    if infill_ids is not None and (filled := infill_ids.shape[1]) > new:
        raise ValueError(
            f"infill_ids hold {filled} tokens a row, max_new_tokens (max_length) leaves room for "
            f"{new}: raise it"
        )
    quantization = getattr(model.config, "quantization_config", None)
    look = partial(describe_token_mixing, quantization, model)
    mixed = decide(model, model_key, ("mixing", id(quantization)), look)
    if mixed and (mode.drafting is not None or len(input_ids) > 1):
        logger.warning_once(mixed)
    prompts = [ids[keep] for ids, keep in zip(input_ids, real, strict=True)]
    reason = None
    if picker.processors is not None:
        reason = why_in_order(picker.processors, prompts, model.lm_head.weight)
    if reason is not None:
        left_to_right = mode.rule.left_to_right and mode.refine is None
        waits = at_once < len(input_ids)
        given = is_constrained or infill_ids is not None
        if waits or given or not left_to_right or config.output_scores or config.output_logits:
            raise ValueError(f"{reason}: {CONTRACT}")
        if mode.drafting is not None:
            logger.warning_once(f"{reason}: so nothing is drafted, which changes no text")
        mode = replace(mode, drafting=None)
    least = max([0, (config.min_length or 0) - width, *_least_new(logits_processor, width, config)])
    if least > new:
        raise ValueError(
            f"min_new_tokens (min_length) asks for {least} new tokens, and max_new_tokens "
            f"(max_length) leaves room for {new}: lower the one, or raise the other"
        )
    if is_constrained:
        _check_languages(languages, mode, new, least, infill_ids)
    rows = laid_out(
        prompts,
        infill_ids,
        new,
        config,
        least,
        model.config,
        picker.bans,
        languages,
        picker.processors is None,
    )
    if reason is not None:
        in_order = InOrder(picker.processors or (), rows, width, config.pad_id())
        picker = replace(picker, processors=None, in_order=in_order, candidates=0, shortlist=0)
    for row in rows:
        row.counts = Counts(mode.width, mode.drafting is not None)
    criteria = [
        one
        for one in stopping_criteria
        if not isinstance(one, MaxLengthCriteria | EosTokenCriteria)
    ]
    if mode.drafting is not None:
        sources = [*sources, *mode.drafting.sources()]
    return Call(config, mode, picker, rows, prompts, input_ids, criteria, sources, model_key)


def _decode(
    model: Any, call: Call, streamer: Any, past: BlockCache | None
) -> Tensor | MRPGenerateOutput:
    """Decode the prompts of a call, and return the output of `generate`."""
    config, mode, picker, rows = call.config, call.mode, call.picker, call.rows
    input_ids, model_key, block = call.input_ids, call.model_key, model.config.block_size
    at_once = min(config.max_batch_size or len(rows), len(rows))
    progress = (
        Progress(rows, config.output_logits, config.output_scores, at_once < len(rows))
        if config.return_dict_in_generate
        else None
    )
    length = max(len(row.text) for row in rows)
    batch = rows[:at_once]
    size = (at_once, length, mode.width * block, mode.uses_head)
    with networks_for(model, picker, config.graphs, past, *size, model_key) as networks:
        cache = networks.cache
        reused = cache.cut(
            [row.text for row in batch], [row.state.start for row in batch], block, mode.uses_head
        )
        for row, of_head in zip(batch, cache.head_held, strict=True):
            row.head_held = of_head if mode.uses_head else 0
        if progress is not None:  # the cache is part of the output
            parts = ("model", "mrp_head") if cache.head_layers else ("model",)
            cache.weights = {
                name: weight_versions(getattr(model, name), model_key) for name in parts
            }
        watches: list[Any] = (
            [Stopping(call.criteria, rows, input_ids, config.pad_token_id)] if call.criteria else []
        )
        watches += [] if progress is None else [progress]
        watches += [] if streamer is None else [Streams(streamer, call.prompts)]
        # The batch keeps all rows if adapters or processors depend on the row. With CUDA graphs, a
        # round of fewer than 4 rows takes no less time than one of 4.
        by_row = adapters_of_rows(model) or picker.in_order is not None
        fewest = at_once if by_row else 1 if networks.recorded is None else 4
        amount = draft_amount(mode, picker, model.config, config.round_costs)
        decoder = Decoder(mode, networks, amount, watches, fewest, call.sources)
        try:
            decoder.decode(batch, reused, rows[at_once:])
        except UnscoredError as error:
            cache.empty()  # so that no call continues from numbers that are not finite
            raise ValueError(
                f"row {error.place} has {unscored(error, rows[error.place], picker)}"
            ) from None
        finally:  # also if a watch, a processor or the user has ended the call
            networks.restore_batch(max(row.held for row in rows))
            if at_once < len(rows):  # its rows are those that joined last, not those of the output
                cache.empty()
        if at_once < len(rows):
            return output_of(input_ids, rows, decoder, progress, None, config.pad_token_id)
        held = [row.held for row in rows]
        with_head = (
            ([row.head_held for row in rows], held)
            if mode.uses_head
            else (cache.head_held, cache.hidden_held)
        )
        cache.hold([row.text for row in rows], held, *with_head)
    return output_of(input_ids, rows, decoder, progress, cache, config.pad_token_id)


def _check_waiting(past: BlockCache | None, adapter_names: Sequence[str] | None) -> None:
    """Raise `ValueError` for arguments that have an entry for each row of the batch. Called if some
    rows have to wait for others."""
    if past is not None or adapter_names is not None:
        name = "adapter_names" if past is None else "past_key_values"
        raise ValueError(
            f"{name} hold an entry for each row of the batch, and with max_batch_size rows join it "
            "as others end: leave out the one or the other"
        )


def _check_languages(
    languages: Sequence[Language | None],
    mode: Mode,
    new: int,
    least: int,
    infill_ids: Tensor | None,
) -> None:
    """Raise `ValueError` for options that conflict with the language of a row, or for a row whose
    language has no text that is short enough."""
    if infill_ids is not None or least:
        name = "infill_ids" if infill_ids is not None else "min_new_tokens (min_length)"
        raise ValueError(
            f"{name} and a regex, choices, json_schema or grammar both say what a text is: leave "
            "out the one or the other"
        )
    for index, language in enumerate(languages):
        if language is None:
            continue
        if language.matcher is not None and (mode.refine or not mode.rule.left_to_right):
            raise ValueError(
                "grammar says what may follow a text, and here tokens are revealed in another "
                "order: use the target 'sequential' with one token a step, or json_schema or "
                "regex, which hold in any order"
            )
        if language.shortest > new:
            raise ValueError(
                f"row {index}: no text of its language has fewer than {language.shortest} tokens, "
                f"and max_new_tokens (max_length) leaves room for {new}: raise it to "
                f"{language.shortest} at least"
            )


def _least_new(
    processors: kinds.LogitsProcessorList, width: int, config: MRPGenerationConfig
) -> list[int]:
    """Return the number of new tokens that must precede an eos, for each processor that sets a
    minimum length. The user's own processors count, too.

    Raise `ValueError` if such a processor has other eos ids than the call.
    """
    numbers = []
    for processor in processors:
        if isinstance(processor, kinds.MinLengthLogitsProcessor):
            numbers.append(processor.min_length - width)
        elif isinstance(processor, kinds.MinNewTokensLengthLogitsProcessor):
            numbers.append(processor.prompt_length_to_skip + processor.min_new_tokens - width)
        else:
            continue
        if set(ids_in(processor.eos_token_id)) != set(config.eos_ids()):
            raise ValueError(
                f"the logits processor {type(processor).__name__} has the eos "
                f"{ids_in(processor.eos_token_id)}, generate {config.eos_ids()}: pass "
                "min_new_tokens (min_length) in its place"
            )
    return numbers


def laid_out(
    prompts: list[Tensor],
    infill_ids: Tensor | None,
    new: int,
    config: MRPGenerationConfig,
    least: int,
    ours: Any,
    bans: Any,
    languages: Sequence[Language | None] = (),
    fills: bool = True,
) -> list[Row]:
    """Make a row for each prompt, with its text before the first step: the prompt, its row of
    `infill_ids`, and masks.

    Args:
        prompts: int64 [length] each, without padding.
        infill_ids: int64 [rows, n], or None.
        new: The largest number of tokens that follow a prompt.
        config: The checked options.
        least: None of the first `least` new tokens is an eos.
        ours: The config of the model.
        bans: Banned sequences (`Bans`), or None.
        languages: For each row, the language to which its new text must belong, or None; empty if
            no text is constrained.
        fills: Whether tokens that a language forces are filled in. They never are if there are
            bans.
    """
    rows, eos, block_size, mask_id = (
        [],
        frozenset(config.eos_ids()),
        ours.block_size,
        ours.mask_token_id,
    )
    given = [[] for _ in prompts] if infill_ids is None else infill_ids.tolist()
    for place, (prompt, infill, seed) in enumerate(
        zip(prompts, given, config.seeds(len(prompts)), strict=True)
    ):
        text = prompt.tolist() + infill
        length, limit = len(prompt), len(prompt) + new
        given_end = length + max(
            (at + 1 for at, token in enumerate(infill) if token != mask_id), default=0
        )
        text += [mask_id] * (-(-limit // block_size) * block_size - len(text))
        open_end = max((at + 1 for at in range(limit) if text[at] == mask_id), default=0)
        # Given tokens are kept, so that no text ends before the last of them.
        ends = (length, given_end, limit, open_end, max(length + least, given_end))
        language = languages[place] if languages else None
        constraint = None if language is None else language.constraint(length, limit)
        rows.append(
            Row(
                place,
                text,
                block_size,
                mask_id,
                eos,
                *ends,
                seed,
                bans,
                constraint,
                fills and bans is None,
            )
        )
    return rows


def _picker(
    model: Any,
    processors: kinds.LogitsProcessorList,
    config: MRPGenerationConfig,
    mode: Mode,
    is_constrained: bool,
) -> Picker:
    """Make the picker from transformers' processors, after sorting these by kind.

    Minimum lengths and, if rows are constrained, languages are not part of it: each `Row` enforces
    them.
    """
    temperature, ngram = 1.0, 0
    words: list[tuple[int, ...]] = []
    before, after = kinds.LogitsProcessorList(), kinds.LogitsProcessorList()
    for processor in processors:
        biased = (
            processor.sequence_bias
            if isinstance(processor, kinds.SequenceBiasLogitsProcessor)
            else {}
        )
        if outside := [
            one for ids in biased for one in ids if not 0 <= one < model.config.vocab_size
        ]:
            raise ValueError(
                f"bad_words_ids or sequence_bias hold the id {outside[0]}, outside the vocabulary "
                f"of {model.config.vocab_size}: use this model's tokenizer"
            )
        if isinstance(processor, kinds.NoBadWordsLogitsProcessor):
            words += biased
        elif isinstance(processor, kinds.NoRepeatNGramLogitsProcessor):
            ngram = processor.ngram_size
        elif isinstance(processor, kinds.TemperatureLogitsWarper):
            temperature = float(processor.temperature)
        elif isinstance(processor, tuple(TRUNCATIONS)):
            after.append(processor)
        elif not isinstance(
            processor, kinds.MinLengthLogitsProcessor | kinds.MinNewTokensLengthLogitsProcessor
        ):
            if not mode.rule.left_to_right and (
                several := [list(ids) for ids in biased if len(ids) > 1]
            ):
                raise ValueError(
                    f"sequence_bias holds {several[0]}, of several tokens: all before its last one "
                    "have to be known, so it needs the target 'sequential' with one token a step. "
                    "bad_words_ids, which forbid, work everywhere"
                )
            if not mode.rule.left_to_right and not type(processor).__module__.startswith(
                "transformers."
            ):
                logger.warning_once(
                    f"the logits processor {type(processor).__name__} sees what is known on the "
                    "left of a position, and here some of that comes later: what must hold for "
                    "neighbours needs the target 'sequential', one token a step"
                )
            before.append(processor)
    weight, sample, dispatch = (
        model.lm_head.weight,
        bool(config.do_sample),
        Dispatch(config.kernels),
    )
    # No shortlist with these options: it is made from the scores of one state, and at later states
    # the options may raise or bar other tokens.
    shaped = words or ngram or before or is_constrained
    shortlist = 0
    if mode.drafting and not shaped and type(weight) in (Tensor, nn.Parameter):
        shortlist = mode.drafting.listed(len(weight), sample)
    drawable = LIKELIEST if sample and mode.drafting is not None else 0
    return Picker(
        *(weight, model.config.mask_token_id, temperature, sample, before or None),
        *(
            Bans(tuple(words), ngram) if words or ngram else None,
            after or None,
            tuple(config.eos_ids()),
        ),
        entropy=mode.rule.needs_entropy,
        candidates=max(drawable, shortlist),
        shortlist=shortlist,
        dispatch=dispatch if dispatch.allows("those of the pick", weight) else PYTORCH,
    )
