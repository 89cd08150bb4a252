"""A trial of the files to publish: they are loaded as their users will load them, in a fresh
process, and a block is decoded."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import constants

from modeling_mrp.headers import StoredTensor
from modeling_mrp.model.layouts import is_hub_id

from .folder import CONFIGS, Folder, first_not_finite, json_of

DONE = "Loaded in a fresh process, and decoded a block with and without drafts."
_MINUTES = 60
# A script that runs offline and without this package. It prints a line if a file that it needs is
# not on this machine.
_SCRIPT = """
import sys
sys.modules["modeling_mrp"] = sys.modules["mrp_trainer"] = None
import torch
from transformers import AutoModel, AutoTokenizer
kind, folder, base, revision, has_tokenizer = sys.argv[1:]
try:
    if kind == "adapter":
        model = AutoModel.from_pretrained(base, revision=revision or "main", trust_remote_code=True)
        model.load_adapter(folder)
    else:
        model = AutoModel.from_pretrained(folder, trust_remote_code=True)
except (OSError, ImportError) as error:
    if kind == "full" and isinstance(error, OSError):
        raise
    print(" ".join(str(error).split())[:300])
    sys.exit()
config, model = model.config, model.eval()
special = (config.mask_token_id, config.pad_token_id)
ids = [token for token in range(min(config.vocab_size, 9)) if token not in special]
options = {"max_new_tokens": config.block_size, "min_new_tokens": 0, "min_length": 0}
if has_tokenizer:
    options["tokenizer"] = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
else:
    model.generation_config.stop_strings = None
drafted = {"decoding": "mrp_spec" if config.has_head else "self_spec", "num_draft_states": 4}
for mode in ({}, {"decoding": "static"}, drafted):
    model.generate(torch.tensor([ids[:4]]), **options, **mode)
"""


def try_out(
    checkpoint: Folder, contents: Mapping[str, Path | bytes], tensors: Mapping[str, StoredTensor]
) -> str:
    """Load the files to publish in a fresh process, and decode a block. Return a description of the
    trial, or the reason why there was none.

    Nothing is downloaded. So there is no trial of a head or an adapter if its backbone is neither a
    local folder nor in the cache.

    Args:
        checkpoint: The folder that is published.
        contents: Maps the path of each file in the repository to the local file or the content.
        tensors: The folder's tensors (see `tensors_in`), whose values are checked first.

    Raises:
        ValueError: if the files do not load or decode, or a tensor contains NaN or infinity.
    """
    if (name := first_not_finite(tensors)) is not None:
        raise ValueError(
            f"{name} in {checkpoint.path} holds NaN or infinity: train it again, and publish what "
            "decodes"
        )
    with tempfile.TemporaryDirectory() as workspace:
        folder = Path(workspace, "model")
        for file, content in contents.items():
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                target.write_bytes(content)
            else:
                target.symlink_to(content.resolve())
        fields = json_of(folder / CONFIGS[checkpoint.kind])
        base = fields.get("base_model_name_or_path")
        revision = fields.get("base_model_revision" if checkpoint.kind == "head" else "revision")
        # users load it by its id
        if (
            checkpoint.base is not None
            and not is_hub_id(checkpoint.base)
            and os.path.isdir(checkpoint.base)
        ):
            base = os.path.abspath(checkpoint.base)
            revision = None
            fields |= {"base_model_name_or_path": base}
            (folder / CONFIGS[checkpoint.kind]).write_text(json.dumps(fields), encoding="utf-8")
        has_tokenizer = "1" if {"tokenizer.json", "tokenizer_config.json"} & contents.keys() else ""
        arguments = [checkpoint.kind, str(folder), base or "", revision or "", has_tokenizer]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": str(constants.HF_HUB_CACHE),
        }
        environment |= {
            "HF_MODULES_CACHE": str(Path(workspace, "modules")),
            "TRANSFORMERS_VERBOSITY": "error",
        }
        try:
            trial = subprocess.run(
                [sys.executable, "-P", "-c", _SCRIPT, *arguments],
                cwd=workspace,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60 * _MINUTES,
            )
        except subprocess.TimeoutExpired:
            return f"Not tried to the end: a block was not decoded within {_MINUTES} minutes."
    if trial.returncode:
        error = (trial.stderr.strip().splitlines() or [f"exit status {trial.returncode}"])[-1]
        raise ValueError(
            f"what is in {checkpoint.path} does not load and decode in a fresh process: {error}. "
            "Nothing was sent; save it again from a model that decodes"
        )
    return f"Not tried: {trial.stdout.strip()}" if trial.stdout.strip() else DONE
