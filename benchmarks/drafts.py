"""Why drafts are wrong: what was expected at each drafted state, and what the backbone did (``python -m benchmarks.drafts``).

For every state of a round that the backbone scored and from which a follower was drafted (a chain, K = 4) it prints, by
family: how often the token expected at the position that the backbone revealed was right, and which place that position
had in the order that was expected.
"""

import argparse
from collections import Counter

import torch
from mrp_trainer.data import encode
from mrp_trainer.evaluate import NEW_TOKENS
from mrp_trainer.tasks import FAMILIES, Problem, problems
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from modeling_mrp.generate.decode_state import DecodeState, RoundPlan, summary
from modeling_mrp.generate.loop import HeadPasses, Task, begin, decode, decode_round, draft_states
from modeling_mrp.generate.modes import Amount, Drafting, Mode
from modeling_mrp.generate.pace import Fixed
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.drafting import SOURCE, told
from modeling_mrp.rules.revealing import Static, ranks
from modeling_mrp.rules.states import Reveal
from modeling_mrp.runner.runner import Runner

from .common import TINY, emit, greedy_decode, header, load


class Watched:
    """Rounds of a decode that count what became of each expected reveal (a `Step` of `decode`).

    Args:
        task: What is done.
        runner: Runs the model.
        counted: Over all decodes.
    """

    def __init__(self, task: Task, runner: Runner, counted: Counter[str]) -> None:
        self.task, self.runner, self.counted = task, runner, counted

    def __call__(self, state: DecodeState, plan: RoundPlan) -> tuple[DecodeState, list[int], bool]:
        """Draft once to see what is expected, run the round, and compare."""
        successor, mask_id = self.task.successor(state), self.task.mask_token_id
        head = HeadPasses(self.runner, state.held, plan.head_used, plan.late)
        draft = draft_states(self.task, head, state, successor, plan)
        after, accepted = decode_round(self.task, self.runner, state, plan)
        if draft.table is not None:
            for slot in range(draft.valid.shape[1] - 1):  # nothing is drafted from the last
                drafted, valid = draft.slots[:, slot], draft.valid[:, slot]
                actual = Reveal(*(part[:, slot] for part in vars(after.memory.scored.reveal).values()))
                self._compare(drafted, valid, *told(draft.table, drafted), actual)
        return after, summary(after, mask_id, accepted).tolist(), True

    def _compare(self, drafted: Tensor, valid: Tensor, token: Tensor, odds: Tensor, actual: Reveal) -> None:
        block = token.shape[-1]
        candidates = (drafted[:, :block] == self.task.mask_token_id) & (odds > -torch.inf)
        odds, guided = odds.where(candidates, -torch.inf), valid & (drafted[:, SOURCE] >= 0)
        row, column = (actual.where & guided[:, None]).nonzero(as_tuple=True)
        place = ranks(odds, odds > -torch.inf)[row, column]
        right = token[row, column] == actual.token[row, column]
        self.counted["states"] += len(row)
        self.counted["token right"] += int(right.sum())
        self.counted["all right"] += int((right & (place == 0)).sum())
        self.counted["only the order wrong"] += int((right & (place > 0)).sum())
        for n in range(3):
            self.counted[f"position expected in place {n + 1}"] += int((place == n).sum())


@torch.inference_mode()
def watch(model: MRPForCausalLM, tokenizer: PreTrainedTokenizerFast, asked: list[Problem], passes: int) -> Counter[str]:
    """Count over a decode of problems of one family by chains of K = 4, with so many head passes a round."""
    counted: Counter[str] = Counter()
    mode = Mode(Static(), drafting=Drafting(4, 1, passes))
    eos = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    prompts = [encode(problem, tokenizer)[0] for problem in asked]
    task, runner, text, current = greedy_decode(model, mode, prompts, NEW_TOKENS[asked[0].family], eos, 4)
    state = begin(task, runner, text, current, torch.zeros_like(current.start))
    decode(task, runner, state, Fixed(Amount(4, passes)), lambda task, state: Watched(task, runner, counted))
    return counted


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line per family and mode, shares in percent of the states."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--count", type=int, default=96)
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model)
    emit(header("drafts", options, model))
    for family in FAMILIES:
        asked = problems(family, "heldout", options.count)
        for mode, passes in (("self_spec", 0), ("mrp_spec", 3)):
            counted = watch(model, tokenizer, asked, passes)
            states = counted.pop("states")
            shares = {name: round(100 * n / states, 1) for name, n in counted.items()}
            emit({"family": family, "mode": mode, "states": states, **shares})


if __name__ == "__main__":
    main()
