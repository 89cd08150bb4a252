"""Count what languages cost and give: texts that are of their language, drafts that change none,
forwards and host time.

    python -m benchmarks.constrained valid --texts 5000
    python -m benchmarks.constrained tables --count 50
    python -m benchmarks.constrained compile
    python -m benchmarks.constrained schemas jsonschema-4.26.0/json/tests/draft2020-12

`valid` decodes batches whose rows have languages of their own under every target, greedy and
sampled, by models of random weights (blocks of 4 to 32) and by the embedded checkpoint, in float64,
undrafted and drafted. `tables` decodes held-out problems of the embedded checkpoint, one at a time,
greedy, in float64: the problems' own answers with a pattern of their form, and JSON about them.
`compile` makes automata over a vocabulary of 151,936 tokens, of words of Python's library.
`schemas` compiles the schemas of the JSON Schema test suite, which is in the source of the package
jsonschema (`pip download --no-binary jsonschema --no-deps jsonschema`), and tries their texts.
"""

import json
import os
import random
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from cProfile import Profile
from pathlib import Path
from pstats import Stats
from time import process_time
from typing import Any

import torch
from jsonschema import Draft202012Validator
from mrp_trainer.evaluate.problem_sets import ProblemSet, family_set

from modeling_mrp import MRPForCausalLM
from modeling_mrp.constraints.automaton import ByteAutomaton, TokenTrie, token_automaton
from modeling_mrp.constraints.block import AutomatonConstraint
from modeling_mrp.constraints.patterns import byte_automaton
from modeling_mrp.constraints.schema import schema_pattern
from modeling_mrp.generate.option_table import TARGETS
from tests.support.languages import EOS, by_row, random_languages, text_of
from tests.support.random_cases import batch_of, dampened, make_model

from .common import TINY, deciding, load, parser_of

ROWS = 16
MATH = "[^\n]+\n([a-z_]+ = [^=\n]+ = -?[0-9]+\n)+#### -?[0-9]+"
CODE = "def [a-z_]+\\([a-z_]+\\):\n(    [^\n]+\n)*    return [^\n]+"
EXTRACTION = {
    "type": "object",
    "properties": {
        "person": {"type": "string", "pattern": "[A-Z][a-z]{1,9}"},
        "things": {"type": "string", "pattern": "[a-z]{2,9}"},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
        "is_question": {"type": "boolean"},
    },
    "required": ["person", "things", "numbers", "is_question"],
}
TOOL_CALL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["count_things", "list_people", "ask"]},
        "arguments": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "pattern": "[a-z ]{1,20}"},
                "limit": {"type": "integer"},
                "order": {"enum": ["ascending", "descending"]},
            },
            "required": ["query", "limit", "order"],
        },
    },
    "required": ["name", "arguments"],
}
LANGUAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "math": ("math", {"regex": MATH}),
    "code": ("code", {"regex": CODE}),
    "extraction": ("math", {"json_schema": EXTRACTION}),
    "tool call": ("code", {"json_schema": TOOL_CALL}),
}
# What rows, drafts and picks do for a constraint; none of these calls another.
HOST = {("state.py", "allowed"), ("state.py", "filled"), ("draft.py", "possible_columns")}
HOST |= {("masks.py", "bar")}


def decode_batch(model: MRPForCausalLM, rng: random.Random, target: str) -> Counter[str]:
    """Decode a batch of random prompts, undrafted and drafted; count its texts, those that are not
    of their language, and those that drafts change."""
    embedded = model.config.vocab_size > 64
    cases = random_languages(rng, ROWS)
    prompts = []
    for _ in range(ROWS):
        prompts.append([rng.randint(4, 59) for _ in range(rng.randint(1, 20))])
    inputs = batch_of(prompts, rng.choice(("left", "right")))
    options: dict[str, Any] = {**inputs, **by_row(cases), "max_new_tokens": rng.randint(20, 48)}
    options["eos_token_id"] = EOS
    if embedded:
        options |= {
            "tokenizer": tokenizer_of(),
            "eos_token_id": model.generation_config.eos_token_id,
        }
    if rng.random() < 0.5:
        options |= {"do_sample": True, "seed": rng.randrange(1 << 20)}
        options |= rng.choice(({}, {"top_k": 9}, {"top_p": 0.9}, {"temperature": 1.7}))
    undrafted: Any = model.generate(decoding=target, **options)
    drafted: Any = model.generate(
        decoding=rng.choice(("self_spec", "mrp_spec")),
        target=target,
        num_draft_states=rng.randint(2, 9),
        **options,
    )
    counts = Counter(texts=0, invalid=0, changed=0)
    for index, case in enumerate(cases):
        if case is None:
            continue
        new = undrafted[index, inputs["input_ids"].shape[1] :].tolist()
        text = tokenizer_of().decode(new, skip_special_tokens=True) if embedded else text_of(new)
        counts["texts"] += 1
        counts["invalid"] += not case.holds(text)
        counts["changed"] += not drafted[index].equal(undrafted[index])
    return counts


_TOKENIZERS: list[Any] = []


def tokenizer_of() -> Any:
    """Return the embedded checkpoint's tokenizer."""
    return _TOKENIZERS[0]


def print_valid(options: Namespace) -> None:
    """Print the table of `valid`."""
    rng = random.Random(options.seed)
    tiny, tokenizer = load(TINY)
    _TOKENIZERS.append(tokenizer)
    models = {f"random, blocks of {size}": size for size in (4, 8, 16, 32)}
    total: Counter[str] = Counter()
    print(
        "| model | texts | of their language | changed by drafts |", "|---|---|---|---|", sep="\n"
    )
    for name, size in [*models.items(), ("embedded", 0)]:
        counts: Counter[str] = Counter()
        while counts["texts"] < options.texts / (len(models) + 1):
            if size:
                model = dampened(
                    make_model(rng.randrange(999), block_size=size), rng.choice((1, 0.3))
                )
            else:
                model = tiny.double()
            for target in TARGETS:
                counts += decode_batch(model, rng, target)
        valid = counts["texts"] - counts["invalid"]
        print(f"| {name} | {counts['texts']} | {valid} | {counts['changed']} |", flush=True)
        total += counts
    valid = total["texts"] - total["invalid"]
    print(f"| all | {total['texts']} | {valid} | {total['changed']} |")


def decode_problems(
    model: MRPForCausalLM, problems: ProblemSet, tokenizer: Any, **options: Any
) -> tuple[Counter[str], list[str], float]:
    """Decode problems one at a time; return sums of counts, texts, and host microseconds of the
    constraint a round."""
    counts: Counter[str] = Counter()
    texts = []
    profile = Profile(process_time)
    for prompt in problems.prompts:
        ids = torch.tensor([prompt])
        profile.enable()
        out: Any = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=problems.max_new_tokens,
            tokenizer=tokenizer,
            return_dict_in_generate=True,
            **options,
        )
        profile.disable()
        counts["tokens"] += int((out.reveal_step >= 0).sum())
        counts["forwards"] += int(out.stats.row_forwards.sum())
        counts["filled"] += int(out.stats.filled.sum())
        texts.append(tokenizer.decode(out.sequences[0, len(prompt) :], skip_special_tokens=True))
    seconds = 0.0
    collected: dict[Any, Any] = vars(Stats(profile))["stats"]
    for (file, _, function), (_, _, _, cumulative, _) in collected.items():
        if (Path(file).name, function) in HOST:
            seconds += cumulative
    return counts, texts, 1e6 * seconds / counts["forwards"]


def print_tables(options: Namespace) -> None:
    """Print the tables of `tables`."""
    model, tokenizer = load(TINY)
    model.double()
    print(f"deciding code {deciding()}, {options.count} problems\n")
    columns = "language | target | K | solved, % | free | held | filled, % | us a round"
    print(f"| {columns} |", "|" + "---|" * 8, sep="\n")
    for name, (family, language) in LANGUAGES.items():
        problems = family_set(family, "heldout", tokenizer, options.count)  # type: ignore[arg-type]
        for target in ("sequential", "static", "dynamic", "entropy_bound"):
            held_texts: list[list[str]] = []
            for states in (1, 8):
                mode: dict[str, Any] = {"decoding": target}
                if states > 1:
                    mode = {"decoding": "mrp_spec", "target": target, "num_draft_states": states}
                free, texts, _ = decode_problems(model, problems, tokenizer, **mode)
                constrained, texts_held, micros = decode_problems(
                    model, problems, tokenizer, **mode, **language
                )
                held_texts.append(texts_held)
                fields = [name, f"`{target}`", str(states)]
                if "regex" in language:
                    fields.append(
                        f"{solved(problems, texts):.0f}, {solved(problems, texts_held):.0f}"
                    )
                else:
                    fields.append("")
                for counts in (free, constrained):
                    fields.append(f"{counts['forwards'] / counts['tokens']:.3f}")
                fields.append(f"{100 * constrained['filled'] / constrained['tokens']:.0f}")
                fields.append(f"{micros:.0f}")
                print("| " + " | ".join(fields) + " |", flush=True)
            if held_texts[0] != held_texts[1]:
                raise AssertionError(f"drafts changed a text of {name} under {target}")


def solved(problems: ProblemSet, texts: Sequence[str]) -> float:
    """Return the share of problems that texts solve, in percent."""
    correct = problems.judge(list(texts))
    return 100 * sum(map(bool, correct)) / len(texts)


def words(count: int) -> list[bytes]:
    """Make tokens: all bytes, then the words of Python's library by frequency, then numbers."""
    counted: Counter[str] = Counter()
    for path in sorted(Path(os.__file__).parent.rglob("*.py"))[:2000]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        counted.update(re.findall(r" ?[A-Za-z_]+|\d{1,3}| ?[^\sA-Za-z0-9_]{1,4}|\s+", text))
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    for word, _ in counted.most_common(count):
        tokens.setdefault(word.encode()[:24])
    for number in range(count):
        tokens.setdefault(b"#%d" % number)
    return list(tokens)[:count]


def states_of(constraint: AutomatonConstraint) -> list[tuple[int, ...]]:
    """Draw states of a first block of 16, with up to eight tokens revealed in any order."""
    rng = random.Random(0)
    states = []
    for _ in range(20):
        ids = [constraint.mask_id] * 16
        for column in rng.sample(range(16), 8):
            states.append(tuple(ids))
            (allowed,) = constraint.allowed(0, 0, tuple(ids), [column])
            assert allowed is not None
            ids[column] = int(rng.choice(allowed.is_member().nonzero()[0]))
    return states


def print_compile(options: Namespace) -> None:
    """Print the table of `compile`."""
    size = 151936
    tokens = words(size - 2)
    start = process_time()
    trie = TokenTrie(dict(enumerate(tokens)), size)
    print(f"the trie of {len(tokens)} tokens: {process_time() - start:.2f} s\n")
    patterns = {
        "[0-9]{3}": "[0-9]{3}",
        "math": MATH,
        "extraction": schema_pattern(EXTRACTION),
        "tool call": schema_pattern(TOOL_CALL),
        "string of 20": schema_pattern({"type": "string", "maxLength": 20}),
        "object": schema_pattern({"type": "object"}),
    }
    print(
        "| language | states | transitions | s | us a state, first, then |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    for name, pattern in patterns.items():
        start = process_time()
        automaton = token_automaton(byte_automaton(pattern), trie, [size - 1])
        assert automaton is not None
        limit = automaton.shortest + 200
        seconds = process_time() - start
        states = states_of(AutomatonConstraint(automaton, 0, limit, size - 2))
        constraint = AutomatonConstraint(automaton, 0, limit, size - 2)
        automaton.forget()
        times = []
        for _ in range(2):
            start = process_time()
            for ids in states:
                masked = [column for column in range(16) if ids[column] == size - 2]
                constraint.allowed(0, 0, ids, masked)
            times.append((process_time() - start) / len(states) * 1e6)
        print(
            f"| {name} | {automaton.end} | {len(automaton.token)} | {seconds:.2f} | "
            f"{times[0]:.0f}, {times[1]:.0f} |",
            flush=True,
        )


def random_text(automaton: ByteAutomaton, rng: random.Random) -> str | None:
    """Draw a text of a language, or None if it gets long."""
    state = 0
    text = bytearray()
    while len(text) < 2000:
        (choices,) = (automaton.next_state[state] >= 0).nonzero()
        if automaton.final[state] and (not len(choices) or rng.random() < 0.3):
            return text.decode()
        byte = int(rng.choice(choices))
        text.append(byte)
        state = automaton.next_state[state, byte]
    return None


def accepts(automaton: ByteAutomaton, text: str) -> bool:
    """Return whether a text is one of a language."""
    state = 0
    for byte in text.encode():
        state = automaton.next_state[state, byte]
        if state < 0:
            return False
    return bool(automaton.final[state])


def print_schemas(options: Namespace) -> None:
    """Print what becomes of the schemas of a test suite."""
    rng = random.Random(0)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for path in sorted(options.suite.glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            schema = case["schema"]
            counts["schemas"] += 1
            try:
                automaton = byte_automaton(schema_pattern(schema))
            except ValueError as error:
                counts["refused"] += 1
                reasons[str(error).split()[0]] += 1
                continue
            counts["compiled"] += 1
            validator = Draft202012Validator(schema)
            for _ in range(20):
                text = random_text(automaton, rng)
                if text is not None:
                    counts["texts"] += 1
                    counts["valid texts"] += validator.is_valid(json.loads(text))
            for test in case["tests"]:
                constrained = accepts(automaton, json.dumps(test["data"], ensure_ascii=False))
                counts["invalid instances"] += not test["valid"]
                counts["invalid instances that are texts"] += constrained and not test["valid"]
                counts["valid instances"] += test["valid"]
                counts["valid instances that are texts"] += constrained and test["valid"]
    for name, count in counts.items():
        print(f"{name}: {count}")
    print("refused by:", ", ".join(f"{name} {count}" for name, count in reasons.most_common()))


def main() -> None:
    """Print a table."""
    parser = parser_of("constrained", __doc__ or "")
    commands = parser.add_subparsers(required=True)
    valid = commands.add_parser("valid")
    valid.add_argument("--texts", type=int, default=5000)
    valid.add_argument("--seed", type=int, default=0)
    valid.set_defaults(run=print_valid)
    tables = commands.add_parser("tables")
    tables.add_argument("--count", type=int, default=50, help="problems of each language")
    tables.set_defaults(run=print_tables)
    commands.add_parser("compile").set_defaults(run=print_compile)
    schemas = commands.add_parser("schemas")
    schemas.add_argument("suite", type=Path, help="folder of the suite's files")
    schemas.set_defaults(run=print_schemas)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.run(options)


if __name__ == "__main__":
    main()
