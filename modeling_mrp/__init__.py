"""MRP for SDAR block-diffusion models: everything a Hub repository carries as remote code."""

from .cache_mrp import BlockCache
from .configuration_mrp import MRPConfig
from .generation_mrp import MRPGenerateOutput
from .modeling_mrp import MRPForCausalLM, MRPHead
from .options_mrp import MRPGenerationConfig

__all__ = ["BlockCache", "MRPConfig", "MRPForCausalLM", "MRPGenerateOutput", "MRPGenerationConfig", "MRPHead"]
