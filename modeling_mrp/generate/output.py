"""What `generate` returns: texts, and what they cost."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..runner.cache import BlockCache
from ..runner.runner import Runner
from .decode_state import DecodeState, Remasked, Request
from .loop import Decoded
from .options import MRPGenerationConfig


@dataclass
class MRPGenerateStats(ModelOutput):
    """Costs of a `generate` call.

    Attributes:
        forwards: Forwards of the whole batch by role: of the backbone `prefill` (prompts), `verify` (rounds that scored drafts)
            and `denoise` (rounds without), and those of the `head`.
        row_forwards: [rows] long, backbone forwards in which each row took part.
        row_head_forwards: [rows] long, the same for the head.
        slot_forwards: Rows of all backbone forwards added up: those that had ended while the batch went on count until they
            leave it, which they do by halves.
        drafted: [rows] long, drafted states that were submitted.
        accepted: [rows] long, drafted states that were right.
        revoked: [rows] long, reveals that `mrp_remask` took back.
        accepted_lengths: [rows, n] long, how many rounds accepted 0, 1, 2, ... states (the first is never a draft; those that
            were scored in vain a round earlier count).
        offered_at_depth: [rows, n] long, by depth k = 1, 2, ...: rounds in which the backbone came by k - 1 drafts and there
            was a draft that could follow the last of them. No columns in modes without drafts.
        accepted_at_depth: [rows, n] long: of these, rounds in which it came by a k-th. Their ratio is the chance that draft k
            is accepted given that k - 1 were; the sum over k is `accepted`.
        revocations: [n, 3] long: row, column of the generated text (as in `reveal_step`) and token of each reveal that
            `mrp_remask` took back, in order. A column may lie behind the end of the text.
        rounds: [1 + rounds, rows] long by name: what each row had come to behind the prefill and behind each round.
            `row_forwards`, `drafted` and `accepted` as above; `steps`, so many denoising steps, which tell with `reveal_step`
            what each forward revealed; and `column`, where the row's block begins in the generated text (below 0 within the
            prompt).
    """

    forwards: dict[str, int] | None = None
    row_forwards: Tensor | None = None
    row_head_forwards: Tensor | None = None
    slot_forwards: int | None = None
    drafted: Tensor | None = None
    accepted: Tensor | None = None
    revoked: Tensor | None = None
    accepted_lengths: Tensor | None = None
    offered_at_depth: Tensor | None = None
    accepted_at_depth: Tensor | None = None
    revocations: Tensor | None = None
    rounds: dict[str, Tensor] | None = None


@dataclass
class MRPGenerateOutput(ModelOutput):
    """The output of `generate` with `return_dict_in_generate=True`.

    Attributes:
        sequences: [rows, prompt + generated] long, padded with `pad_token_id` behind each row's end.
        tokens_per_forward: [rows] float, generated tokens (not given ones) over the backbone forwards in which the row took
            part.
        reveal_step: [rows, generated] long, the denoising step of the row that committed each token; -1 in padding and at
            tokens given with `infill_ids`.
        token_logprobs: [rows, generated] float32, log-probability of each token when committed; 0 in padding and where given.
        stats: `MRPGenerateStats`.
        past_key_values: The `BlockCache` to go on from in the next call.
    """

    sequences: Tensor | None = None
    tokens_per_forward: Tensor | None = None
    reveal_step: Tensor | None = None
    token_logprobs: Tensor | None = None
    stats: MRPGenerateStats | None = None
    past_key_values: BlockCache | None = None


def pad_id(config: MRPGenerationConfig) -> int:
    """Choose the id that stands behind the end of a text."""
    return config.pad_token_id if config.pad_token_id is not None else next(iter(config.eos_ids()), 0)


def output_of(
    input_ids: Tensor,
    request: Request,
    decoded: Decoded,
    runner: Runner,
    progress: list[tuple[Tensor, list[int]]],
    cache: BlockCache,
    config: MRPGenerationConfig,
) -> Tensor | MRPGenerateOutput:
    """Make what `generate` returns of a decode's last state.

    Args:
        input_ids: [rows, prompt] long, as given.
        request: What was asked for.
        decoded: What the loop came to.
        runner: Whose forwards are counted.
        progress: Of each round what `progress_of` gave, and of which rows.
        cache: The keys and values.
        config: The options.
    """
    state, start = decoded.state, request.prompt_length
    text = state.text
    lengths = text.stop - start
    columns = torch.arange(int(lengths.max()), device=input_ids.device)
    inside = columns < lengths[:, None]
    at = (start[:, None] + columns).clamp(max=text.capacity)
    pad = torch.tensor(pad_id(config), device=at.device)
    sequences = torch.cat([input_ids, text.tokens.gather(1, at).where(inside, pad)], 1)
    if not config.return_dict_in_generate:
        return sequences
    reveal_step = text.reveal_step.gather(1, at).where(inside, torch.tensor(-1, device=at.device))
    counts = {name: count for name, count in vars(state.counts).items() if name != "verified"}
    rounds = dict(zip(_PROGRESS, _of_all_rows(progress).unbind(), strict=True))
    verify, held = int(state.counts.verified), state.held
    forwards = {"prefill": 0, "denoise": 0, "verify": verify, **runner.forwards}
    forwards["denoise"] -= verify
    return MRPGenerateOutput(
        sequences=sequences,
        tokens_per_forward=(reveal_step >= 0).sum(1) / held.row_forwards,
        reveal_step=reveal_step,
        token_logprobs=text.logprob.gather(1, at).where(inside, torch.tensor(0.0, device=at.device)),
        stats=MRPGenerateStats(
            forwards=forwards,
            row_forwards=held.row_forwards,
            row_head_forwards=held.row_head_forwards,
            revocations=_revocations(decoded.remasked, start),
            slot_forwards=len(start) * runner.forwards["prefill"] + decoded.slots,
            rounds={**rounds, "column": rounds["column"] - start},
            **counts,
        ),
        past_key_values=cache,
    )


# What is noted of each round.
_PROGRESS = ("row_forwards", "steps", "drafted", "accepted", "column")


def progress_of(state: DecodeState) -> Tensor:
    """[5, rows] long: what each row has come to, in the order of `_PROGRESS`; `column` counts from the first token."""
    counts = state.counts
    steps, start = state.text.total_steps, state.current.start
    return torch.stack([state.held.row_forwards, steps, counts.drafted, counts.accepted, start])


def _of_all_rows(progress: list[tuple[Tensor, list[int]]]) -> Tensor:
    """[5, 1 + rounds, rows] long: of rows that have left the batch what they had come to."""
    whole = [progress[0][0]]
    for part, rows in progress[1:]:
        whole.append(whole[-1].clone())
        whole[-1][:, rows] = part
    return torch.stack(whole, 1)


def _revocations(remasked: list[Remasked], prompt_length: Tensor) -> Tensor:
    """List row, column of the generated text and token of each remasked reveal, in order: [n, 3] long."""
    if not remasked:
        return prompt_length.new_zeros(0, 3)
    start, where, token = (torch.stack([getattr(part, name) for part in remasked]) for name in ("start", "where", "token"))
    step, row, column = where.nonzero(as_tuple=True)
    return torch.stack([row, start[step, row] + column - prompt_length[row], token[step, row, column]], 1)


__all__ = ["MRPGenerateOutput", "MRPGenerateStats", "output_of", "pad_id", "progress_of"]
