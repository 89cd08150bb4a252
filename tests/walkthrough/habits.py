"""Habits, how they are tried, and what several of them need."""

import contextlib
import io
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from modeling_mrp import MRPForCausalLM

CHECKPOINT = "sdar-tiny-mrp"
QUESTION = "Sum the numbers of a list that are even, each plus 5."
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"What is {n} + 4?"}, {"role": "assistant", "content": f"{n} + 4 = {n + 4}"}]}
    for n in range(8)
]

Habit = Callable[[], str | None]  # returns None if it works, or the message that refuses it
_HABITS: list[tuple[int, str, Habit]] = []


def habit(part: int, what: str) -> Callable[[Habit], Habit]:
    """Register a function as something a user does."""

    def register(function: Habit) -> Habit:
        _HABITS.append((part, what, function))
        return function

    return register


def go(parts: set[int]) -> int:
    """Try the habits of some parts, of all if none is named; return the exit status."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    begin, failed, tried = time.monotonic(), 0, 0
    for part, what, function in sorted(_HABITS, key=lambda one: one[0]):
        if parts and part not in parts:
            continue
        tried += 1
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                message = function()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            print(f"{part:>2}  FAILED   {what}: {_line(error)} ({Path(last.filename).name}:{last.lineno})", flush=True)
        else:
            print(f"{part:>2}  {'ok       ' + what if message is None else f'refused  {what}: {message}'}", flush=True)
    print(f"{tried} habits in {time.monotonic() - begin:.0f} s, {failed} of them not as they should be")
    return int(failed > 0)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def in_a_process(code: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run code that may end its process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout)


def mrp(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    command = str(Path(sys.executable).with_name("mrp"))
    return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=timeout)


def new_model(**options: Any) -> Any:
    """Load the checkpoint by its own class."""
    return MRPForCausalLM.from_pretrained(CHECKPOINT, **options).eval()


@cache
def model() -> Any:
    """The checkpoint as remote code, for what leaves it as it is."""
    return AutoModel.from_pretrained(CHECKPOINT, trust_remote_code=True).eval()


@cache
def tokenizer() -> Any:
    """Its tokenizer."""
    return AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)


def asked(*questions: str) -> Any:
    """Inputs of `generate` for questions, padded as the tokenizer does."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer().apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
