"""transformers' `ModelTesterMixin` on a model of two layers with a head, blocks of 4."""

import unittest
from typing import Any

import torch
from peers_transformers.test_modeling_common import ModelTesterMixin

from modeling_mrp import MRPConfig, MRPForCausalLM
from tests.support.random_cases import make_model

VOCAB = 60


class _Tester:
    """What the mixin asks for a config and inputs."""

    batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads = 3, 7, 32, 2, 4
    is_training = True

    def get_config(self) -> MRPConfig:
        return MRPConfig.from_dict(make_model(block_size=4).config.to_dict())

    def prepare_config_and_inputs_for_common(self) -> tuple[MRPConfig, dict[str, Any]]:
        ids = torch.randint(1, VOCAB, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class TestOurModel(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (MRPForCausalLM,)
    test_all_params_have_gradient = (
        False  # the model's own loss trains the backbone; MRPTrainer trains the head
    )

    def setUp(self) -> None:
        self.model_tester = _Tester()

    def _prepare_for_class(
        self, inputs: dict[str, Any], model_class: type, return_labels: bool = False
    ) -> dict[str, Any]:
        """With the labels that the mixin gives models which transformers lists."""
        inputs = super()._prepare_for_class(inputs, model_class)
        return {**inputs, "labels": inputs["input_ids"]} if return_labels else inputs
