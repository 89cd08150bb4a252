"""Entry points: one that torch runs as it is imported, and two of the engine's plugins."""

from collections.abc import Callable
from typing import Any


def define_vision_operators() -> None:
    """Declare the operators that torchvision registers shapes for: its compiled part is for another
    torch, and stays out."""
    import torch

    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor d, Tensor s, float t) -> Tensor",
    ):
        torch.library.define(
            "torchvision::" + schema.partition("(")[0], schema[schema.index("(") :]
        )


def read_mask_from_config() -> None:
    """Make the engine's own SDAR read block size and mask id from config.json; it knows those of
    the released models only."""
    from sglang.srt.dllm.config import DllmConfig
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def from_config(
        original: Callable[[Any], DllmConfig | None], server_args: Any
    ) -> DllmConfig | None:
        from sglang.srt.configs.model_config import ModelConfig

        found = original(server_args)
        model = ModelConfig.from_server_args(
            server_args, model_path=server_args.model_path
        ).hf_config
        if found is not None and model.architectures == ["SDARForCausalLM"]:
            found.block_size, found.mask_id = model.block_size, model.mask_token_id
        return found

    HookRegistry.register(
        "sglang.srt.dllm.config.DllmConfig.from_server_args", from_config, HookType.AROUND
    )


def multiply_int8() -> None:
    """Put PyTorch in place of the compiled product with int8 weights; unlike that one it does not
    round activations to int8."""
    import torch
    from sglang.srt.layers.quantization import w8a8_int8

    def product(x: Any, weight: Any, scale: Any, bias: Any, dtype: Any, vnni: bool) -> Any:
        return torch.nn.functional.linear(x, weight.to(x) * scale.to(x), bias).to(dtype)

    name, arguments = (
        "sgl_kernel::int8_scaled_mm_with_quant",
        "Tensor x, Tensor weight, Tensor scale, Tensor? bias",
    )
    torch.library.define(name, f"({arguments}, ScalarType dtype, bool vnni) -> Tensor")
    torch.library.impl(name, "CPU", product)
    w8a8_int8._is_cpu_arm64 = True  # of processors that take weights as they are stored
    w8a8_int8.W8A8Int8Config.get_supported_act_dtypes = classmethod(
        lambda cls: [torch.float32, torch.bfloat16]
    )
