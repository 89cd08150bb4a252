"""The embedded checkpoint as users load it: as remote code, in fresh processes, from outside the
checkout, without triton."""

from pathlib import Path
from typing import Any

import pytest

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.code import code_files
from tests.support.fresh import Fresh
from tests.support.places import TINY

CHAT = [
    {
        "role": "user",
        "content": "Ana has 3 pens. Ana buys 4 more. Bo gives Ana 2 more. How many pens does Ana "
        "have?",
    }
]
OPTIONS: dict[str, Any] = {
    "decoding": "mrp_spec",
    "num_draft_states": 4,
    "max_new_tokens": 48,
    "return_dict_in_generate": True,
}
USE = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
where = {where!r}
config = AutoConfig.from_pretrained(where, trust_remote_code=True)
assert type(config).__name__ == "MRPConfig" and config.has_head
tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
inputs = tokenizer.apply_chat_template(
    {chat}, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
for auto in (AutoModel, AutoModelForCausalLM):
    model = auto.from_pretrained(where, trust_remote_code=True)
    # As transformers would replace it by that for stock models.
    assert "generate" not in vars(model)
    out = model.generate(**inputs, **{options})
    print([out.sequences.tolist(), out.stats.drafted.tolist(), out.stats.accepted.tolist()])
pipe = pipeline("text-generation", model=where, trust_remote_code=True)
assert "####" in pipe({chat}, max_new_tokens=48)[0]["generated_text"][-1]["content"]
loaded = {{name.split(".")[0] for name, module in sys.modules.items() if module}}
assert not loaded & {{"triton", "modeling_mrp", "mrp_trainer"}}
"""


@pytest.mark.parametrize("again", [False, True], ids=["as it lies", "saved again"])
def test_loads(
    again: bool, fresh: Fresh, tiny_model: MRPForCausalLM, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """It says what the installed package says. That it does from the Hub's cache, too, is in
    `test_publish`."""
    if again:
        tiny_model.save_pretrained(tmp_path)
        tiny_tokenizer.save_pretrained(tmp_path)
        assert {
            path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")
        } == code_files().keys()
    inputs = tiny_tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out: Any = tiny_model.generate(**inputs, **OPTIONS)
    assert int(out.stats.accepted.sum()) > 0
    expected = [out.sequences.tolist(), out.stats.drafted.tolist(), out.stats.accepted.tolist()]
    assert (
        fresh(USE.format(where=str(tmp_path if again else TINY), chat=CHAT, options=OPTIONS))
        == f"{expected}\n" * 2
    )
