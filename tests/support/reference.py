"""A slow and obvious decoder of block-diffusion language models: the yardstick for the fast one, in
text and in counts.

One row, no cache, no packing. A *state* is the whole text so far in whole blocks, the last of them
with or without masks; every step runs all of it through the model. Drafts are made as slowly. x is
the state before a reveal, x' the state after it, h_A the backbone's hidden states at x (MRP, arXiv
2605.18817).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import OPTIONS
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.kernels.pick import gumbel_noise
from modeling_mrp.rules.draft import PREVIEW, noise_key
from modeling_mrp.rules.reveal import RevealRule
from tests.support.reference_rules import Step, chosen_by

State = tuple[int, ...]


# The options of `generate` and their defaults. One stands for all stopping criteria: `stop`, which
# is called with the ids of the prompt and of the tokens up to some position.
DEFAULTS: dict[str, Any] = {
    **{
        option.name: option.default
        for option in OPTIONS
        if option.name not in ("kernels", "graphs")
    },
    **{
        "num_draft_states": 4,
        "draft_next_block": False,
        "draft_branches": 3,
        "draft_shortlist": 0,
        "seed": 0,
        "max_new_tokens": 20,
        "min_new_tokens": 0,
    },
    **{
        "do_sample": False,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "stop": None,
    },
    **{
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "bad_words_ids": None,
        "suppress_tokens": None,
    },
    **{
        "eos_token_id": (),
        "logits_processor": (),
        "sequence_bias": None,
        "remove_invalid_values": False,
    },
    **{"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "renormalize_logits": False},
}


def options_of(given: dict[str, Any]) -> SimpleNamespace:
    """Return all options; those with a class in transformers become `processors` and `warpers`, in
    transformers' order."""
    assert given.keys() <= DEFAULTS.keys(), given.keys() - DEFAULTS.keys()
    options: Any = SimpleNamespace(**{**DEFAULTS, **given})
    options.eos_ids = list(options.eos_token_id or ())
    options.processors = [
        *([hf.SequenceBiasLogitsProcessor(options.sequence_bias)] if options.sequence_bias else []),
        *(
            [hf.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)]
            if options.repetition_penalty != 1
            else []
        ),
        *([hf.InfNanRemoveLogitsProcessor()] if options.remove_invalid_values else []),
        *(
            [hf.SuppressTokensLogitsProcessor(options.suppress_tokens)]
            if options.suppress_tokens
            else []
        ),
        *options.logits_processor,
        *([hf.LogitNormalization()] if options.renormalize_logits else []),
    ]
    warpers: list[Any] = [
        *([hf.TopHLogitsWarper(options.top_h)] if options.top_h else []),
        *([hf.TopKLogitsWarper(options.top_k)] if options.top_k else []),
        *([hf.TopPLogitsWarper(options.top_p)] if options.top_p < 1 else []),
        *([hf.MinPLogitsWarper(options.min_p)] if options.min_p else []),
        *([hf.TypicalLogitsWarper(options.typical_p)] if options.typical_p < 1 else []),
        *([hf.EpsilonLogitsWarper(options.epsilon_cutoff)] if options.epsilon_cutoff else []),
        *([hf.EtaLogitsWarper(options.eta_cutoff)] if options.eta_cutoff else []),
    ]
    options.warpers = warpers if options.do_sample else []
    return options


@dataclass
class Pick:
    """The token picked at one position, and its confidence before truncation (top-k and the like).

    `scores` [vocab] are after processors and temperature; `kept` [vocab] bool marks the tokens that
    truncation leaves.
    """

    position: int
    token: int
    log_odds: float
    logprob: float
    entropy: float
    scores: Tensor
    kept: Tensor


@dataclass
class Said:
    """Predictions at a state: picks by position, and the hidden states [block, hidden_size] that
    they are made from.

    For predictions of the head, `stale` holds the picks of the backbone that the head started from.
    """

    picks: dict[int, Pick]
    hidden: Tensor
    stale: dict[int, Pick] = field(default_factory=dict)


# a drafted state, the predictions that led to it, and whether it opens a new block
Node = tuple[State, Said | None, bool]


class Row:
    """The decode of one prompt, with counts as in `MRPGenerateStats`.

    Attributes:
        tokens, reveal_step, logprobs: By position after the prompt, up to and including the eos
            that ends the text; given tokens have step -1 and log-probability 0.
        revocations: Pairs (index after the prompt, token) of reveals that `mrp_remask` put back to
            masks, in order.
        lengths: By round, the number of states that the path went through.
        depths: By round, the depth to which drafts were offered and the depth to which they were
            accepted.
        verified: By round, whether drafts were scored.
        made, drawn: By position, step and log-probability of the reveal; by position, the scores
            [vocab] it was drawn from.
        step_of: By state, the number of steps since its block was opened.
        past: Steps so far, with the picks that each chose before bans.
    """

    def __init__(
        self, model: MRPForCausalLM, prompt: Sequence[int], infill: Sequence[int], options: Any
    ) -> None:
        assert model.config._attn_implementation == "sdpa", "eager attention takes no boolean mask"
        self.model, self.prompt, self.options = model, list(prompt), options
        self.block, self.mask = model.config.block_size, model.config.mask_token_id
        self.limit = len(prompt) + options.max_new_tokens
        # given tokens, then masks
        self.text = [*prompt, *infill] + [self.mask] * (options.max_new_tokens - len(infill))
        self.given_end = max(
            [i + 1 for i in range(len(prompt), self.limit) if self.text[i] != self.mask], default=0
        )
        self.open_end = max(
            [i + 1 for i in range(self.limit) if self.text[i] == self.mask], default=0
        )
        self.no_eos_before = max(len(prompt) + (options.min_new_tokens or 0), self.given_end)
        self.rule = self.target_rule()
        self.past: list[Step] = []
        self.made: dict[int, tuple[int, float]] = {}
        self.drawn: dict[int, Tensor] = {}
        self.step_of: dict[State, int] = {}
        self.computed: dict[State, Tensor] = {}
        self.known: dict[State, Said] = {}
        # by state and id of a source: source, head's predictions
        self.read: dict[tuple[State, int], tuple[Said, Said]] = {}
        # the next block's first state behind an unfinished one, and the predictions there
        self.preview: tuple[State, Said] | None = None
        self.steps = self.row_forwards = self.row_head_forwards = self.drafted = self.accepted = 0
        self.head_read = 0  # number of positions whose keys and values the head has
        self.asked = len(prompt)  # number of positions that the criterion has seen
        self.stop: int | None = None  # where it ends the text
        self.lengths: list[int] = []
        self.depths: list[tuple[int, int]] = []
        self.verified: list[bool] = []
        self.revocations: list[tuple[int, int]] = []

    def finish(self, state: State) -> "Row":
        """Set tokens, steps and log-probabilities from the final state; return the row."""
        self.ended(state)  # the criterion is also asked about a text that is wholly given
        end = min(self.stop or self.end(state) or self.limit, self.limit)
        begin = len(self.prompt)
        self.tokens = [*state, *self.text[len(state) :]][begin:end]
        self.reveal_step = [self.made.get(i, (-1, 0.0))[0] for i in range(begin, end)]
        self.logprobs = [self.made.get(i, (-1, 0.0))[1] for i in range(begin, end)]
        return self

    # ----------------------------------------------------------------------------------------------
    # states

    def opened(self, state: State) -> State:
        """Append a block of given tokens and masks to a state."""
        begin = len(state)
        behind = self.text[begin : begin + self.block]
        made = (*state, *behind, *[self.mask] * (self.block - len(behind)))
        self.step_of[made] = 0
        return made

    def first(self) -> State:
        """Make the state at which decoding begins: it ends with the block of the first mask."""
        state: State = ()
        while len(state) < self.limit and self.mask not in state:
            state = self.opened(state)
        return state

    def masked(self, state: State) -> list[int]:
        """List the positions of masks; all lie in the last block."""
        return [i for i in range(len(state)) if state[i] == self.mask]

    def end(self, state: State) -> int | None:
        """Return the position after the first eos that ends the text; None if there is none."""
        first = max(len(self.prompt), self.given_end)
        return next(
            (i + 1 for i in range(first, len(state)) if state[i] in self.options.eos_ids), None
        )

    def candidates(self, state: State) -> list[int]:
        """List masked positions before the eos that ends the text, whatever the limit on new
        tokens."""
        end, begin = self.end(state) or len(state), len(state) - self.block
        return [i for i in self.masked(state) if begin <= i < end]

    def whole(self, state: State) -> bool:
        """Tell if every position before the row's end is revealed."""
        end = min(self.end(state) or self.open_end, self.open_end)
        return end <= len(state) and all(i >= end for i in self.masked(state))

    def after(self, state: State, picks: Sequence[Pick]) -> State:
        """Make the state after a reveal of picks."""
        made = list(state)
        for pick in picks:
            made[pick.position] = pick.token
        self.step_of[tuple(made)] = self.step_of[state] + 1
        return tuple(made)

    # ----------------------------------------------------------------------------------------------
    # what is said

    def inputs(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Make ids, block-causal mask and positions of the whole sequence."""
        positions = torch.arange(len(state), device=self.model.device)
        block = positions // self.block
        return (
            torch.tensor([state], device=self.model.device),
            (block <= block[:, None])[None, None],
            positions[None],
        )

    def backbone(self, state: State) -> Tensor:
        """Compute h_A [length, hidden_size] at a state."""
        if state in self.computed:
            return self.computed[state]
        ids, mask, positions = self.inputs(state)
        given = {
            "input_ids": ids,
            "attention_mask": {"full_attention": mask},
            "position_ids": positions,
        }
        hidden: Tensor = self.model.model(**given, use_cache=False).last_hidden_state[0]
        self.computed[state] = hidden
        return hidden

    def head(self, state: State, hidden: Tensor) -> Tensor:
        """Compute the head's residual [block, hidden_size] at a state, given the hidden states of
        its last block."""
        ids, mask, positions = self.inputs(state)
        embeds = self.model.model.embed_tokens(ids)
        # those of clean blocks stay the same
        known = torch.cat([self.backbone(state)[: -self.block], hidden])
        rotary = self.model.model.rotary_emb(embeds, positions)
        residual: Tensor = self.model.mrp_head(embeds, known[None], mask, rotary, None)[
            0, -self.block :
        ]
        return residual

    def scores(self, state: State, hidden: Tensor, positions: Sequence[int]) -> Tensor:
        """Compute logits [n, vocab] over temperature from hidden states [block, hidden_size],
        without mask id and early eos.

        Processors see the state's ids to the left of a position; bans see all known tokens on both
        sides.
        """
        scores = self.model.lm_head(
            hidden[[position - len(state) for position in positions]]
        ).clone()
        scores[:, self.mask] = -torch.inf
        for row, position in zip(scores, positions, strict=True):
            for processor in self.options.processors:
                row[:] = processor(torch.tensor([state[:position]], dtype=torch.long), row[None])[0]
            if position < self.no_eos_before:
                row[self.options.eos_ids] = -torch.inf
            if self.options.no_repeat_ngram_size or self.options.bad_words_ids:
                row[self.barred(state, position)] = -torch.inf
        scores = scores.masked_fill(scores.isnan(), -torch.inf)
        scores[:, self.mask] = -torch.inf
        return scores / self.options.temperature if self.options.do_sample else scores

    def barred(self, state: State, position: int) -> list[int]:
        """List the tokens that would complete a banned sequence at a position, given all known
        tokens of the text."""
        words = [
            word
            for word in self.options.bad_words_ids or []
            if word not in [[eos] for eos in self.options.eos_ids]
        ]
        size, text = (
            self.options.no_repeat_ngram_size,
            [*state, *self.text[len(state) : self.given_end]],
        )
        text[position] = 0

        def through(length: int) -> list[int]:
            """List the starts of spans of `length` known tokens that cover the position."""
            first, last = max(0, position - length + 1), min(position, len(text) - length)
            return [i for i in range(first, last + 1) if self.mask not in text[i : i + length]]

        whole, once = [(word, through(len(word))) for word in words], through(size) if size else []
        found, named = [], {one for word, begins in whole if begins for one in word}
        for token in (named | {*text} if once else named) - {self.mask}:  # others complete nothing
            text[position] = token
            runs = [text[i : i + size] for i in range(len(text) - size + 1)] if once else []
            again = any(runs.count(runs[i]) > 1 for i in once)
            if again or any(
                text[i : i + len(word)] == word for word, begins in whole for i in begins
            ):
                found.append(token)
        return found

    def allowed(self, state: State, picks: list[Pick]) -> list[Pick]:
        """Remove picks that would complete a banned sequence together with surer picks; return the
        others by position."""
        kept: list[Pick] = []
        for pick in most_confident(picks, len(picks)):
            if not kept or pick.token not in self.barred(self.after(state, kept), pick.position):
                kept.append(pick)
        return sorted(kept, key=lambda pick: pick.position)

    def picks(self, state: State, scores: dict[int, tuple[Tensor, Tensor]]) -> dict[int, Pick]:
        """Pick a token at each position from scores [vocab] and kept tokens [vocab] bool; the noise
        of sampling depends on the position and on the number of masks left."""
        if not scores:
            return {}
        made, kept = (torch.stack(part) for part in zip(*scores.values(), strict=True))
        shown = made.masked_fill(~kept, -torch.inf)
        if self.options.do_sample:
            keys = noise_key(
                *torch.tensor([(self.options.seed, at, len(self.masked(state))) for at in scores]).T
            )
            shown = shown + gumbel_noise(keys, made.shape[1], made.dtype)
        token, logp = shown.argmax(-1), made.log_softmax(-1)
        logprob, entropy = (
            logp.gather(1, token[:, None])[:, 0].tolist(),
            torch.special.entr(logp.exp()).sum(-1).tolist(),
        )
        odds = [
            one if some else -torch.inf
            for one, some in zip(log_odds(made, token), kept.any(-1), strict=True)
        ]
        told = zip(scores, token.tolist(), odds, logprob, entropy, made, kept, strict=True)
        return {position: Pick(position, *rest) for position, *rest in told}

    def shortlisted(self, state: State, hidden: Tensor, stale: dict[int, Pick]) -> Said:
        """Predict from the head's hidden states among each candidate's likeliest tokens; others
        keep their stale scores."""
        count, free = self.options.draft_shortlist, self.candidates(state)
        told = {}
        for position, fresh in zip(free, self.scores(state, hidden, free), strict=True):
            before = stale[position]
            few = before.scores.topk(min(count, len(fresh))).indices
            listed = torch.zeros_like(before.kept).index_fill(0, few, True) & before.kept
            told[position] = torch.where(listed, fresh, before.scores), listed
        return Said(self.picks(state, told), hidden, stale)

    def say(self, state: State, hidden: Tensor) -> Said:
        """Predict from hidden states [block, hidden_size] at each candidate."""
        free = self.candidates(state)
        scores = self.scores(state, hidden, free)
        shown = scores
        for warper in self.options.warpers if free else []:
            shown = warper(torch.zeros(len(free), 1, dtype=torch.long), shown)
        return Said(
            self.picks(
                state, dict(zip(free, zip(scores, shown > -torch.inf, strict=True), strict=True))
            ),
            hidden,
        )

    def said(self, state: State) -> Said:
        """Return the backbone's predictions at a state."""
        if state not in self.known:
            self.known[state] = self.say(state, self.backbone(state)[-self.block :])
        return self.known[state]

    # ----------------------------------------------------------------------------------------------
    # targets

    def choose(self, state: State, said: Said, decoding: str) -> list[Pick]:
        """Return the picks that the backbone's step at a state reveals, from left to right."""
        rule = {"mrp_direct": "static", "mrp_remask": "dynamic"}.get(decoding, decoding)
        return chosen_by(rule, self.told(state, said), self.past, self.options)

    def chosen(self, state: State, said: Said, decoding: str) -> list[Pick]:
        """Choose a step's picks, and note the step for later ones; return the picks that bans
        leave."""
        fresh, told = self.choose(state, said, decoding), self.told(state, said)
        told.chosen = fresh
        self.past.append(told)
        return self.allowed(state, fresh)

    def told(self, state: State, said: Said) -> Step:
        """Make the `Step` that a reveal rule sees at a state."""
        return Step(
            len(state) - self.block,
            self.block,
            len(self.masked(state)),
            self.step_of[state],
            [*said.picks.values()],
        )

    def write(self, picks: Sequence[Pick]) -> None:
        """Note a step's reveals, and count the step."""
        self.made |= {pick.position: (self.steps, pick.logprob) for pick in picks}
        self.drawn |= {
            pick.position: pick.scores.masked_fill(~pick.kept, -torch.inf) for pick in picks
        }
        self.steps += 1

    def asks_head(self, state: State) -> None:
        """Count a forward of the head, and another one that reads the text if the head is more than
        a block behind."""
        held = len(state) - self.block
        self.row_head_forwards += 1 + (held - self.head_read > self.block)
        self.head_read = held

    def step(self, state: State, decoding: str) -> list[Pick]:
        """Return the picks that one step of a decode without drafts reveals at a state."""
        said = self.said(state)
        fresh = self.chosen(state, said, decoding)
        if decoding == "mrp_direct":
            fresh = fresh + self.extended_by_head(state, said, fresh)
        elif decoding == "mrp_remask":
            keep = {"reread": self.reread, "threshold": self.believed, "residual": self.unmoved}[
                self.options.remask_rule
            ]
            kept = keep(state, said, fresh)
            behind = len(self.prompt)
            self.revocations += [
                (pick.position - behind, pick.token) for pick in fresh if pick not in kept
            ]
            fresh = kept
        return fresh

    def extended_by_head(self, state: State, said: Said, fresh: list[Pick]) -> list[Pick]:
        """Return one more pick for each step of the head, by the accumulated estimate of the hidden
        states."""
        extra: list[Pick] = []
        hidden = said.hidden
        for _ in range(self.options.mrp_steps):
            shown = self.after(state, fresh + extra)
            if not self.candidates(shown):
                break
            self.asks_head(state)
            hidden = hidden + self.head(shown, hidden)
            extra += most_confident(list(self.say(shown, hidden).picks.values()), 1)
        return extra

    def beliefs(
        self, state: State, said: Said, given: list[Pick], fresh: list[Pick]
    ) -> dict[int, float]:
        """Compute the head's log-odds of the fresh picks, by position, at the state that reveals
        only the given picks."""
        self.asks_head(state)
        hidden = said.hidden + self.head(self.after(state, given), said.hidden)
        positions = [pick.position for pick in fresh]
        scores, token = (
            self.scores(state, hidden, positions),
            torch.tensor([pick.token for pick in fresh]),
        )
        return dict(zip(positions, log_odds(scores, token), strict=True))

    def believed(self, state: State, said: Said, fresh: list[Pick]) -> list[Pick]:
        """Return the fresh picks that the head, shown all of them, still finds at the threshold or
        above; at least one."""
        seen, threshold = (
            self.beliefs(state, said, fresh, fresh),
            logit(self.options.confidence_threshold),
        )
        best = min(fresh, key=lambda pick: (-seen[pick.position], pick.position))
        return [pick for pick in fresh if not seen[pick.position] < threshold] or [best]

    def reread(self, state: State, said: Said, fresh: list[Pick]) -> list[Pick]:
        """Drop the pick that the head, shown all picks that are left, finds least likely, until all
        but the likeliest reach tau; return the surest of these, and those that the head, shown only
        the surest, finds at tau / 2 or above."""
        tau, kept = self.options.confidence_threshold, fresh
        while len(kept) > 1:
            seen = self.beliefs(state, said, kept, fresh)
            _, *others = sorted(kept, key=lambda pick: (-seen[pick.position], pick.position))
            doubted = [pick for pick in others if seen[pick.position] < logit(tau)]
            if not doubted:
                break
            worst = min(doubted, key=lambda pick: (seen[pick.position], pick.position))
            kept = [pick for pick in kept if pick is not worst]
        if len(kept) == 1:
            return kept
        surest = most_confident(kept, 1)
        seen = self.beliefs(state, said, surest, fresh)
        return [pick for pick in kept if pick in surest or not seen[pick.position] < logit(tau / 2)]

    def unmoved(self, state: State, said: Said, fresh: list[Pick]) -> list[Pick]:
        """Return the fresh picks whose own logit the head's residual at x moves by at most delta;
        at least one."""
        self.asks_head(state)
        residual = self.head(state, said.hidden)
        moves = {
            p.position: self.model.lm_head(residual[p.position - len(state)])[p.token].abs().item()
            for p in fresh
        }
        return [
            p for p in fresh if not moves[p.position] > self.options.residual_delta
        ] or most_confident(fresh, 1)

    def decode(self, decoding: str) -> State:
        """Decode without drafts; return the final state. A clean block shares a forward with the
        next, if that has masks."""
        state = self.first()
        self.row_forwards, self.head_read = 1, 0
        # prefill makes a step before `stop` is called
        while not (self.ended(state) if self.steps else self.whole(state)):
            if not self.masked(state):
                state = self.opened(state)
                self.row_forwards += 1
                continue
            self.row_forwards += self.step_of[state] > 0
            fresh = self.step(state, decoding)
            state = self.after(state, fresh)
            self.write(fresh)
        return state

    def ended(self, state: State) -> bool:
        """Tell if the text is whole or ended by the criterion, which is asked about a token once
        all before it are revealed."""
        final = [*state, *self.text[len(state) :]][: min(self.end(state) or self.limit, self.limit)]
        final = final[: final.index(self.mask)] if self.mask in final else final
        while self.stop is None and self.options.stop is not None and self.asked < len(final):
            self.asked += 1
            if self.options.stop(final[: self.asked]):
                self.stop = self.asked
        return self.stop is not None or self.whole(state)

    # ----------------------------------------------------------------------------------------------
    # drafts

    def draft(
        self,
        own: State,
        source: Said | None,
        memory: set[State],
        estimates: dict[State, Said],
        size: int,
    ) -> Any:
        """Draft the states of a round by best-first search, the likeliest first; chances of several
        ways to a state add up."""
        nodes: list[Node] = [(own, source, False)]
        waiting: dict[State, tuple[float, Node]] = {}
        ahead = self.previewed(own)
        if ahead is not None:
            waiting[ahead] = PREVIEW, (ahead, None, True)
        chance = 1.0
        while len(nodes) < size:
            state, told, behind = nodes[-1]
            if state == ahead:
                pass
            elif not self.masked(state):
                if len(state) == len(own) and self.masked(opened := self.opened(state)):
                    guess = None
                    known = self.preview
                    if known and len(known[0]) == len(opened):
                        guess = (
                            known[1] if known[0][-self.block :] == opened[-self.block :] else None
                        )
                    waiting[opened] = (chance, (opened, guess, True))
            else:
                said = told if behind else estimates.get(state, told)
                for made, of, likely in self.followers(own, state, said, memory):
                    if all(made != other for other, _, _ in nodes):
                        before = waiting.get(made, (0.0, (made, of, False)))
                        waiting[made] = before[0] + likely * chance, before[1]
            if not waiting:
                break
            best = max(waiting, key=lambda name: waiting[name][0])
            chance, node = waiting.pop(best)
            nodes.append(node)
        return nodes

    def previewed(self, own: State) -> State | None:
        """Make the state whose predictions drafts of the next block start from: the present block,
        unfinished, and the next one; None if there is no such block."""
        if not self.options.draft_next_block or not self.masked(own) or self.end(own):
            return None
        state = self.opened(own)
        free = [i for i in self.masked(state) if i >= len(own)]
        return state if free and len(own) < self.open_end else None

    def is_preview(self, said: Said) -> bool:
        """Tell if predictions are those of the next block behind an unfinished one, which the head
        does not read."""
        return self.preview is not None and said is self.preview[1]

    def followers(
        self, own: State, state: State, said: Said | None, memory: set[State]
    ) -> Iterator[tuple[State, Said | None, float]]:
        """Yield the states after the rule's likely reveals, each with the predictions that led to
        it and its chance."""
        start, free = len(state) - self.block, self.candidates(state)
        # heard where the order of reveals is known beforehand
        looked, right = self.looked_up(own, state) if self.rule.left_to_right else ({}, 0.0)
        if said is None and not looked:
            return
        picks = (
            {}
            if said is None
            else self.picks(state, {i: (said.picks[i].scores, said.picks[i].kept) for i in free})
        )
        odds = [
            picks[start + c].log_odds if start + c in picks else -torch.inf
            for c in range(self.block)
        ]
        tokens = {i: [(picks[i].token, sigmoid(picks[i].log_odds + 2.0))] for i in picks}
        for i, token in looked.items():
            ranked = dict(tokens.get(i, []))
            ranked[token] = max(right, ranked.get(token, 0.0))
            tokens[i] = sorted(ranked.items(), key=lambda entry: -entry[1])
        named: Any = SimpleNamespace(
            free=tuple([i - start for i in free]), step=self.step_of[state]
        )
        for where, chance in self.rule.likely(
            named, odds if said else [0.0] * self.block, self.options.draft_branches
        ):
            if self.rule.left_to_right and not looked:
                chance *= sigmoid(min(max(odds[where[0]], -30.0), 30.0) + 2.0)
            if all(start + column in tokens for column in where):
                for reveal, share in self.reveals([start + column for column in where], tokens):
                    made, told = self.after(state, reveal), said
                    while made in memory:  # the state after a scored one is known
                        told = self.said(made)
                        made = self.after(made, self.choose(made, told, self.options.target))
                    if chance > 0 and not self.whole(made):
                        yield made, told, chance * share

    def reveals(
        self, where: Sequence[int], tokens: dict[int, list[tuple[int, float]]]
    ) -> Iterator[tuple[list[Any], float]]:
        """Yield reveals of some positions, with shares: of the likeliest tokens, then of another at
        the least sure position."""
        total = {i: sum(chance for _, chance in tokens[i]) for i in where}
        shares = {
            i: tokens[i][0][1] / total[i] if len(tokens[i]) > 1 and total[i] > 0 else 1.0
            for i in where
        }
        share = math.prod(shares[i] for i in where if len(tokens[i]) > 1)
        best = {i: tokens[i][0][0] for i in where}
        yield [SimpleNamespace(position=i, token=token) for i, token in best.items()], share
        unsure = [i for i in where if len(tokens[i]) > 1 and total[i] > 0]
        if unsure:
            least = min(unsure, key=lambda i: shares[i])
            for token, chance in tokens[least][1:]:
                other = {**best, least: token}
                made = [SimpleNamespace(position=i, token=one) for i, one in other.items()]
                yield made, share * (chance / total[least]) / shares[least]

    def looked_up(self, own: State, state: State) -> tuple[dict[int, int], float]:
        """Return by position the tokens behind the last place of the final text that has the tokens
        before the first mask, and the share of the text's own tokens, late ones counting more, that
        a lookup by as many tokens would have got right."""
        final, count, free = (
            own[: len(own) - self.block],
            self.options.prompt_lookup_num_tokens,
            self.candidates(state),
        )
        place = self.last_place(final, state, free[0]) if count and free else None
        if place is None:
            return {}, 0.0
        position, size = place
        right, tried = 0.0, 0.0
        for end in range(1, len(final)):
            place = self.last_place(final[:end], final, end)
            if place is not None and place[1] == size and end >= len(self.prompt):
                right, tried = 0.95 * right + (final[place[0]] == final[end]), 0.95 * tried + 1.0
        looked = {}
        for i, token in zip(range(free[0], len(state)), final[position:][:count], strict=False):
            if token == self.mask or state[i] not in (self.mask, token):
                break
            if i in free:
                looked[i] = token
        return looked, (right + 0.25) / (tried + 1.0)

    def last_place(self, final: State, text: State, end: int) -> tuple[int, int] | None:
        """Find the last position of `final` behind the longest n-gram before `text[end]`; return it
        and the n-gram's size."""
        for size in range(min(self.options.max_matching_ngram_size, end), 0, -1):
            for position in range(len(final) - 1, size - 1, -1):
                if final[position - size : position] == text[end - size : end]:
                    return position, size
        return None

    def target_rule(self) -> RevealRule:
        """Make the target's reveal rule, for its guesses, which `tests/rules/test_rules.py` derives
        by hand."""
        options = {option.name: getattr(self.options, option.name, None) for option in OPTIONS}
        config = MRPGenerationConfig(
            **{**options, "decoding": self.options.target}, eos_token_id=self.options.eos_ids
        )
        config.check(self.block, has_head=True)
        return config.mode(self.block).rule

    def decode_drafted(self, passes: int) -> State:
        """Decode in rounds, and return the final state: draft states, score them all, go on while
        the next state is scored."""
        width = self.options.num_draft_states
        shaped = (
            self.options.processors
            or self.options.bad_words_ids
            or self.options.no_repeat_ngram_size
        )
        few = self.options.draft_shortlist and not shaped
        state, source, memory = self.first(), None, set[State]()
        self.row_forwards = 1
        if self.whole(state):
            return state
        source = self.said(state)  # by prefill
        state = self.revealed(state, source)
        while not self.ended(state):
            estimates: dict[State, Said] = {}
            for turn in range(min(passes, width - 1)):
                size = -(-(turn + 1) * (width - 1) // min(passes, width - 1))
                nodes = self.draft(state, source, memory, estimates, size)[min(turn, 1) :]
                told = [
                    (node, of)
                    for node, of, _ in nodes
                    if of is not None and self.masked(node) and not self.is_preview(of)
                ]
                for node, of in told:
                    # each pass repeats most states of the last one
                    if (node, id(of)) not in self.read:
                        hidden = of.hidden + self.head(node, of.hidden)
                        stale = of.stale or of.picks
                        self.read[node, id(of)] = (
                            of,
                            self.shortlisted(node, hidden, stale)
                            if few
                            else self.say(node, hidden),
                        )
                    estimates[node] = self.read[node, id(of)][1]
                if told:
                    self.asks_head(state)
            nodes = self.draft(state, source, memory, estimates, width)
            self.row_forwards += 1
            scored = {node for node, _, _ in nodes}
            ahead = self.previewed(state)
            length = depth = 0
            while True:
                length += 1
                if not self.masked(state):
                    state, source = self.opened(state), None
                    if state not in scored:
                        break
                    continue
                last, source = state, self.said(state)
                state = self.revealed(state, source)
                if state not in scored and state not in memory:
                    break
                depth += 1
            if ahead is not None and ahead in scored:
                self.preview = ahead, self.said(ahead)
            if source is None:  # after a clean block
                last = state
            self.drafted += sum(not behind for _, _, behind in nodes[1:])
            self.verified.append(any(not behind for _, _, behind in nodes[1:]))
            self.accepted += depth
            self.lengths.append(length)
            offered = any(self.follows(node, last) for node, _, behind in nodes[1:] if not behind)
            self.depths.append((depth + offered, depth))
            # states behind another clean block are not kept
            memory = {
                node
                for node, _, behind in nodes
                if not behind
                and self.masked(node)
                and node[: -self.block] == state[: len(node) - self.block]
            }
        return state

    def follows(self, state: State, last: State) -> bool:
        """Tell if a state is of the same block as `last`, and reveals all that `last` does, and
        more."""
        more = len(state) == len(last) and state != last
        return more and all(b in (a, self.mask) for a, b in zip(state, last, strict=True))

    def revealed(self, state: State, said: Said) -> State:
        """Make the target's step at a state; return the next state."""
        fresh = self.chosen(state, said, self.options.target)
        self.write(fresh)
        return self.after(state, fresh)


def log_odds(scores: Tensor, token: Tensor) -> list[float]:
    """Compute log(p / (1 - p)) of one token per row, without ever computing 1 - p."""
    others = scores.scatter(1, token[:, None], -torch.inf)
    return (scores.gather(1, token[:, None])[:, 0] - others.logsumexp(-1)).tolist()


def sigmoid(odds: float) -> float:
    """Compute a probability from its log-odds."""
    return torch.tensor(odds, dtype=torch.float64).sigmoid().item()


def logit(p: float) -> float:
    """Compute the log-odds of a probability."""
    return torch.tensor(p, dtype=torch.float64).logit().item()


def most_confident(picks: list[Pick], count: int) -> list[Pick]:
    """Return the `count` most confident picks, of equals the leftmost."""
    return sorted(picks, key=lambda pick: (-pick.log_odds, pick.position))[:count]


@torch.no_grad()
def reference_decode(
    model: MRPForCausalLM, prompt: Sequence[int], infill: Sequence[int] = (), **options: Any
) -> Row:
    """Decode one prompt, followed by `infill`: given ids, with the mask id for each token to be
    generated.

    The options are those of `DEFAULTS`.
    """
    row = Row(model, prompt, infill, options_of(options))
    decoding = row.options.decoding
    if decoding not in ("self_spec", "mrp_spec"):
        return row.finish(row.decode(decoding))
    if row.options.num_draft_states == 1:
        return row.finish(row.decode(row.options.target))
    return row.finish(row.decode_drafted(row.options.draft_passes if decoding == "mrp_spec" else 0))
