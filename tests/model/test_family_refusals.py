"""Models that look like one of ours are refused by name, with what differs; their configs as they are published."""

import json
from pathlib import Path
from typing import Any

import pytest
from published import backbone_config

from modeling_mrp import MRPConfig, MRPForCausalLM

SDAR = backbone_config(block_size=4, mask_token_id=97)

# Of I-DLM and UNO, which declare themselves SDAR: `use_regular_causal` is what their code reads, and UNO's may leave it out.
CAUSAL: dict[str, dict[str, Any]] = {
    "yifanyu/I-DLM-8B": {**SDAR, "use_regular_causal": True},
    "I-DLM-32B": SDAR,
    "uno-qwen3-8B": SDAR,
}

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "MinerU-Diffusion-V1-0320-2.5B": (
        {
            "architectures": ["MinerUDiffusionForConditionalGeneration"],
            "model_type": "mineru_diffusion",
            "text_config": SDAR,
            "vision_config": {"model_type": "qwen2_vl", "depth": 32},
            "image_token_id": 151655,
        },
        "MinerU-Diffusion.*vision tower.*images",
    ),
    "diffusiongemma-26B-A4B": (
        {
            "architectures": ["DiffusionGemmaForBlockDiffusion"],
            "model_type": "diffusion_gemma",
            "canvas_length": 256,
            "text_config": {"model_type": "diffusion_gemma_text", "num_experts": 128},
        },
        "DiffusionGemma.*no mask token.*renoised",
    ),
    "lfm2-diffusion": (
        {
            "architectures": ["Lfm2DiffusionForBlockDiffusion"],
            "model_type": "lfm2_diffusion",
            "canvas_length": 128,
            "max_denoising_steps": 32,
            "layer_types": ["conv", "conv", "full_attention"],
        },
        "LFM2 diffusion.*convolutions",
    ),
}


def refused(folder: Path, config: dict[str, Any], message: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for load in (MRPForCausalLM.from_pretrained, MRPForCausalLM.from_backbone, MRPConfig.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(folder)


@pytest.mark.parametrize("name", CAUSAL)
def test_what_declares_itself_sdar_and_is_causal(name: str, tmp_path: Path) -> None:
    refused(tmp_path / name, CAUSAL[name], "(I-DLM|UNO).*each token of it sees the tokens before it alone")


@pytest.mark.parametrize("name", OTHERS)
def test_what_decodes_otherwise(name: str, tmp_path: Path) -> None:
    config, message = OTHERS[name]
    refused(tmp_path / name, config, message)


def test_a_name_that_only_begins_alike(tmp_path: Path) -> None:
    (tmp_path / "unobtrusive").mkdir()
    (tmp_path / "unobtrusive" / "config.json").write_text(json.dumps(SDAR))
    assert MRPConfig.from_pretrained(tmp_path / "unobtrusive").block_size == 4


def test_another_family_is_not_divided_over_processes(tmp_path: Path) -> None:
    config = {**SDAR, "model_type": "sdar_moe"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match="tp_plan: a model of the family 'sdar_moe' is not divided over processes: use device_map"
    ):
        MRPForCausalLM.from_pretrained(tmp_path, tp_plan="auto")
