"""Prompts for a chat model of real language, of three kinds: chats, code to write or continue, and
texts to edit or copy.

    python -m benchmarks.prompts --split train --count 3000 --output prompts.jsonl
    python -m benchmarks.prompts --split train --texts --count 400 --output texts.jsonl

Code and prose are taken from the installed Python packages, which are divided into splits by
package (see `corpus.py`); subjects of chats are divided by their names. So no prompt of the splits
`tune` and `heldout` has a function or a subject in common with one of `train`. The lines are chats
of one user's turn, which `mrp decode` reads, with their kind. With `--texts` they are pieces of the
packages' own texts, at most four of a package, which `mrp train` reads.
"""

import ast
import json
import random
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from mrp_trainer.data.tasks import SPLITS, Split, belongs

from .common import parser_of
from .corpus import installed, split_packages

KINDS = ("chat", "code", "edit")
# Characters of a function or a paragraph in a prompt.
SHORTEST, LONGEST = 80, 420
PIECE = 900  # characters of a piece of text
SUBJECTS = """
    gravity|photosynthesis|volcanoes|the water cycle|evolution|DNA|vaccines|antibiotics
    black holes|the moon's phases|tides|rainbows|lightning|earthquakes|glaciers|coral reefs
    rainforests|deserts|bees|whales|migrating birds|dinosaurs|spiders|mushrooms|honey|coffee|tea
    chocolate|bread|cheese|olive oil|rice|salt|sugar|vitamins|sleep|dreams|memory|the heart
    the lungs|the immune system|stress|meditation|running|swimming|cycling|chess|football
    the Olympic Games|yoga|dancing|the piano|the violin|jazz|opera|painting|sculpture
    photography|cinema|theatre|poetry|novels|the printing press|the steam engine|electricity
    the telephone|radio|television|the internet|email|search engines|social media|smartphones
    batteries|solar panels|wind turbines|nuclear power|electric cars|trains|airplanes|ships
    bridges|skyscrapers|concrete|steel|glass|paper|plastic|recycling|climate change
    the ozone layer|air pollution|clean water|agriculture|irrigation|money|banks|inflation|taxes
    insurance|stock markets|trade|unemployment|democracy|elections|constitutions|courts
    human rights|the United Nations|the Roman Empire|ancient Egypt|ancient Greece|the Silk Road
    the Renaissance|the Industrial Revolution|the French Revolution|the Cold War|Mount Everest
    the Amazon River|the Sahara|Antarctica|the Pacific Ocean|Paris|Tokyo|Cairo|Rome
    prime numbers|fractions|geometry|algebra|calculus|probability|statistics|logic|infinity|pi
    operating systems|compilers|databases|hash tables|linked lists|binary trees|recursion
    sorting|version control|unit tests|object-oriented programming|regular expressions
    functional programming|threads|deadlocks|garbage collection|caches|virtual memory
    file systems|TCP|HTTP|DNS|firewalls|encryption|passwords|open source|machine learning
    neural networks|speech recognition|robots|Python|JavaScript|SQL|HTML|Rust|the command line
    text editors|debuggers|software licences
"""
ABOUT = (
    "What is interesting about {}? Answer in three sentences.",
    "Explain {} to a ten-year-old.",
    "Name three facts about {}, one per line.",
    "Write a short paragraph about {}.",
    "Why does {} matter?",
    "Give me five questions that a student could ask about {}.",
    "What is a common mistake about {}?",
    "Write a short dialogue between two friends about {}.",
    "Summarize the most important things about {} as a list.",
    "How has {} changed people's lives?",
    "Compare {} with something similar.",
    "Write a title and an introduction for an article about {}.",
)
TASKS = (
    "Write a Python function `{signature}` that does this: {summary}",
    "Implement in Python: {summary} Name the function `{name}`.",
    "Complete this function:\n```python\n{head}\n```",
    "Write two unit tests for this function:\n```python\n{source}\n```",
    "Explain what this function does:\n```python\n{source}\n```",
    "What could go wrong in this code?\n```python\n{source}\n```",
)
EDITS = (
    "Rename `{old}` to `{new}` in this code and print only the code:\n```python\n{source}\n```",
    "Add type hints to this function and print only the code:\n```python\n{source}\n```",
    "Add a comment to each step of this code:\n```python\n{source}\n```",
    "Print this function again with a better name:\n```python\n{source}\n```",
    "Correct the grammar of this text and print it: {paragraph}",
    "Print this text again with every sentence on its own line: {paragraph}",
    "Repeat this text and add one more sentence: {paragraph}",
)
_WORD = re.compile(r"^[A-Z][^\n`*|<>{}\\]+[.]$", re.DOTALL)


def functions_of(text: str) -> Iterator[dict[str, str]]:
    """Yield what a prompt needs of each function of a Python file that has a docstring and is
    neither very short nor very long."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
        source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
        names = []
        for argument in node.args.args:
            if len(argument.arg) > 2 and argument.arg not in ("self", "cls"):
                names.append(argument.arg)
        if (
            not SHORTEST <= len(source) <= LONGEST
            or source.count("\n") < 3
            or not names
            or not 20 < len(summary) < 200
        ):
            continue
        lines = source.splitlines()
        yield {
            "name": node.name,
            "signature": f"{node.name}({', '.join(names)})",
            "summary": summary,
            "source": source,
            "head": "\n".join(lines[: len(lines) // 2]),
            "old": names[0],
            "new": f"new_{names[0]}",
        }


def paragraphs_of(text: str) -> Iterator[dict[str, str]]:
    """Yield the paragraphs of prose of a text."""
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        if SHORTEST <= len(line) <= LONGEST and _WORD.match(line) and line.count(" ") > 12:
            yield {"paragraph": line}


def subjects(split: Split) -> list[str]:
    """List the subjects of a split's chats."""
    names = [name.strip() for line in SUBJECTS.split("\n") for name in line.split("|")]
    return [name for name in names if name and belongs(name, split)]


def prompts(split: Split, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Make `count` prompts of a split, as many of each kind, in a random order that `seed` decides.
    Each is `{"messages": [...], "kind": ...}`. `ValueError` where the installed packages do not
    have enough."""
    rng = random.Random(f"{split}/{seed}")
    functions: list[dict[str, str]] = []
    paragraphs: list[dict[str, str]] = []
    for texts in split_packages(installed())[split].values():
        found: list[dict[str, str]] = []
        for text in texts:
            found += functions_of(text)
            paragraphs += list(paragraphs_of(text))[:5]
        functions += rng.sample(found, min(len(found), 150))  # so that no package is most of them
    made: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for name in subjects(split):
        made["chat"].update(template.format(name) for template in ABOUT)
    for function in functions:
        made["code"].add(rng.choice(TASKS).format(**function))
        made["edit"].add(rng.choice(EDITS[:4]).format(**function))
    for paragraph in rng.sample(paragraphs, min(len(paragraphs), len(functions))):
        made["edit"].add(rng.choice(EDITS[4:]).format(**paragraph))
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        wanted = count // len(KINDS) + (KINDS.index(kind) < count % len(KINDS))
        if len(made[kind]) < wanted:
            raise ValueError(f"{wanted} prompts of {kind}: {split} has {len(made[kind])} here")
        for text in rng.sample(sorted(made[kind]), wanted):
            rows.append({"messages": [{"role": "user", "content": text}], "kind": kind})
    rng.shuffle(rows)
    return rows


def texts(split: Split, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """List `count` pieces of texts of a split's packages, `PIECE` characters each, in a random
    order that `seed` decides. `ValueError` where the installed packages do not have enough."""
    rng = random.Random(f"texts/{split}/{seed}")
    pieces: list[str] = []
    for of_package in split_packages(installed())[split].values():
        chosen = []
        for text in rng.sample(of_package, min(len(of_package), 6)):
            begin = rng.randrange(max(1, min(len(text), 6 * PIECE) - PIECE))
            chosen.append(text[begin : begin + PIECE])
        pieces += rng.sample(chosen, min(4, len(chosen)))
    if len(pieces) < count:
        raise ValueError(f"{count} texts: {split} has {len(pieces)} here")
    return [{"text": text} for text in rng.sample(pieces, count)]


def main() -> None:
    """Write the lines."""
    parser = parser_of("prompts", __doc__ or "")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--texts", action="store_true", help="the packages' texts, not prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    make = texts if options.texts else prompts
    with open(options.output, "w", encoding="utf-8") as file:
        for row in make(options.split, options.count, options.seed):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
