"""Log-probabilities, with gradients, of texts that `generate` decoded, as a policy gradient needs
them. Each token is scored at the state in which it was revealed.

A state is a block in which the tokens of earlier denoising steps are shown and all others are
masked. The states of a text are noisy copies of its blocks, so they are packed like training
passes, [states | clean text], with the same attention rule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from modeling_mrp.generate.options import check_ids, check_rows
from modeling_mrp.model.diffusion import taken_from
from modeling_mrp.modeling import MRPForCausalLM

from .attention import attention_implementation, training_attention
from .inputs import bare_model
from .losses import over_vocabulary
from .objectives import packed_masks
from .packed import CLEAN_VIEW, PackedBatch

_NEVER = torch.iinfo(torch.long).max  # the step of a position that was never revealed
_GIVEN = -1  # the step of a token that was given, as in `reveal_step`


def trace_logprobs(
    model: Any,
    input_ids: Tensor,
    reveal_step: Tensor,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    trailing_reveals: Tensor | None = None,
    tokens_per_forward: int = 2048,
) -> Tensor:
    """Compute the log-probability of each generated token at the state in which it was revealed.

    For texts that `generate` made under any target, with or without drafts, the result equals its
    `token_logprobs`, but has gradients. The distribution is that of the backbone, with temperature,
    before truncation. Whatever bars tokens in decoding (logits processors, minimum lengths and
    infills) is not applied. In `mrp_direct` and `mrp_remask` the head also reveals and re-masks
    tokens; this is not included. Memory is that of a training pass over `tokens_per_forward`
    tokens. If there are several passes, each is computed again in the backward pass.

    Args:
        model: An `MRPForCausalLM`, bare or in a peft model; in eval mode, unless it has no dropout.
        input_ids: int64 [rows, prompt + generated], the `sequences` of `generate`.
        reveal_step: int64 [rows, generated], as `generate` returned it. It is -1 at tokens that are
            not scored, because they were given or are padding.
        attention_mask: [rows, prompt], the mask of the prompts, or [rows, prompt + generated]; 1
            for real tokens. None if no prompt has padding. If the mask does not cover generated
            columns, a row ends with its last revealed token.
        temperature: Divides the logits. It is the temperature of decoding if tokens were sampled,
            and 1 if not.
        trailing_reveals: int64 [n, 4], the `stats.trailing_reveals` of `generate`: the row, column,
            token and step of each token that was revealed beyond the end of a text. States before
            the text's last reveal may show such tokens. If None, these states show masks there.
        tokens_per_forward: The largest number of tokens in one forward, which counts states and
            clean texts. A forward always holds at least one state and the text before it.

    Returns:
        [rows, generated] in at least float32; 0 at tokens that are not scored.

    Raises:
        ValueError: if the arguments do not fit each other or the model.
    """
    bare = bare_model(model)
    if not isinstance(temperature, int | float) or not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature!r}: it must be a finite number above 0")
    if not isinstance(tokens_per_forward, int) or tokens_per_forward < 1:
        raise ValueError(
            f"tokens_per_forward is {tokens_per_forward!r}: it must be an int of 1 or more"
        )
    texts = _texts_of(bare, input_ids, reveal_step, attention_mask, trailing_reveals)
    weight = bare.lm_head.weight
    passes = list(_passes(texts, bare.config.block_size, tokens_per_forward))
    logprobs = weight.new_zeros(
        reveal_step.shape, dtype=torch.promote_types(weight.dtype, torch.float32)
    )
    if not passes:  # with an autograd graph, so that a loss computed from it has a backward pass
        trained = next((each for each in bare.parameters() if each.requires_grad), weight)
        return logprobs + 0 * trained.sum()
    hidden = []
    for states in passes:
        batch = _packed(states, texts, bare.config, weight.device)
        if len(passes) > 1 and torch.is_grad_enabled():
            hidden.append(checkpoint(_hidden_at_reveals, bare, batch, use_reentrant=False))
        else:
            hidden.append(_hidden_at_reveals(bare, batch))
    rows: list[int] = []
    columns: list[int] = []
    tokens: list[int] = []
    for state in chain.from_iterable(passes):
        text = texts[state.row]
        for position in state.positions:
            rows.append(state.row)
            columns.append(position - text.prompt)
            tokens.append(int(text.ids[position]))
    index = torch.tensor([rows, columns], device=weight.device)
    target = torch.tensor(tokens, device=weight.device)
    mask_id = torch.tensor([bare.config.mask_token_id], device=weight.device)

    def token_logprob(logits: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        scores = (logits / temperature).index_fill(1, mask_id, -torch.inf).log_softmax(-1)
        return scores.gather(1, token[:, None]), logits.new_zeros(len(logits), 0)

    values, _ = over_vocabulary(token_logprob, torch.cat(hidden), weight, target)
    return logprobs.index_put(tuple(index), values[:, 0])


@dataclass(frozen=True)
class _Text:
    """A text, padded to whole blocks.

    Attributes:
        ids: int64 [tokens], the tokens at the end of decoding, and masks where nothing was
            revealed.
        steps: int64 [tokens], the step that revealed each token, or `_GIVEN` or `_NEVER`.
        scored: bool [tokens], True at tokens whose log-probability is requested.
        prompt: Number of tokens of the prompt.
    """

    ids: Tensor
    steps: Tensor
    scored: Tensor
    prompt: int


@dataclass(frozen=True)
class _State:
    """The state of one block of a text before a denoising step.

    Attributes:
        row: Index of the text.
        block: Index of the block in the text.
        step: The number of the step; tokens of earlier steps are shown.
        view: The number of this state among the states of its block, counted from 1.
        positions: Positions of the tokens to score: those that the step revealed.
    """

    row: int
    block: int
    step: int
    view: int
    positions: list[int] = field(default_factory=list)


def _texts_of(
    model: MRPForCausalLM,
    input_ids: Tensor,
    reveal_step: Tensor,
    attention_mask: Tensor | None,
    trailing_reveals: Tensor | None,
) -> list[_Text]:
    """Check the arguments of `trace_logprobs`, and return the texts that they describe, on the
    CPU."""
    config = model.config
    if (
        not isinstance(reveal_step, Tensor)
        or reveal_step.dim() != 2
        or reveal_step.is_floating_point()
        or not isinstance(input_ids, Tensor)
        or input_ids.dim() != 2
        or len(reveal_step) != len(input_ids)
        or reveal_step.shape[1] >= input_ids.shape[1]
    ):
        raise ValueError(
            f"reveal_step is {_described(reveal_step)} for input_ids of {_described(input_ids)}: "
            "pass reveal_step and sequences of one output of generate"
        )
    width = input_ids.shape[1] - reveal_step.shape[1]
    steps = reveal_step.cpu()
    revealed = steps >= 0
    # a row ends with its last revealed token
    in_text = revealed.flip(1).cumsum(1).flip(1) > 0
    real = torch.cat([torch.ones(len(steps), width, dtype=torch.bool), in_text], 1)
    if isinstance(attention_mask, Tensor) and attention_mask.shape == (len(steps), width):
        real[:, :width] = attention_mask.bool().cpu()
    elif attention_mask is not None:
        check_ids(input_ids, attention_mask, config)
        real = attention_mask.bool().cpu()
        if bool((revealed & ~real[:, width:]).any()):
            raise ValueError(
                "attention_mask is 0 at tokens that reveal_step says were generated: pass that of "
                "the prompts, or of the whole texts"
            )
        if bool((real[:, width + 1 :] & ~real[:, width:-1]).any()):
            raise ValueError(
                "attention_mask has holes in generated columns: tokens must be contiguous there"
            )
    check_ids(input_ids, real.to(input_ids.device), config)
    check_rows(real[:, :width], reveal_step.shape[1], config.max_position_embeddings)
    ids = input_ids.cpu().long()
    beyond: list[list[tuple[int, int, int]]] = [[] for _ in ids]
    if trailing_reveals is not None:
        if not isinstance(trailing_reveals, Tensor) or trailing_reveals.shape[1:] != (4,):
            raise ValueError(
                f"trailing_reveals is {_described(trailing_reveals)}: pass "
                "stats.trailing_reveals of generate, [n, 4]"
            )
        for row, column, token, step in trailing_reveals.tolist():
            if not 0 <= row < len(ids):
                raise ValueError(
                    f"trailing_reveals names row {row} of {len(ids)}: pass those of this output"
                )
            beyond[row].append((column, token, step))
    texts = []
    for row, row_real in enumerate(real):
        prompt = int(row_real[:width].sum())
        length = int(row_real.sum())
        size = length + -length % config.block_size
        text_ids = torch.full((size,), config.mask_token_id)
        text_steps = torch.full((size,), _NEVER)
        text_ids[:length] = ids[row, row_real]
        text_steps[:prompt] = _GIVEN
        text_steps[prompt:length] = steps[row, row_real[width:]]
        scored = (text_steps >= 0) & (text_steps < _NEVER)
        for column, token, step in beyond[row]:
            if length <= prompt + column < size:
                text_ids[prompt + column] = token
                text_steps[prompt + column] = step
        texts.append(_Text(text_ids, text_steps, scored, prompt))
    return texts


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _states_of(texts: Sequence[_Text], block_size: int) -> Iterator[_State]:
    """Yield the states in which scored tokens were revealed, in order of text, block and step."""
    for row, text in enumerate(texts):
        by_step: dict[tuple[int, int], list[int]] = {}
        for position in text.scored.nonzero()[:, 0].tolist():
            key = (position // block_size, int(text.steps[position]))
            by_step.setdefault(key, []).append(position)
        views: dict[int, int] = {}
        for (block, step), positions in sorted(by_step.items()):
            views[block] = views.get(block, 0) + 1
            yield _State(row, block, step, views[block], positions)


def _passes(texts: Sequence[_Text], block_size: int, limit: int) -> Iterator[list[_State]]:
    """Divide the states of texts into passes of at most `limit` tokens, which include the clean
    texts before the states. A pass holds at least one state."""
    states: list[_State] = []
    clean: dict[int, int] = {}
    for state in _states_of(texts, block_size):
        needed = {**clean, state.row: _clean_length(state, block_size)}
        if states and (len(states) + 1) * block_size + sum(needed.values()) > limit:
            yield states
            states = []
            needed = {state.row: needed[state.row]}
        states.append(state)
        clean = needed
    if states:
        yield states


def _clean_length(state: _State, block_size: int) -> int:
    """Return the number of tokens in the blocks before a state; the state attends to them. For a
    state of the first block, return the length of one block, which the state does not see."""
    return max(1, state.block) * block_size


def _packed(
    states: Sequence[_State], texts: Sequence[_Text], config: Any, device: torch.device
) -> PackedBatch:
    """Pack states, and the clean texts before them, into one row. Tokens to score have weight 1.
    Their columns have the same order as `positions` of the states."""
    size = config.block_size
    columns: dict[str, list[Tensor]] = {
        name: [] for name in ("input_ids", "position_ids", "view", "sample", "weight")
    }
    clean: dict[int, int] = {}

    def add(ids: Tensor, start: int, view: int, sample: int, weight: Tensor) -> None:
        columns["input_ids"].append(ids)
        columns["position_ids"].append(torch.arange(start, start + len(ids)))
        columns["view"].append(torch.full_like(ids, view))
        columns["sample"].append(torch.full_like(ids, sample))
        columns["weight"].append(weight.float())

    for state in states:
        text = texts[state.row]
        block = slice(state.block * size, (state.block + 1) * size)
        steps = text.steps[block]
        ids = text.ids[block].masked_fill(steps >= state.step, config.mask_token_id)
        add(ids, block.start, state.view, state.row, (steps == state.step) & text.scored[block])
        clean[state.row] = _clean_length(state, size)
    for row, length in clean.items():
        add(texts[row].ids[:length], 0, CLEAN_VIEW, row, torch.zeros(length))
    tensors = {}
    for name, segments in columns.items():
        tensors[name] = torch.cat(segments)[None].to(device)
    ids = tensors["input_ids"]
    return PackedBatch(
        **tensors,
        block=tensors["position_ids"] // size,
        target_ids=ids,
        response_tokens=tensors["weight"].sum().long(),
        noise_key=torch.zeros_like(ids),
    )


def _hidden_at_reveals(model: MRPForCausalLM, batch: PackedBatch) -> Tensor:
    """Compute the hidden states, [n, hidden_size], that predict the tokens to score."""
    device = batch.input_ids.device
    choice = "auto" if device.type == "cpu" else model.config._attn_implementation
    # set here, since gradient checkpointing also calls this in the backward pass
    with attention_implementation(model, training_attention(model, choice, device)):
        hidden = model.backbone(batch.input_ids, batch.position_ids, packed_masks(model, batch)[0])
    if model.model.shifted:
        hidden = taken_from(hidden, batch.before())
    return hidden[batch.supervised]
