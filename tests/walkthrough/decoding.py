"""Parts 0, 1 and 7: `generate` of what was installed."""

import pydoc
import sys
from pathlib import Path

from habits import (
    CHECKPOINT,
    QUESTION,
    habit,
    in_a_process,
    model,
    tokenizer,
)
from transformers import pipeline

import modeling_mrp


@habit(0, "the package is the one from the wheel")
def installed() -> None:
    for name in ("modeling_mrp", "mrp_trainer"):
        __import__(name)
        where = Path(sys.modules[name].__file__ or "").resolve()
        assert Path(sys.prefix).resolve() in where.parents, f"{name} comes from {where}"


@habit(1, "a text-generation pipeline takes temperature=0.0")
def pipeline_at_temperature_0() -> None:
    pipe = pipeline("text-generation", model=model(), tokenizer=tokenizer())
    chat = [{"role": "user", "content": QUESTION}]
    cold, plain = (pipe(chat, max_new_tokens=16, do_sample=False, **more) for more in ({"temperature": 0.0}, {}))
    assert cold == plain


@habit(1, "AutoTokenizer runs no code, and asks for none where trust_remote_code is False")
def untrusted_tokenizer() -> None:
    code = f"""
import builtins, sys
from transformers import AutoTokenizer
builtins.input = lambda question: sys.exit("asked")
print(AutoTokenizer.from_pretrained({CHECKPOINT!r}, trust_remote_code=False)("def f(x):")["input_ids"])
print([name for name in sys.modules if name.endswith("configuration_mrp")])
"""
    done = in_a_process(code)
    assert done.returncode == 0, done.stderr[-300:]
    assert done.stdout == f"{tokenizer()('def f(x):')['input_ids']}\n[]\n"


@habit(1, "help(model.generate) tells the options")
def told() -> None:
    shown = pydoc.render_doc(model().generate, renderer=pydoc.plaintext)
    assert "num_draft_states" in shown
    assert "confidence_threshold: tau" in shown


@habit(7, "modeling_mrp.__version__")
def version() -> None:
    from importlib.metadata import version as installed_version

    assert modeling_mrp.__version__ == installed_version("modeling-mrp")
