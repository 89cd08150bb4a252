"""The concepts of a drafted round, as the documents list them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MOST = 32


def test_a_round_has_few_concepts_and_each_is_in_the_code() -> None:
    document = (ROOT / "docs/code.md").read_text(encoding="utf-8")
    section = document.split("## The concepts of a drafted round")[1].split("\n## ")[0]
    concepts = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert 0 < len(set(concepts)) == len(concepts) <= MOST
    defined = set()
    for path in (ROOT / "modeling_mrp").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                defined.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                defined.add(node.targets[0].id)
    assert set(concepts) <= defined
