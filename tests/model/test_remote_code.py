"""The embedded checkpoint as users load it: as remote code, in fresh processes, from outside the checkout, without triton."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from fresh import Fresh
from helpers import in_hub_cache

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.code import code_files

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")

USE = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
where = {where!r}
config = AutoConfig.from_pretrained(where, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=True)
chat = [{{"role": "user", "content": "Ana has 3 pens. Ana buys 4 more. Bo gives Ana 2 more. How many pens does Ana have?"}}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
texts = []
for auto in (AutoModel, AutoModelForCausalLM):
    model = auto.from_pretrained(where, trust_remote_code=True)
    out = model.generate(**inputs, decoding="mrp_spec", num_draft_states=4, max_new_tokens=48, return_dict_in_generate=True)
    texts.append(tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
assert type(config).__name__ == "MRPConfig" and config.has_head
assert texts[0] == texts[1] and "####" in texts[0], texts
assert float(out.tokens_per_forward[0]) > 1
loaded = {{name.split(".")[0] for name, module in sys.modules.items() if module}}
assert not loaded & {{"triton", "modeling_mrp", "mrp_trainer"}}
print("TEXT:" + repr(texts[0]))
"""


@pytest.fixture(scope="module")
def as_it_lies(fresh: Fresh) -> str:
    """The text that the folder of the embedded checkpoint gives."""
    return fresh(USE.format(where=str(TINY)))


def test_loads_from_the_folder_as_it_lies(as_it_lies: str) -> None:
    assert "TEXT:" in as_it_lies


def test_loads_from_an_offline_hub_cache(fresh: Fresh, as_it_lies: str) -> None:
    """A snapshot has no sub-packages and no siblings but its own: what survives there survives on the Hub."""
    in_hub_cache(TINY, fresh.hub_cache, "someone/sdar-tiny-mrp")
    assert fresh(USE.format(where="someone/sdar-tiny-mrp")) == as_it_lies


def test_the_tokenizer_needs_no_code(fresh: Fresh) -> None:
    """AutoTokenizer reads the model's config first, whose class is remote code, and would ask for it: it gets along without,
    asks nothing where `trust_remote_code` is False, and a no is an answer."""
    printed = fresh(
        f"""
        import builtins
        from transformers import AutoTokenizer
        asked = []
        builtins.input = lambda question: asked.append(question) or "n"
        untrusted = AutoTokenizer.from_pretrained({str(TINY)!r}, trust_remote_code=False)
        print("ASKED:", len(asked))
        refused = AutoTokenizer.from_pretrained({str(TINY)!r})
        assert untrusted("def f(x):")["input_ids"] == refused("def f(x):")["input_ids"] != []
        print("RAN:", [name for name in sys.modules if "configuration_mrp" in name])
        """
    )
    assert printed == "ASKED: 0\nRAN: []\n"


def test_pipeline(fresh: Fresh) -> None:
    printed = fresh(
        f"""
        from transformers import pipeline
        pipe = pipeline("text-generation", model={str(TINY)!r}, trust_remote_code=True)
        chat = [{{"role": "user", "content": "Write a function of a number: plus 9 when even, otherwise plus 3."}}]
        print("TEXT:" + pipe(chat, max_new_tokens=64)[0]["generated_text"][-1]["content"])
        """
    )
    assert "TEXT:def " in printed


def test_save_and_load_again(
    tiny_model: MRPForCausalLM, tiny_tokenizer: Any, fresh: Fresh, as_it_lies: str, tmp_path: Path
) -> None:
    """The saved folder holds real files, loads on its own and gives equal outputs."""
    for part in (tiny_model, tiny_tokenizer):
        part.save_pretrained(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")} == code_files().keys()
    again, ids = MRPForCausalLM.from_pretrained(tmp_path), torch.arange(5, 40)[None]
    for decoding in ("static", "mrp_spec", "mrp_remask"):
        options = {"decoding": decoding, "max_new_tokens": 20}
        assert torch.equal(again.generate(ids, **options), tiny_model.generate(ids, **options))
    assert fresh(USE.format(where=str(tmp_path))) == as_it_lies
