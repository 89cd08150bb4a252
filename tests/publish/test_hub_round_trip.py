"""Models go to the Hub in one process and come back in others that know nothing of this package, at last from the cache alone.

And what lies on the Hub then: every file of every pushed repository is walked.
"""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hub_server import HubServer, run_python
from safetensors.torch import load as load_safetensors

from modeling_mrp.model.saving import code_files

KINDS = ("full", "head", "adapter", "load_adapter")
CODE = {name: text.encode() for name, text in code_files().items()}
CONFIGS = {"config.json", "generation_config.json"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
# What a pushed repository holds, beside what the Hub and the card add, and how its tensors' names begin.
DECLARED = {
    "full": ({"model.safetensors", *CONFIGS, *TOKENIZER, *CODE}, ("model.", "lm_head.", "mrp_head.")),
    "again": ({"model.safetensors", *CONFIGS, *CODE}, ("model.", "lm_head.", "mrp_head.")),
    "backbone": ({"model.safetensors", *CONFIGS, *CODE}, ("model.", "lm_head.")),
    "head": ({"model.safetensors", *CONFIGS, *TOKENIZER, *CODE}, ("mrp_head.",)),
    "head_again": ({"model.safetensors", *CONFIGS, *CODE}, ("mrp_head.",)),
    "adapter": ({"adapter_model.safetensors", "adapter_config.json"}, ("base_model.model.mrp_head.",)),
}
OF_THE_HUB = {".gitattributes", "README.md"}

# What both sides do with a model. A float32 model of random weights whose head has something to say.
COMMON = """
import hashlib, json, sys
import torch
torch.set_num_threads(1)
PROMPT = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 3]])
def outputs(model):
    options = {"max_new_tokens": 10, "pad_token_id": 0, "do_sample": True, "seed": 3}
    modes = ("static", "mrp_spec", "mrp_direct")
    found = {mode: model.eval().generate(PROMPT, decoding=mode, **options).tolist() for mode in modes}
    with torch.no_grad():
        found["logits"] = hashlib.sha256(model(PROMPT).logits.numpy().tobytes()).hexdigest()
    return found
"""

# A head is also attached by its id.
PUSH = """
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from modeling_mrp import MRPConfig, MRPForCausalLM
from mrp_trainer.heads import with_new_head
torch.manual_seed(0)
config = MRPConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, block_size=4, mask_token_id=60, num_nextn_predict_layers=1,
    max_position_embeddings=512, initializer_range=0.2, pad_token_id=0)
words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w63"))
words.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", mask_token="w60")
def lively(model):
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3)
    return model
model = lively(MRPForCausalLM(config))
expected = {"full": outputs(model)}
model.push_to_hub("org/full", tokenizer=tokenizer)

backbone = MRPForCausalLM(MRPConfig(**{**config.to_dict(), "num_nextn_predict_layers": 0}))
backbone.push_to_hub("org/backbone")
headed = MRPForCausalLM.from_pretrained("org/backbone")
with_new_head(headed, 2)
expected["head"] = outputs(lively(headed))
headed.push_to_hub("org/head", head_only=True, tokenizer=tokenizer)
torch.nn.init.normal_(backbone.lm_head.weight)
backbone.push_to_hub("org/backbone")  # later than the head: not what the head was trained on
both = MRPForCausalLM.from_backbone("org/backbone", revision=headed.backbone_source.revision, head="org/head")
assert outputs(both) == expected["head"]

full = MRPForCausalLM.from_pretrained("org/full")
lora = get_peft_model(full, LoraConfig(r=2, target_modules=r"mrp_head\\..*(q_proj|v_proj|eh_proj)"))
for name, value in lora.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(value, std=0.5)
expected["adapter"] = expected["load_adapter"] = outputs(lora.base_model.model)
assert expected["adapter"]["mrp_direct"] != expected["full"]["mrp_direct"]
lora.push_to_hub("org/adapter", private=True)
print("EXPECTED:" + json.dumps(expected))
"""

LOAD = """
connected = set()
def listen(event, arguments):
    if event == "socket.connect":
        connected.add(str(arguments[1][:2]))
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        connected.add(f"name of {arguments[0]}")
sys.addaudithook(listen)
sys.modules["modeling_mrp"] = sys.modules["mrp_trainer"] = None
from peft import PeftModel
from transformers import AutoModel, AutoTokenizer
def load(name):
    return AutoModel.from_pretrained(name, trust_remote_code=True)
found = {kind: outputs(load(f"org/{kind}")) for kind in ("full", "head")}
found["adapter"] = outputs(PeftModel.from_pretrained(load("org/full"), "org/adapter").base_model.model)
adapted = load("org/full")
adapted.load_adapter("org/adapter")
found["load_adapter"] = outputs(adapted)
found["ids"] = [AutoTokenizer.from_pretrained(f"org/{kind}", trust_remote_code=True)("w3 w1 w0")["input_ids"]
    for kind in ("full", "head")]
found["connected"] = sorted(connected)
print("FOUND:" + json.dumps(found))
"""
# With remote code only: saved, loaded again from there, and pushed.
PUSH_AGAIN = """
load("org/full").push_to_hub("org/again")
load("org/head").save_pretrained("saved", head_only=True)
again = load("./saved")
assert outputs(again) == found["head"]
again.push_to_hub("org/head_again", head_only=True)
"""


def printed(text: str, mark: str) -> dict[str, Any]:
    return json.loads(next(line for line in text.splitlines() if line.startswith(mark)).removeprefix(mark))


@pytest.fixture(scope="module")
def trips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outputs of every kind of checkpoint: "pushed", "online" and, once the server is gone, "offline"; with the "files" of
    every repository and the addresses of the "servers"."""
    folder: Path = tmp_path_factory.mktemp("trips")
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    with HubServer() as hub:
        hub.add_user("alice", token="hf_alice", organizations=["org"])
        text = run_python(
            COMMON + PUSH,
            folder / "one",
            hub.environment(folder / "one", "hf_alice", PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'trainer'}"),
        )
        there = hub.environment(folder / "two", "hf_alice")
        online = run_python(COMMON + LOAD + PUSH_AGAIN, folder / "two", there)
        files = {name.removeprefix("org/"): hub.files(name) for name in hub.repositories}
        titles = [commit.title for commit in hub.repository("org/head_again").history("main")]
        private = {name: repository.private for name, repository in hub.repositories.items()}
        servers = [hub.url]
    offline = run_python(COMMON + LOAD, folder / "two", there | {"HF_HUB_OFFLINE": "1"})
    marks = {"pushed": printed(text, "EXPECTED:"), "online": printed(online, "FOUND:"), "offline": printed(offline, "FOUND:")}
    return {**marks, "files": files, "private": private, "servers": servers, "titles": titles}


@pytest.mark.parametrize("where", ["online", "offline"])
def test_what_comes_back_is_what_was_pushed(trips: dict[str, Any], where: str) -> None:
    """Logits to the last bit, the tokens of a lossless, a speculative and a head's own decoding, and the tokenizer's."""
    assert {kind: trips[where][kind] for kind in KINDS} == trips["pushed"]
    assert trips[where]["ids"] == [[3, 1, 0], [3, 1, 0]]


def test_loading_speaks_to_the_hub_alone(trips: dict[str, Any]) -> None:
    """Every connection and look-up of a name that the interpreter makes, from before the first import on."""
    (hub,) = (int(url.rsplit(":", 1)[1]) for url in trips["servers"])
    allowed = {str(("127.0.0.1", hub)), "name of 127.0.0.1"}
    online = set(trips["online"]["connected"])
    assert str(("127.0.0.1", hub)) in online
    assert online <= allowed, online - allowed
    assert trips["offline"]["connected"] == []


@pytest.mark.parametrize("kind", DECLARED)
def test_every_file_of_a_pushed_repository(trips: dict[str, Any], kind: str) -> None:
    """The declared files and no others: the package's code to the byte, tensors as safetensors, and readable text. "again"
    was pushed by models that had themselves been loaded as remote code."""
    files, (declared, prefixes) = dict(trips["files"][kind]), DECLARED[kind]
    assert set(files) == declared | OF_THE_HUB
    if kind.endswith("again"):
        assert files["model.safetensors"] == trips["files"][{"again": "full", "head_again": "head"}[kind]]["model.safetensors"]
    assert {name: content for name, content in files.items() if name.endswith(".py")} == (CODE if kind != "adapter" else {})
    for name, content in files.items():
        if name.endswith(".safetensors"):
            assert all(tensor.startswith(prefixes) for tensor in load_safetensors(content))
            continue
        text = content.decode("utf-8")  # a pickle opens with a byte that no text holds
        assert "\0" not in text, name
        assert not zipfile.is_zipfile(io.BytesIO(content)), name
        if name.endswith(".json"):
            json.loads(text)
    for config in ("config.json", "adapter_config.json"):
        named = json.loads(files.get(config, b"{}")).get("auto_map", {})
        assert all(name.split(".")[0] + ".py" in CODE and "--" not in name for name in (named or {}).values())


def test_remote_code_pushes_in_one_commit(trips: dict[str, Any]) -> None:
    assert trips["titles"] == ["Upload an MRP head", "initial commit"]
    assert json.loads(trips["files"]["head_again"]["config.json"])["base_model_name_or_path"] == "org/backbone"


def test_repositories_are_private(trips: dict[str, Any]) -> None:
    assert trips["private"] == dict.fromkeys((f"org/{kind}" for kind in DECLARED), True)
