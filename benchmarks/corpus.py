"""Documentation and source texts of the installed Python packages, divided into splits by package.

The texts belong to their authors, under the packages' licences. They are read from the installed
packages, for training and measuring; no file of this repository contains any of them.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackagePath, distributions
from pathlib import Path

from mrp_trainer.data.tasks import SPLITS, Split, belongs
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .common import TINY

# The texts of each package, by the package's name.
Packages = dict[str, list[str]]

ENDINGS = (".py", ".md", ".rst")
# In characters: the longest text (longer files are mostly tables), the most text of one package,
# and the shortest text.
_LARGEST, _SHARE, _SHORTEST = 100_000, 3_000_000, 200
# Paths of copies of other packages, and of licences and lists of authors.
_EXCLUDED = re.compile(
    r"(^|/)(_?vendor|_?third_?party|_?extern)|(^|/)(licen[cs]e|copying|notice|authors)",
    re.IGNORECASE,
)
_FIRST_COMMENT, _LEGAL = (
    re.compile(r"\A(?:[ \t]*#.*\n|\s*\n)+"),
    re.compile("licen[cs]e|copyright", re.IGNORECASE),
)
# what looks like a special token, or is not UTF-8
_SUSPECT = re.compile("<\\||\N{REPLACEMENT CHARACTER}")
_OWN_NAME = "modeling-mrp"
# A text is a copy if more than a share `_COPIED` of its lines of `_LONG_LINE` characters or more
# occurs in another split.
_LONG_LINE, _COPIED = 40, 0.2

PAD, END, MASK = "<|endoftext|>", "<|im_end|>", "<|MASK|>"


def installed(path: Sequence[str] | None = None) -> Packages:
    """Read the texts of installed packages; return them by package name.

    A package's texts are its description and its files of `ENDINGS`, by hash of the path, up to
    `_SHARE` characters. Left out are copies of other packages, licences, opening comments that are
    licences, and texts that seem to contain special tokens.

    Args:
        path: Folders in which packages are searched; by default `sys.path`.
    """
    packages: Packages = {}
    for distribution in distributions() if path is None else distributions(path=list(path)):
        name = re.sub(r"[-_.]+", "-", distribution.name).lower()
        if name not in {_OWN_NAME, *packages} and (texts := list(_texts(distribution.files or ()))):
            packages[name] = texts
    return dict(sorted(packages.items()))


def _texts(files: Sequence[PackagePath]) -> Iterator[str]:
    room = _SHARE
    for file in sorted(files, key=lambda file: hashlib.sha256(str(file).encode()).digest()):
        path = Path(str(file.locate()))
        if (
            (file.suffix not in ENDINGS and file.name != "METADATA")
            or _EXCLUDED.search(str(file))
            or not path.is_file()
        ):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if file.name == "METADATA":
            text = text.partition("\n\n")[2]
        if (comment := _FIRST_COMMENT.match(text)) and _LEGAL.search(comment[0]):
            text = text[comment.end() :]
        if _SHORTEST <= len(text) <= min(_LARGEST, room) and not _SUSPECT.search(text):
            room -= len(text)
            yield text


def split_packages(packages: Packages) -> dict[Split, Packages]:
    """Return the packages of each split, by hash of their names; "train" lacks the texts that are
    copies of other splits'."""
    splits: dict[Split, Packages] = {}
    lines_elsewhere: set[str] = set()
    for split in SPLITS:
        splits[split] = {name: texts for name, texts in packages.items() if belongs(name, split)}
        if split == "train":
            continue
        for texts in splits[split].values():
            for text in texts:
                lines_elsewhere.update(_long_lines(text))

    def is_copy(text: str) -> bool:
        lines = _long_lines(text)
        return sum(line in lines_elsewhere for line in lines) > _COPIED * len(lines)

    for name, texts in splits["train"].items():
        splits["train"][name] = [text for text in texts if not is_copy(text)]
    return splits


def _long_lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= _LONG_LINE]


def cut(text: str, tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[list[int], list[str]]:
    """Encode a text; return its ids, and its segments of `length` tokens as text.

    All segments but the last have a few tokens more, so that training truncates them and does not
    take their ends for the end of the text.
    """
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoding["input_ids"]
    offsets = encoding["offset_mapping"]
    segments = []
    for begin in range(0, len(ids), length):
        last = min(begin + length + 8, len(ids)) - 1
        segments.append(text[offsets[begin][0] : offsets[last][1]])
    return ids, segments


def new_tokenizer(texts: Iterator[str], size: int, length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `size` tokens with `model_max_length` `length`; equal
    texts give equal tokenizers.

    Words, numbers and punctuation are split as by the embedded checkpoint's tokenizer.
    """
    embedded = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = embedded.pre_tokenizer
    tokenizer.decoder = embedded.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        model_max_length=length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
