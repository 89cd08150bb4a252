"""Two entry points: one that torch runs as it is imported, and one of the engine's plugins."""

from collections.abc import Callable
from typing import Any


def define_vision_operators() -> None:
    """Declare the operators that torchvision registers shapes for: its compiled part is for another torch, and stays out."""
    import torch

    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor d, Tensor s, float t) -> Tensor",
    ):
        torch.library.define("torchvision::" + schema.partition("(")[0], schema[schema.index("(") :])


def read_mask_from_config() -> None:
    """Make the engine's own SDAR read block size and mask id from config.json; it knows those of the released models only."""
    from sglang.srt.dllm.config import DllmConfig
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def from_config(original: Callable[[Any], DllmConfig | None], server_args: Any) -> DllmConfig | None:
        from sglang.srt.configs.model_config import ModelConfig

        found = original(server_args)
        model = ModelConfig.from_server_args(server_args, model_path=server_args.model_path).hf_config
        if found is not None and model.architectures == ["SDARForCausalLM"]:
            found.block_size, found.mask_id = model.block_size, model.mask_token_id
        return found

    HookRegistry.register("sglang.srt.dllm.config.DllmConfig.from_server_args", from_config, HookType.AROUND)
