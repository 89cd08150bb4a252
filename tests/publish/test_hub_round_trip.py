"""Models go to the Hub in this process and come back in others that know nothing of this package, at last from the cache alone.

And what lies on the Hub then: every file of every pushed repository is walked.
"""

import hashlib
import inspect
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from hub_server import HubServer, run_python, using
from mrp_trainer.heads import with_new_head
from mrp_trainer.publish import push
from peft import LoraConfig, get_peft_model
from safetensors.torch import load as load_safetensors
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.code import code_files

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
    "adapter": ({"adapter_model.safetensors", "adapter_config.json"}, ("base_model.model.mrp_head.",)),
}
OF_THE_HUB = {".gitattributes", "README.md"}

PROMPT = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 3]])


def outputs(model: Any) -> Any:
    options = {"max_new_tokens": 10, "pad_token_id": 0, "do_sample": True, "seed": 3}
    modes = ("static", "mrp_spec", "mrp_direct")
    found = {mode: model.eval().generate(PROMPT, decoding=mode, **options).tolist() for mode in modes}
    with torch.no_grad():
        found["logits"] = hashlib.sha256(model(PROMPT).logits.numpy().tobytes()).hexdigest()
    return found


def pushed(folder: Path) -> dict[str, Any]:
    """The outputs of what is pushed, float32 models of random weights whose heads have something to say."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w63"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", mask_token="w60")
    model = make_model().float()
    expected = {"full": outputs(model)}
    model.push_to_hub("org/full", private=True)
    tokenizer.push_to_hub("org/full")

    backbone = make_model(1, num_nextn_predict_layers=0).float()
    backbone.push_to_hub("org/backbone", private=True)
    headed: Any = MRPForCausalLM.from_pretrained("org/backbone")
    with_new_head(headed, 2)
    torch.nn.init.normal_(headed.mrp_head.norm.weight, std=0.3)
    expected["head"] = outputs(headed)
    headed.save_pretrained(folder / "head", head_only=True)
    tokenizer.save_pretrained(folder / "head")
    push(folder / "head", "org/head")
    torch.nn.init.normal_(backbone.lm_head.weight)
    backbone.push_to_hub("org/backbone")  # later than the head: not what the head was trained on
    both = MRPForCausalLM.from_backbone("org/backbone", revision=headed.backbone_source.revision, head="org/head")
    assert outputs(both) == expected["head"]

    full: Any = MRPForCausalLM.from_pretrained("org/full")
    lora: Any = get_peft_model(full, LoraConfig(r=2, target_modules=r"mrp_head\..*(q_proj|v_proj|eh_proj)"))
    for name, value in lora.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.5)
    expected["adapter"] = expected["load_adapter"] = outputs(lora.base_model.model)
    assert expected["adapter"]["mrp_direct"] != expected["full"]["mrp_direct"]
    lora.push_to_hub("org/adapter", private=True)
    return expected


COMMON = f"""
import hashlib, json, sys
from typing import Any
import torch
torch.set_num_threads(1)
PROMPT = torch.tensor({PROMPT.tolist()})
{inspect.getsource(outputs)}
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
load("org/full").push_to_hub("org/again", private=True)
load("org/head").save_pretrained("saved", head_only=True)
assert outputs(load("./saved")) == found["head"]
"""


def printed(text: str, mark: str) -> dict[str, Any]:
    return json.loads(next(line for line in text.splitlines() if line.startswith(mark)).removeprefix(mark))


@pytest.fixture(scope="module")
def trips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outputs of every kind of checkpoint: "pushed", "online" and, once the server is gone, "offline"; with the "files" of
    every repository and the addresses of the "servers"."""
    folder: Path = tmp_path_factory.mktemp("trips")
    with HubServer() as hub:
        hub.add_user("alice", token="hf_alice", organizations=["org"])
        with using(hub, folder, "hf_alice"):
            expected = pushed(folder)
        there = hub.environment(folder, "hf_alice")
        online = run_python(COMMON + LOAD + PUSH_AGAIN, folder, there)
        files = {name.removeprefix("org/"): hub.files(name) for name in hub.repositories}
        titles = [commit.title for commit in hub.repository("org/again").history("main")]
        private = {name: repository.private for name, repository in hub.repositories.items()}
        servers = [hub.url]
    offline = run_python(COMMON + LOAD, folder, there | {"HF_HUB_OFFLINE": "1"})
    marks = {"pushed": expected, "online": printed(online, "FOUND:"), "offline": printed(offline, "FOUND:")}
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
    if kind == "again":
        assert files["model.safetensors"] == trips["files"]["full"]["model.safetensors"]
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
    assert trips["titles"] == ["Upload MRPForCausalLM", "initial commit"]


def test_repositories_are_private(trips: dict[str, Any]) -> None:
    assert trips["private"] == dict.fromkeys((f"org/{kind}" for kind in DECLARED), True)
