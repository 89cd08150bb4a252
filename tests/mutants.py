"""Small faults put into the engine, one at a time, to see whether the tests find them: `make mutants`.

Each is made in a copy of the package, on which a fast selection of tests runs in a process of its own, up to the first failure.
What survives is printed, and `tests/mutants.json` has the list with what found each, or why it is harmless.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "mutants.json"
SELECTION = (
    *(
        "rules",
        "bans",
        "remask",
        "cache",
        "generate_output",
        "infilling",
        "streaming",
        "fuzz",
        "active_rows",
        "continuation",
        "graphs",
    ),
    *("scores", "generate_options", "syncs", "sampling"),
)
SECONDS = 400  # after which a mutant counts as found: it does not come to an end


@dataclass(frozen=True)
class Mutant:
    """A change of one file, found exactly once; and why it is harmless, where it is."""

    file: str
    old: str
    new: str
    harmless: str = ""


def of(file: str, *changes: tuple[str, ...]) -> list[Mutant]:
    """Several of one file."""
    return [Mutant(file, *change) for change in changes]


MUTANTS = [
    *of(
        "rules/reveal.py",
        ("if odds[column] > most:", "if odds[column] >= most:"),
        ("key=lambda column: -odds[column])", "key=lambda column: odds[column])"),
        ("(step < block_size % steps)", "(step <= block_size % steps)"),
        ("schedule[min(state.step, len(schedule) - 1)]", "schedule[min(state.step + 1, len(schedule) - 1)]"),
        (
            "tuple(sorted(by_odds(state.free, scores.odds)[:quota]))",
            "tuple(sorted(by_odds(state.free, scores.odds)[: quota - 1]))",
        ),
        ("state.free, odds), quota_at(self.schedule, state) - 1", "state.free, odds), quota_at(self.schedule, state)"),
        ("return [(state.free, 1.0)]", "return [(state.free, 0.5)]"),
        (
            "return state.free[: quota_at(self.schedule, state)], memo",
            "return state.free[-quota_at(self.schedule, state) :], memo",
        ),
        ("if odds[column] > threshold or column == best]", "if odds[column] >= threshold or column == best]"),
        ("if odds[column] > threshold or column == best]", "if odds[column] > threshold]"),
        ("                if gap > 0:", "                if gap > 1:"),
        ("chance * math.exp(-doubt)))\n            return guesses", "chance * math.exp(doubt)))\n            return guesses"),
        ("for doubt, column in doubts[: count - 1]:", "for doubt, column in doubts[:count]:"),
        ("guesses.append(((column,), chance * alone[column]))", "guesses.append(((column,), alone[column]))"),
        (
            "total += entropy[column]\n            if not total < self.bound:",
            "total += entropy[column]\n            if not total <= self.bound:",
        ),
        ("ordered[: max(shown, 1)]", "ordered[: max(shown, 2)]"),
        ("chance = EACH_MORE**several *", "chance = EACH_MORE *"),
        ("size = max(room, 1) + (several if more else -several)", "size = max(room, 1) + (-several if more else several)"),
        ("- (1 - p) * log_q + (1 - p) * TAIL_NATS", "- (1 - p) * log_q"),
    ),
    *of(
        "rules/state.py",
        (
            "first = next((at for at in range(limit) if text[at] == mask_id), limit - 1)",
            "first = next((at for at in range(prompt, limit)), limit - 1)",
        ),
        ("if column < end and one in eos:", "if one in eos:"),
        ("if column < end and column not in where])", "if column not in where])"),
        ("state.masks - len(where), state.step + 1)", "state.masks - len(where), state.step)"),
        ("state.masks - len(where), state.step + 1)", "len(free), state.step + 1)"),
        ("room = self.open_end - state.key[0]", "room = self.limit - state.key[0]"),
        ("if state.end == self.block_size < room:", "if state.end == self.block_size <= room:"),
        ("state.free[0] >= room", "state.free[0] > room"),
        (
            "self.logprob[behind + column], self.step[behind + column] = logprob, self.steps",
            "self.logprob[behind + column], self.step[behind + column] = logprob, state.step",
        ),
        ("min(self.limit, start + end + 1)", "min(self.limit, start + end)"),
        ("min(self.limit, start + end + 1)", "start + end + 1"),
    ),
    *of(
        "rules/accept.py",
        ("depth += remembered or (at > 0 and parent < 0)", "depth += at > 0 and parent < 0"),
        ("depth += remembered or (at > 0 and parent < 0)", "depth += remembered or at > 0"),
        ("at = known.get((made.key, -1), -1)", "at = -1"),
        (
            "elif drafts and (before := row.memory.get(made.key)) is not None:",
            "elif False and (before := row.memory.get(made.key)) is not None:",
        ),
        ("        write(row, frontier)\n        state, parent = made, -1", "        state, parent = made, -1"),
        ("            clean.append(at)\n", ""),
        ("    if frontier is None:\n        row.source = None\n", ""),
        (
            "if node.parent < 0 and node.state.masks\n",
            "if node.state.masks\n",
        ),
        ("row.counts.lengths[length] += 1", "row.counts.lengths[length - 1] += 1"),
        ("if math.isnan(logprob):", "if False:"),
        ("row.source, row.memo = frontier.scores, frontier.memo", "row.source = frontier.scores"),
        ("drafted = [node.state for node in nodes[1:] if node.parent < 0]", "drafted = [node.state for node in nodes[1:]]"),
        ("range(min(depth + offered, len(counts.offered_at_depth)))", "range(min(depth, len(counts.offered_at_depth)))"),
        (
            "if state.start != last.start or state.masks >= last.masks:",
            "if state.masks >= last.masks:",
            "states of two blocks agree in all that is shown only where none is: then the later one has not fewer masks",
        ),
        ("all(own == other or other == mask_id for", "any(own == other or other == mask_id for"),
    ),
    *of(
        "rules/bans.py",
        ("for hole in range(len(word)):", "for hole in range(len(word) - 1, len(word)):"),
        ("if 0 <= begin <= len(ids) - len(word) and all(", "if 0 < begin <= len(ids) - len(word) and all("),
        ("for begin in range(max(0, at - size + 1), at + 1)", "for begin in range(max(0, at - size + 1), at)"),
        ("if not other <= at < other + size and all(", "if other + size <= at and all("),
        ("if len(set(whole)) < len(whole):", "if False:"),
        ("if not kept or scores.token[column] not in", "if True or scores.token[column] not in"),
        ("key=lambda column: -scores.odds[column]):", "key=lambda column: scores.odds[column]):"),
        (
            "*row.text[state.start + row.block_size : row.given_end]]",
            "*row.text[state.start + row.block_size : state.start + row.block_size]]",
        ),
    ),
    *of(
        "rules/draft.py",
        ("-(-done * (width - 1) // passes)", "done * (width - 1) // passes"),
        (
            "passes = min(passes, width - 1)",
            "passes = min(passes, width)",
        ),
        ("if not row.state.masks and not narrow:", "if not row.state.masks:"),
        (
            "waiting[behind.key, parent] = (chance, Node(behind, parent, None))",
            "waiting[behind.key, parent] = (1.0, Node(behind, parent, None))",
            "what is taken is the likeliest of all that wait, and its successor no less so: but for exact ties it comes next",
        ),
        ("elif (said := estimates.get(state.key, node.source))", "elif (said := node.source)"),
        ("                if name in taken:\n                    continue\n", ""),
        ("(before[0] + likely * chance, before[1])", "(max(before[0], likely * chance), before[1])"),
        ("waiting[name] = (likely * chance, Node(made, -1, source))", "waiting[name] = (likely, Node(made, -1, source))"),
        ("            if likely > chance:", "            if likely >= chance:"),
        ("source = known[1]\n", "pass\n"),
        ("if chance > 0 and not row.ends(made):", "if chance > 0:"),
        ("-np.logaddexp(0.0, -odds) + gumbel(keys, ids)", "-np.logaddexp(0.0, -odds)"),
        (
            "noise_key(row.seed, state.start + column, state.masks)",
            "noise_key(row.seed, state.start + column, state.masks + 1)",
        ),
    ),
    *of(
        "rules/noise.py",
        ("key = mix_bits(key ^ (seed >> 32 & _MASK))", "key = mix_bits(key)"),
        ("lower = bits < 1 << 31", "lower = bits < 1 << 30"),
    ),
    *of(
        "generate/loop.py",
        ("if (size := self.smaller(len(rows), active)) < len(rows):", "if False:"),
        ("(half := (size + 1) // 2) >= max(active, self.least_rows)", "(half := size // 2) >= max(active, self.least_rows)"),
        ("(half := (size + 1) // 2) >= max(active, self.least_rows)", "(half := (size + 1) // 2) >= active"),
        ("self.networks.widen(max(row.held for row in whole))", "self.networks.widen(0)"),
        ("self.verified += any(node.parent < 0 for nodes in drafts for node in nodes[1:])", "self.verified += 1"),
        ("nodes[min(turn, 1) :] for nodes in grown", "nodes for nodes in grown"),
        ("self.accept(rows, drafts, scores, amount.states > 1)", "self.accept(rows, drafts, scores, True)"),
        ("            if row.stop is None:\n                row.settle()\n", "            row.settle()\n"),
        ("        if any(clean):\n            self.networks.commit(rows, clean)\n", ""),
        ("reveal.row.counts.revoked += len(back)", "reveal.row.counts.revoked += 1"),
        ("        for row in rows:\n            row.remasked = ((), [])\n", ""),
    ),
    *of(
        "generate/refine.py",
        ("            if not after:\n                return\n", ""),
        (
            "reveal.hidden = scores.token[best], scores.odds[best], estimate",
            "reveal.hidden = scores.token[best], scores.odds[best], reveal.hidden",
        ),
        ("best = surest(state.free, scores.odds)", "best = state.free[0]"),
        ("if odds[column] >= self.threshold]", "if odds[column] > self.threshold]"),
        ("if moved[column] <= self.delta]", "if moved[column] < self.delta]", "moves are real numbers: none is exactly delta"),
        ("return tuple(passed) or (surest(reveal.where, believed),)", "return tuple(passed) or reveal.where[:1]"),
        ("if odds[column] != odds[column]:", "if False:"),
        ("if column != best and odds[column] < self.threshold]", "if odds[column] < self.threshold]"),
        ("least = min(doubted,", "least = max(doubted,"),
        ("unsettled = [reveal for reveal in reveals if len(reveal.where) > 1]", "unsettled = list(reveals)"),
        ("if one == best or odds[one] >= self.alone])", "if one == best or odds[one] >= self.threshold])"),
        (
            "best_of = [surest(reveal.where, reveal.odds) for reveal in several]",
            "best_of = [reveal.where[0] for reveal in several]",
        ),
    ),
    *of(
        "networks/networks.py",
        ("row.counts.forwards += row.state.start >= begin and reused[at] < end", "row.counts.forwards += 1"),
        ("self._in_chunks(rows, min(reused), length, forward)", "self._in_chunks(rows, 0, length, forward)"),
        ("self._in_chunks(rows, min(reused), length, forward)", "self._in_chunks(rows, max(reused), length, forward)"),
        ("chunk = max(1, PREFILL_CHUNK // self.block) * self.block", "chunk = PREFILL_CHUNK"),
        (
            "hidden = torch.where(known[..., None], hidden, 0)\n",
            "\n",
            "what is not known yet lies behind a row's text, where no position that counts looks, unless it is NaN",
        ),
        ("row.counts.forwards += bool(nodes)", "row.counts.forwards += 1"),
        ("if row.held - row.head_held > self.block]", "if row.held - row.head_held > 2 * self.block]"),
        ("(at * self.cache.capacity + row.head_held) // self.block", "(at * self.cache.capacity + row.held) // self.block"),
        (
            "packed.append(lead + [(state, len(lead) - 1) for state, _ in states])",
            "packed.append(lead + [(state, -1) for state, _ in states])",
        ),
        ("rows[at].head_held += self.block\n", "pass\n"),
        ("made = made if residual else wide + made", "made = wide + made"),
        ("moves.append((at, self._begin + slot * self.block, row.held))", "moves.append((at, self._begin, row.held))"),
        ("self.cache.move(self.backbone_layers, moves, self.block)", "self.cache.move(self.head_layers, moves, self.block)"),
        ("blocks = self._scored[place * width + (source - self._begin) // self.block]", "blocks = self._scored[place * width]"),
        (
            "rows, width, used = len(packed), max(map(len, packed)), max(held)",
            "rows, width, used = len(packed), max(map(len, packed)), min(held)",
        ),
        (
            "positions = (starts[:, None] + self._offsets).view(rows, -1)",
            "positions = (starts[:, None] + 0 * self._offsets).view(rows, -1)",
        ),
        ("has_parents = max(parents) >= 0", "has_parents = max(parents) > 0"),
        ("self.cache.swap(pairs, max(row.held for row in rows))", "self.cache.swap(pairs, min(row.held for row in rows))"),
        ("for pairs in reversed(self._swaps):", "for pairs in self._swaps:"),
        ("rows[place], rows[other] = rows[other], rows[place]", "rows[place] = rows[other]"),
    ),
    *of(
        "networks/cache.py",
        ("part = part[:, :used]\n", "part = part[:, : used - 1]\n"),
        ("part[at, to] = part[at, of]", "part[at, of] = part[at, to]"),
        (
            "most = min(most, self.held[row], max(self.head_held[row], self.hidden_held[row]) if with_head else most)",
            "most = min(most, self.held[row])",
        ),
        ("found.append(same // block_size * block_size)", "found.append(-(-same // block_size) * block_size)"),
        (
            "if known[at] != text[at]), min(most, len(known)))",
            "if known[at] != text[at]), most)",
            "a text that is held is never longer than what is known of it",
        ),
        ("scratch <= self.scratch and self.writable:", "self.writable:"),
        (
            "capacity, scratch = max(capacity, self.capacity), max(scratch, self.scratch)",
            "capacity = max(capacity, self.capacity)",
        ),
        ("buffer[:, :used].repeat_interleave(copies, 0)", "buffer[:, :used].repeat(copies, *[1] * (buffer.dim() - 1))"),
        ("self.begin, self.end = used, used + width", "self.begin, self.end = used, used + width - 1"),
    ),
    *of(
        "networks/picker.py",
        (
            "if not any(state.start < row.no_eos_before > row.prompt for row, state in self.states):",
            "if not any(state.start < row.no_eos_before > row.prompt + 1 for row, state in self.states):",
        ),
        ("early = [state.start + column < row.no_eos_before for", "early = [state.start + column <= row.no_eos_before for"),
        ("known[parent.start :] = parent.ids", "pass"),
        ("found += [[*known, *state.ids[:column]] for column in state.free]", "found += [[*known] for column in state.free]"),
        (
            "table = [(row.seed, state.start + column, state.masks) for",
            "table = [(row.seed, state.start + column, len(state.free)) for",
        ),
        ("processed.masked_fill(processed.isnan(), -torch.inf)", "processed"),
        ("logits[:, self.mask_token_id] = -torch.inf", "pass"),
        ("least = top.masked_fill(~kept, torch.inf).amin(-1)", "least = top.amin(-1)"),
        ("out |= logits.gather(1, top.indices) < least[:, None]", "pass"),
        ("if not all(TRUNCATIONS.get(type(warper), False) and", "if not all(TRUNCATIONS.get(type(warper), True) and"),
        (
            "entropy = -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)",
            "entropy = -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1) * 1.001",
        ),
        (
            "return replace(self, lm_head_weight=weight, token_ids=token_ids, entropy=False)",
            "return replace(self, lm_head_weight=weight, token_ids=token_ids)",
            "no picker that is restricted is asked for entropies",
        ),
    ),
]


def changed(mutant: Mutant) -> str:
    """Make the change in the text of its file, which has the old text once."""
    text = (ROOT / "modeling_mrp" / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def outcome(mutant: Mutant, folder: Path) -> str:
    """Run the tests on a changed copy, in a process of its own; returns the test that failed, "" where none did."""
    package, report = folder / "modeling_mrp", folder / "report"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "modeling_mrp", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / mutant.file).write_text(changed(mutant), encoding="utf-8")
    if not (child := os.fork()):
        signal.alarm(SECONDS)
        run_tests(folder, report)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "a run without end" if os.WTERMSIG(status) == signal.SIGALRM else "a crash"
    return report.read_text(encoding="utf-8") if report.exists() else "an error before the first test"


def run_tests(folder: Path, report: Path) -> None:
    """Run the selection on the package in a folder, and write down which test failed first."""
    import pytest

    class Note:
        """Notes the first failure."""

        failed = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.failed:
                self.failed = report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not self.failed:
                self.failed = report.nodeid

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(ROOT)
    sys.path[:0] = [str(folder)]
    note = Note()
    files = [f"tests/test_{name}.py" for name in SELECTION]
    slow = "not exact_distribution"
    pytest.main(
        ["-x", "-q", "-k", slow, "-p", "no:cacheprovider", "-o", f"pythonpath={folder} . trainer serving", *files],
        plugins=[note],
    )
    report.write_text(note.failed, encoding="utf-8")


def record(result: dict[str, str]) -> None:
    """Write down what came of a mutant, beside what is known of the others of the list."""
    before = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    known = {(one["file"], one["old"], one["new"]): one for one in (*before, result)}
    listed = [known[name] for one in MUTANTS if (name := (one.file, one.old, one.new)) in known]
    RECORD.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Try all, or those whose file or text an argument names."""
    import torch  # here, so that every child has it already
    import transformers.generation

    torch.set_num_threads(1)
    del transformers
    chosen = [one for one in MUTANTS if not arguments or any(word in one.file + one.old for word in arguments)]
    survivors = 0
    for one in chosen:
        changed(one)
    with tempfile.TemporaryDirectory() as scratch:
        if not arguments and (
            failed := outcome(Mutant(MUTANTS[0].file, MUTANTS[0].old, MUTANTS[0].old), Path(scratch) / "copy")
        ):
            raise SystemExit(f"the tests fail as it is: {failed}")
        for place, mutant in enumerate(chosen, 1):
            found = outcome(mutant, Path(scratch) / "copy")
            record({**asdict(mutant), "found_by": found})
            survives = not found and not mutant.harmless
            survivors += survives
            what = found or ("harmless: " + mutant.harmless if mutant.harmless else "SURVIVES")
            print(f"{place}/{len(chosen)} {mutant.file}: {mutant.old!r} -> {mutant.new!r}: {what}", flush=True)
    print(f"{len(chosen)} mutants, {survivors} of them survive without a reason")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
