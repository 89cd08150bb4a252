"""A stock SDAR model: another class than this package's, with the same decoder."""

from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPE = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "rope_parameters max_position_embeddings tie_word_embeddings pad_token_id"
)


class SDARConfig(Qwen3Config):
    model_type = "sdar"


class SDARForCausalLM(Qwen3ForCausalLM):
    """Another class with a Qwen3 decoder's parameters. Its own forward knows nothing of blocks."""

    config_class = SDARConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the stock model's own forward was used")


def stock_of(model: Any, **overrides: Any) -> SDARForCausalLM:
    """The stock model with an MRP model's backbone."""
    options = {name: getattr(model.config, name) for name in SHAPE.split()}
    options |= {"block_size": model.config.block_size, "mask_token_id": model.config.mask_token_id}
    stock = SDARForCausalLM(SDARConfig(**{**options, **overrides})).to(model.dtype).eval()
    backbone = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("mrp_head.")}
    stock.load_state_dict(backbone)
    return stock
