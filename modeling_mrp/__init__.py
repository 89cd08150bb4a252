"""MRP for SDAR block-diffusion models: everything a Hub repository carries as remote code."""

from .configuration_mrp import MRPConfig
from .modeling_mrp import MRPForCausalLM, MRPHead

__all__ = ["MRPConfig", "MRPForCausalLM", "MRPHead"]
