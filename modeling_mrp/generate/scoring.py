"""From hidden states to what is revealed: picks at masked positions, and the reveal rule on them."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.noise import noise_keys
from ..kernels.pick import residual_magnitude
from ..rules.constants import indices
from ..rules.revealing import Candidates, RevealRule, top_by
from ..rules.states import Reveal, States
from .decode_state import Request, Text
from .sampling import Picks, Sampler

# Positions that a kernel takes at once, so that there is nothing to win by their order.
ONE_TILE = 64


@dataclass(frozen=True)
class Reader:
    """Reads tokens and reveals from hidden states.

    Attributes:
        rule: What a step reveals.
        sampler: How tokens are picked.
        drafter: How they are picked for drafts: from the draft vocabulary, if the head has one.
        request: What was asked for.
        mask_token_id: The mask's id.
        seeks: Whether masked positions are sought out first. A device would make the host wait for their number; there all
            positions are taken, the masked ones first, since kernels pass over tiles that hold none.
        bars_eos: Whether some positions take no eos.
    """

    rule: RevealRule
    sampler: Sampler
    drafter: Sampler
    request: Request
    mask_token_id: int
    seeks: bool
    bars_eos: bool

    def reveal(self, states: States, hidden: Tensor, text: Text, count: Tensor | None = None) -> Reveal:
        """Pick tokens at the masked positions of states, and choose what is revealed.

        Args:
            states: [rows, n].
            hidden: [rows, n, block, hidden_size].
            text: The rows' texts, which logits processors are shown.
            count: [rows, n] long: so many of the most confident positions, in place of what the rule says; or None.
        """
        candidates, picks = self._picks(states, hidden, text, self.sampler)
        token, logprob, confidence = picks.token, picks.logprob, picks.confidence
        if count is not None:
            return Reveal(top_by(confidence, candidates, count), token, logprob, confidence)
        quota = self.request.schedule[states.step.clamp(max=len(self.request.schedule) - 1)]
        judged = confidence if picks.judged is None else picks.judged
        entropy = picks.entropy if self.rule.needs_entropy else None
        said = Candidates(candidates, token, judged, entropy, states.ids, states.step, quota)
        return Reveal(self.rule(said), token, logprob, confidence)

    def estimates(self, states: States, hidden: Tensor, text: Text) -> tuple[Tensor, Tensor]:
        """Estimate what the masked positions of states are going to get.

        Returns:
            The likeliest tokens and their log-odds, [rows, n, block, m] each, m = 1 where picks are greedy; -inf where nothing
            may be revealed.
        """
        if not self.drafter.sample:
            _, picks = self._picks(states, hidden, text, self.drafter)
            return picks.token[..., None], picks.confidence[..., None]
        candidates = self._candidates(states)
        at = self._chosen(candidates)
        places = _Places(states, at)
        token, odds = self.drafter.likeliest(
            taken(hidden.flatten(0, 2), at),
            partial(places.contexts, text),
            self._no_eos(places),
            taken(candidates.flatten(), at),
        )
        return _spread(token, at, candidates, 0), _spread(odds, at, candidates, -torch.inf)

    def token_confidence(self, states: States, hidden: Tensor, token: Tensor, where: Tensor, text: Text) -> Tensor:
        """Compute the log-odds of given tokens under lm_head(hidden), [rows, n, block]; -inf outside `where`."""
        at = self._chosen(where)
        places = _Places(states, at)
        odds = self.sampler.token_log_odds(
            taken(hidden.flatten(0, 2), at),
            taken(token.flatten(), at),
            partial(places.contexts, text),
            self._no_eos(places),
            taken(where.flatten(), at),
        )
        return _spread(odds, at, where, -torch.inf)

    def residual_magnitude(self, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """Compute |C| of given tokens [..., block], one dot product each; 0 outside `where`."""
        at = self._chosen(where)
        moved = residual_magnitude(self.sampler.lm_head_weight, taken(hidden.flatten(0, -2), at), taken(token.flatten(), at))
        return _spread(moved, at, where, 0.0)

    def _picks(self, states: States, hidden: Tensor, text: Text, sampler: Sampler) -> tuple[Tensor, Picks]:
        """Pick at the candidates [rows, n, block]; each number of a pick comes as [rows, n, block]."""
        candidates = self._candidates(states)
        at = self._chosen(candidates)
        places = _Places(states, at)
        keys = at
        if sampler.sample:
            masks = states.masked(self.mask_token_id).sum(-1).flatten()[places.state]
            keys = noise_keys(self.request.seed[places.row], places.position, masks)
        picks = sampler(
            taken(hidden.flatten(0, 2), at),
            keys,
            partial(places.contexts, text),
            self._no_eos(places),
            taken(candidates.flatten(), at),
        )
        token = _spread(picks.token, at, candidates, 0, sampler.blanks)
        logprob, confidence = (
            _spread(t, at, candidates, -torch.inf, sampler.blanks) for t in (picks.logprob, picks.confidence)
        )
        entropy = _spread(picks.entropy, at, candidates, -torch.inf) if self.rule.needs_entropy else picks.entropy
        judged = None if picks.judged is None else _spread(picks.judged, at, candidates, -torch.inf)
        return candidates, Picks(token, logprob, confidence, entropy, judged)

    def _candidates(self, states: States) -> Tensor:
        """[rows, n, block] bool: masked positions that are not behind an eos, of valid states."""
        offsets = indices(states.ids.shape[-1], states.ids.device)
        return states.masked(self.mask_token_id) & (offsets < states.end[..., None]) & states.valid[..., None]

    def _no_eos(self, places: "_Places") -> Tensor | None:
        """[n] bool: positions before the minimum length, or before the last given token."""
        return places.position < self.request.no_eos_before[places.row] if self.bars_eos else None

    def _chosen(self, where: Tensor) -> Tensor:
        """Flat indices of `where`; of everything, those of `where` first, where positions are not sought out."""
        if self.seeks or self.sampler.processors is not None:
            return where.flatten().nonzero()[:, 0]
        if where.numel() <= ONE_TILE:
            return indices(where.numel(), where.device)
        return (~where).flatten().to(torch.int8).sort(stable=True).indices


def unscored_error(reader: Reader, model: Any, text: Text) -> ValueError:
    """Say where a text has a token without a log-probability, and why no token has a finite score there."""
    row, position = (int(number) for number in text.logprob[:, :-1].isnan().nonzero()[0])
    request, sampler = reader.request, reader.sampler
    weights = model.named_parameters() if isinstance(model, nn.Module) else ()
    if (broken := next((name for name, weight in weights if not _is_finite(weight)), None)) is not None:
        why = f"the weights {broken} are NaN or infinite. Load or train them again"
    elif sampler.processors:
        names = ", ".join(dict.fromkeys(type(processor).__name__ for processor in sampler.processors))
        why = f"so say the logits processors ({names}), for which -inf and NaN bar a token. Leave one a finite score"
    elif position < int(request.no_eos_before[row]) and len(request.eos):
        why = (
            "every eos_token_id is barred before min_new_tokens, min_length and given tokens. Leave some id out of eos_token_id"
        )
    else:
        why = f"the weights are finite, so {sampler.lm_head_weight.dtype} overflows, here or divided by temperature="
        why += f"{sampler.temperature}. Load the model in a wider dtype"
    prompt, asked = int(request.prompt_length[row]), int(request.row[row])
    return ValueError(
        f"row {asked} has no token with a finite score at position {position}, {position - prompt} behind its prompt: {why}"
    )


def _is_finite(weight: Tensor) -> bool:
    if type(weight).dequantize is not Tensor.dequantize:  # of a class of its own, which need not know aminmax
        weight = weight.dequantize()
    return weight.is_meta or not weight.numel() or bool(torch.stack(torch.aminmax(weight.detach())).isfinite().all())


def in_order(at: Tensor, count: int) -> bool:
    """Tell whether indices are all `count` places as they lie; those of more than a tile are sorted."""
    return len(at) == count <= ONE_TILE


def taken(values: Tensor, at: Tensor) -> Tensor:
    """`values[at]`."""
    return values if in_order(at, len(values)) else values[at]


def _spread(values: Tensor, at: Tensor, where: Tensor, other: float, blank: bool = False) -> Tensor:
    """Spread values [n, ...] at flat indices `at` over the shape of `where`, and `other` where that is False.

    `blank`: they are so there already.
    """
    more = values.shape[1:]
    if not in_order(at, where.numel()):
        values = values.new_full((where.numel(), *more), other).index_copy_(0, at, values)
    values = values.view(*where.shape, *more)
    return values if blank else values.where(where.view(*where.shape, *(1 for _ in more)), other)


@dataclass(frozen=True)
class _Places:
    """Places that flat indices `at` [n] over the positions of states [rows, n] stand for."""

    states: States
    at: Tensor

    @cached_property
    def state(self) -> Tensor:
        """[n] long, flat over rows and states."""
        return self.at // self.states.ids.shape[-1]

    @cached_property
    def row(self) -> Tensor:
        """[n] long."""
        return self.state // self.states.start.shape[1]

    @cached_property
    def position(self) -> Tensor:
        """[n] long, absolute."""
        return self.states.start.flatten()[self.state] + self.at % self.states.ids.shape[-1]

    def contexts(self, text: Text, part: slice) -> list[tuple[Tensor, Tensor]]:
        """For logits processors: which of some of the places belong to which committed ids."""
        contexts, (states, state) = [], (self.states, self.state[part])
        block = states.ids.shape[-1]
        for each in state.unique().tolist():
            row, slot = divmod(each, states.start.shape[1])
            start, parent = int(states.start[row, slot]), int(states.parent[row, slot])
            committed = text.tokens[row : row + 1, :start].clone()
            if parent >= 0:  # a clean block that is not text yet
                committed[:, start - block :] = states.ids[row, parent]
            contexts.append(((state == each).nonzero()[:, 0], committed))
        return contexts


__all__ = ["ONE_TILE", "Reader", "in_order", "taken", "unscored_error"]
