"""Reinforcement learning on traces: group-relative policy gradient (GRPO, arXiv 2402.03300) on the
synthetic problems.

    python notebooks/policy_gradient.py --output curve.jsonl
    python notebooks/policy_gradient.py --show curve.jsonl

The policy is the embedded checkpoint decoding from left to right, sampled, four tokens a step. The
tokens of a step are drawn without seeing each other, and often do not fit together, so that a
quarter of the problems are solved. Each step draws a group of texts for each of a few problems,
drafted by the head, in a batch that rows join; rewards them; and updates the backbone's weights in
place by `trace_logprobs`, the log-probability of each token at the state where it was revealed.
What is learned is to decide beforehand what fits.

From left to right, the log-probability of a text is exactly the sum of its tokens'. Where a rule
chooses what to reveal by the drawn tokens, as `static` and `dynamic` do, the choice has a
probability, too, which is no part of that sum.

`solved` has the signature of TRL's reward functions, so that those of TRL can take its place.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from mrp_trainer import embedded_checkpoint, trace_logprobs
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import Problem, judge, problems
from mrp_trainer.evaluate.decoded import pad_left, padding_id
from torch import Tensor
from transformers import AutoTokenizer, get_constant_schedule_with_warmup, set_seed

from modeling_mrp import MRPForCausalLM

# TRL's: of prompts, completions and the further columns of the data, a number for each completion
RewardFunction = Callable[..., list[float]]


def solved(
    prompts: Sequence[str], completions: Sequence[str], problem: Sequence[Problem], **columns: Any
) -> list[float]:
    """Reward a right answer by 1, any other by 0."""
    return [float(bool(verdict)) for verdict in judge(problem, completions)]


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Compare each reward [n] with those of its group, `group` neighbours: (r - mean) / std."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantage: Tensor, revealed: Tensor, clip: float
) -> Tensor:
    """Compute GRPO's loss, a mean over revealed tokens: -min(ratio * A, clip(ratio) * A).

    Log-probabilities and `revealed` (bool) are [n, generated], the advantage [n].
    """
    ratio = (logprobs - old_logprobs).exp()
    gain = torch.minimum(
        ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None]
    )
    return -(gain * revealed).sum() / revealed.sum().clamp(min=1)


class Policy:
    """A model with its tokenizer, and the options with which it draws texts."""

    def __init__(self, checkpoint: str, options: dict[str, Any]) -> None:
        self.model: Any = MRPForCausalLM.from_pretrained(checkpoint).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.options = options

    def draw(self, tasks: Sequence[Problem], seed: int) -> tuple[Any, Tensor, list[str]]:
        """Draw a text for each task; return the output of `generate`, the mask of the prompts and
        the texts."""
        prompts = [encode(task, self.tokenizer)[0] for task in tasks]
        inputs = pad_left(prompts, padding_id(self.tokenizer))
        out = self.model.generate(**inputs, **self.options, seed=seed, return_dict_in_generate=True)
        width = inputs["input_ids"].shape[1]
        texts = self.tokenizer.batch_decode(out.sequences[:, width:], skip_special_tokens=True)
        return out, inputs["attention_mask"], texts

    def logprobs(self, out: Any, attention_mask: Tensor, revealed: Tensor) -> Tensor:
        """Compute the log-probabilities of drawn tokens, with gradients, where `revealed` is True;
        all are [n, generated]."""
        return trace_logprobs(
            self.model,
            out.sequences,
            out.reveal_step.masked_fill(~revealed, -1),
            attention_mask,
            self.options["temperature"],
            out.stats.trailing_reveals,
            tokens_per_forward=1024,
        )


def train(policy: Policy, arguments: argparse.Namespace, reward: RewardFunction) -> Iterator[Any]:
    """Update the policy's backbone step by step; yield what is logged of each."""
    policy.model.mrp_head.requires_grad_(False)
    weights = [weight for weight in policy.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=arguments.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = get_constant_schedule_with_warmup(optimizer, arguments.warmup)
    tasks = problems(arguments.family, "train", arguments.steps * arguments.problems, seed=1)
    for step in range(arguments.steps):
        started = time.process_time()
        chosen = tasks[step * arguments.problems : (step + 1) * arguments.problems]
        group = [task for task in chosen for _ in range(arguments.group)]
        out, attention_mask, texts = policy.draw(group, seed=step * len(group))
        drawn = time.process_time()
        prompts = [task.prompt for task in group]
        rewards = torch.tensor(reward(prompts=prompts, completions=texts, problem=group))
        advantage = advantages(rewards, arguments.group)
        # a group of equal rewards teaches nothing, and is not computed
        revealed = (out.reveal_step >= 0) & (advantage != 0)[:, None]
        logprobs = policy.logprobs(out, attention_mask, revealed)
        loss = clipped_loss(logprobs, out.token_logprobs, advantage, revealed, arguments.clip)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        yield {
            "step": step + 1,
            "reward": rewards.mean().item(),
            "tokens_per_step": _tokens_per_step(out),
            "tokens_per_forward": out.tokens_per_forward.mean().item(),
            "largest_gap": _largest_gap(logprobs.detach(), out.token_logprobs, revealed),
            "cpu_seconds_drawing": round(drawn - started, 2),
            "cpu_seconds": round(time.process_time() - started, 2),
        }


def _tokens_per_step(out: Any) -> float:
    """Divide generated tokens by denoising steps: what a step reveals together."""
    revealed = (out.reveal_step >= 0).sum()
    steps = (out.reveal_step.max(1).values + 1).sum()
    return (revealed / steps).item()


def _largest_gap(logprobs: Tensor, drawn: Tensor, revealed: Tensor) -> float:
    """Return the largest difference between log-probabilities here and those of the draw."""
    return ((logprobs - drawn) * revealed).abs().max().item()


def held_out(policy: Policy, arguments: argparse.Namespace, reward: RewardFunction) -> Any:
    """Draw a text for each held-out problem, with the same seeds at each call."""
    tasks = problems(arguments.family, "heldout", arguments.held_out)
    out, _, texts = policy.draw(tasks, seed=1 << 40)
    prompts = [task.prompt for task in tasks]
    rewards = reward(prompts=prompts, completions=texts, problem=tasks)
    return {
        "held_out_reward": sum(rewards) / len(rewards),
        "held_out_tokens_per_step": _tokens_per_step(out),
    }


def curve_table(lines: Sequence[dict[str, Any]], width: int = 20) -> str:
    """Format the means of `width` steps each as a Markdown table; steps that are fewer are left
    out."""
    steps = [line for line in lines if "reward" in line]
    rows = ["| steps | reward | tokens a step | tokens a forward | CPU seconds |"]
    rows.append("|---|---|---|---|---|")
    for begin in range(0, len(steps) - width + 1, width):
        window = steps[begin : begin + width]
        cells = [f"{window[0]['step']} to {window[-1]['step']}"]
        for name in ("reward", "tokens_per_step", "tokens_per_forward"):
            cells.append(f"{fmean(line[name] for line in window):.2f}")
        cells.append(f"{sum(line['cpu_seconds'] for line in window):.0f}")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _lines(policy: Policy, arguments: argparse.Namespace) -> Iterator[Any]:
    yield {"step": 0, **held_out(policy, arguments, solved)}
    yield from train(policy, arguments, solved)
    yield {"step": arguments.steps, **held_out(policy, arguments, solved)}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=embedded_checkpoint())
    parser.add_argument("--family", choices=("math", "code"), default="math")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--problems", type=int, default=8, help="problems per step")
    parser.add_argument("--group", type=int, default=8, help="texts per problem")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--clip", type=float, default=0.2, help="of the ratio, at both sides")
    parser.add_argument("--denoising-steps", type=int, default=4, help="steps per block of 16")
    parser.add_argument("--warmup", type=int, default=10, help="steps until the rate is whole")
    parser.add_argument("--held-out", type=int, default=100, help="problems, before and after")
    parser.add_argument("--output", help="a file for the log, JSON lines")
    parser.add_argument("--show", help="only print such a file, as a Markdown table")
    parser.add_argument("--save", help="a folder for the trained model")
    arguments = parser.parse_args()
    if arguments.show:
        log = Path(arguments.show).read_text(encoding="utf-8")
        print(curve_table([json.loads(line) for line in log.splitlines()]))
        return
    set_seed(0)
    policy = Policy(
        arguments.model,
        {
            "decoding": "mrp_spec",
            "target": "sequential",
            "denoising_steps": arguments.denoising_steps,
            "num_draft_states": 2,
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,  # a truncated draw would have other chances than its log-probabilities
            "max_new_tokens": 64,
            "max_batch_size": 16,
        },
    )
    if arguments.output:
        Path(arguments.output).unlink(missing_ok=True)
    for line in _lines(policy, arguments):
        text = json.dumps(line)
        print(text, flush=True)
        if arguments.output:
            with open(arguments.output, "a", encoding="utf-8") as file:
                file.write(f"{text}\n")
    if arguments.save:
        policy.model.save_pretrained(arguments.save)
        policy.tokenizer.save_pretrained(arguments.save)


if __name__ == "__main__":
    main()
