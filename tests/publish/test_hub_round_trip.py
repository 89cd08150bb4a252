"""Models go to the Hub in this process and come back in others that know nothing of this package, at last from the cache alone.

And what lies on the Hub then: every file of every pushed repository is walked.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from hub_server import HubServer, run_python, using
from huggingface_hub import ModelCard
from mrp_trainer.publish import push
from peft import LoraConfig, get_peft_model
from safetensors.torch import load as load_safetensors
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.code import code_files

CODE = {name: text.encode() for name, text in code_files().items()}
MODEL = {"model.safetensors", "config.json", "generation_config.json", *CODE}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
# What a pushed repository holds, beside what the Hub and the card add, and how its tensors' names begin.
DECLARED = {
    "full": (MODEL | TOKENIZER, ("model.", "lm_head.", "mrp_head.")),
    "again": (MODEL, ("model.", "lm_head.", "mrp_head.")),
    "head": (MODEL | TOKENIZER, ("mrp_head.",)),
    "adapter": ({"adapter_model.safetensors", "adapter_config.json"}, ("base_model.model.mrp_head.",)),
}
PROMPT = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 3]])


def outputs(model: Any) -> Any:
    options = {"max_new_tokens": 10, "pad_token_id": 0, "do_sample": True, "seed": 3}
    modes = ("static", "mrp_spec", "mrp_direct")
    found = {mode: model.eval().generate(PROMPT, decoding=mode, **options).tolist() for mode in modes}
    with torch.no_grad():
        found["logits"] = model(PROMPT).logits.double().sum().item()
    return found


def pushed(folder: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The outputs of what is pushed, float32 models of random weights whose heads have something to say."""
    model = make_model().float()
    expected = {"full": outputs(model)}
    model.push_to_hub("org/full", private=True)
    tokenizer.push_to_hub("org/full")
    full: Any = MRPForCausalLM.from_pretrained("org/full")
    torch.nn.init.normal_(full.mrp_head.norm.weight, std=0.3)
    expected["head"] = outputs(full)
    full.save_pretrained(folder / "head", head_only=True)
    tokenizer.save_pretrained(folder / "head")
    push(folder / "head", "org/head")
    plain: Any = MRPForCausalLM.from_pretrained("org/full")
    lora: Any = get_peft_model(plain, LoraConfig(r=2, target_modules=r"mrp_head\..*(q_proj|v_proj|eh_proj)"))
    for name, value in lora.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.5)
    expected["adapter"] = expected["load_adapter"] = outputs(lora.base_model.model)
    lora.push_to_hub("org/adapter", private=True)
    assert len({json.dumps(one["mrp_direct"]) for one in expected.values()}) == 3
    return expected


LOAD = f"""
import json, sys
from typing import Any
import torch
torch.set_num_threads(1)
connected = set()
def listen(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        connected.add(str(arguments[1][0] if event == "socket.connect" else arguments[0]))
sys.addaudithook(listen)
sys.modules["modeling_mrp"] = sys.modules["mrp_trainer"] = None
from peft import PeftModel
from transformers import AutoModel, AutoTokenizer
PROMPT = torch.tensor({PROMPT.tolist()})
{inspect.getsource(outputs)}
def load(name):
    return AutoModel.from_pretrained(name, trust_remote_code=True)
found = {{kind: outputs(load(f"org/{{kind}}")) for kind in ("full", "head")}}
found["adapter"] = outputs(PeftModel.from_pretrained(load("org/full"), "org/adapter").base_model.model)
adapted = load("org/full")
adapted.load_adapter("org/adapter")
found["load_adapter"] = outputs(adapted)
ids = [AutoTokenizer.from_pretrained(f"org/{{kind}}")("w03 w01 w00")["input_ids"] for kind in ("full", "head")]
print("FOUND:" + json.dumps([found, ids, sorted(connected)]))
"""
# With remote code only: pushed again.
PUSH_AGAIN = 'load("org/full").push_to_hub("org/again", private=True)'


@pytest.fixture(scope="module")
def trips(tmp_path_factory: pytest.TempPathFactory, id_tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The outputs of every kind of checkpoint, "pushed", "online" and, once the server is gone, "offline"; and the "hub"."""
    folder: Path = tmp_path_factory.mktemp("trips")
    with HubServer() as hub:
        with using(hub, folder):
            expected = pushed(folder, id_tokenizer)
        there = hub.environment(folder)
        told = {"online": run_python(LOAD + PUSH_AGAIN, folder, there)}
    told["offline"] = run_python(LOAD, folder, there | {"HF_HUB_OFFLINE": "1"})
    found = {where: json.loads(text.partition("FOUND:")[2].splitlines()[0]) for where, text in told.items()}
    return {"pushed": expected, **found, "hub": hub}


@pytest.mark.parametrize("where", ["online", "offline"])
def test_what_comes_back_is_what_was_pushed(trips: dict[str, Any], where: str, id_tokenizer: PreTrainedTokenizerFast) -> None:
    """The tokens of a lossless, a speculative and a head's own decoding, and the tokenizer's; nobody but the Hub is asked."""
    outputs, ids, connected = trips[where]
    assert outputs == trips["pushed"]
    assert ids == [id_tokenizer("w03 w01 w00")["input_ids"]] * 2
    assert connected == (["127.0.0.1"] if where == "online" else [])


@pytest.mark.parametrize("kind", DECLARED)
def test_every_file_of_a_pushed_repository(trips: dict[str, Any], kind: str) -> None:
    """The declared files and no others: the package's code to the byte, tensors as safetensors, and readable text. "again"
    was pushed by models that had themselves been loaded as remote code."""
    files, (declared, prefixes) = trips["hub"].files(f"org/{kind}"), DECLARED[kind]
    assert set(files) == declared | {".gitattributes", "README.md"}
    assert {name: content for name, content in files.items() if name.endswith(".py")} == (CODE if kind != "adapter" else {})
    for name, content in files.items():
        if name.endswith(".safetensors"):
            assert all(tensor.startswith(prefixes) for tensor in load_safetensors(content))
        else:
            assert "\0" not in content.decode("utf-8"), name  # a pickle opens with a byte that no text holds
    named = json.loads(files.get("config.json", b"{}")).get("auto_map", {})
    assert all(name.split(".")[0] + ".py" in CODE and "--" not in name for name in named.values())


def test_what_transformers_pushes_is_tagged(trips: dict[str, Any]) -> None:
    again, full = trips["hub"].files("org/again"), trips["hub"].files("org/full")
    assert again["model.safetensors"] == full["model.safetensors"]
    assert {"mrp", "speculative-decoding"} <= set(ModelCard(again["README.md"].decode()).data.tags)
