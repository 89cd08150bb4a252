"""PEFT's tests of decoders on the small checkpoint without a head."""

import inspect

from mrp_trainer import TINY
from peers_peft import test_decoder_models as suite
from peft.utils import constants
from suites import SUITES
from transformers import AutoTokenizer

from modeling_mrp import MRPForCausalLM

MODEL = str(SUITES / "sdar-tiny")
for name, mapping in vars(
    constants
).items():  # what an adapter changes where nobody says it: as of Qwen3
    if name.startswith("TRANSFORMERS_MODELS_TO_") and "qwen3" in mapping:
        mapping["sdar_mrp"] = mapping["qwen3"]
for listed in (suite.PEFT_DECODER_MODELS_TO_TEST, suite.SMALL_GRID_MODELS):
    listed[:] = [MODEL]  # the lists that the tests are parametrised with


def setup_module() -> None:
    model = MRPForCausalLM.from_pretrained(TINY)
    model.detach_head()
    model.save_pretrained(MODEL)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(MODEL)


class TestOurModel(suite.TestDecoderModels):
    """What has a `model_id` is about any model; the others load certain ones from the Hub, or
    data."""

    test_prompt_learning_with_gradient_checkpointing = None


for name, test in vars(suite.TestDecoderModels).items():
    if name.startswith("test_") and "model_id" not in inspect.signature(test).parameters:
        setattr(TestOurModel, name, None)
