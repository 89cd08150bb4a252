"""MRP for SDAR block-diffusion models: everything a Hub repository carries as remote code."""

from .generate.generation import MRPGenerateOutput
from .generate.options import MRPGenerationConfig
from .model.configuration import MRPConfig
from .modeling import MRPForCausalLM, MRPHead
from .runner.cache import BlockCache

__all__ = ["BlockCache", "MRPConfig", "MRPForCausalLM", "MRPGenerateOutput", "MRPGenerationConfig", "MRPHead"]
