"""The texts of installed packages: what is read, how packages are split, and how texts are cut."""

from pathlib import Path

from mrp_trainer.data.tasks import SPLITS, belongs

from benchmarks.corpus import PAD, cut, installed, new_tokenizer, split_packages

README = "A readme. " + 20 * "What it does. "
BODY = "".join(
    f"def function_number_{n}(first, second, third):\n    return first + {n} * second\n"
    for n in range(8)
)


def install(site: Path, name: str, **files: str) -> None:
    """Lay a package down as pip does."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n\n{README}")
    for file, text in files.items():
        (site / name / file).parent.mkdir(parents=True, exist_ok=True)
        (site / name / file).write_bytes(text.encode())
    paths = [f"{name}/{file}" for file in files] + [f"{info.name}/METADATA"]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in paths))


def test_what_is_read_of_a_package(tmp_path: Path) -> None:
    kept = {
        "a.py": "# Copyright somebody\n# License: free\n\n" + BODY,
        "docs/b.rst": BODY + "b",
        "c.md": BODY + "c",
    }
    kept["d.py"] = "# A comment that says what this is.\n" + BODY
    left_out = {
        "short.py": "x = 1\n",
        "long.py": 50 * 10 * BODY,
        "data.txt": BODY,
        "LICENSE.md": BODY,
        "_vendor/e.py": BODY,
    }
    left_out |= {"special.py": BODY + f"'{PAD}'"}
    install(tmp_path, "Some_Package", **kept, **left_out)
    install(tmp_path, "modeling_mrp", **{"a.py": BODY})
    ((name, texts),) = installed([str(tmp_path)]).items()
    assert name == "some-package"
    assert sorted(texts) == [kept["d.py"], README, BODY, BODY + "b", BODY + "c"]


def test_what_another_split_has_is_not_trained_on() -> None:
    names = {
        part: next(name for name in map("p{}".format, range(99)) if belongs(name, part))
        for part in SPLITS
    }
    own = BODY.replace("function", "method")
    split = split_packages(
        {
            names["train"]: [own, BODY + own, BODY],
            names["heldout"]: [BODY],
            names["tune"]: ["a line\n"],
        }
    )
    assert {part: split[part][name] for part, name in names.items()} == {
        "heldout": [BODY],
        "tune": ["a line\n"],
        "train": [own],
    }


def test_pieces_go_on_where_the_last_one_was_cut() -> None:
    """All but the last have more tokens than they may have, and the first of these make up the
    text."""
    tokenizer = new_tokenizer(iter([BODY]), 300, 64)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 1, 2)
    text = BODY + "# Ünïcödé: 日本語\n"
    ids, pieces = cut(text, tokenizer, 40)
    assert tokenizer.decode(ids) == text
    of_pieces = [tokenizer.encode(piece) for piece in pieces]
    assert all(len(piece) > 40 for piece in of_pieces[:-1])
    assert [token for piece in of_pieces for token in piece[:40]] == ids
