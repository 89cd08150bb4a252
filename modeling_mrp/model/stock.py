"""An MRP model of a loaded SDAR model of another class: the same parameters in memory, and a repository's head."""

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers.generation import GenerationConfig

# The MRP model of each stock model that is still in use, and where its head came from.
_MADE: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]]" = weakref.WeakKeyDictionary()


class StockMixin:
    """The part of an MRP model by which its repository serves models of other classes."""

    @classmethod
    def from_stock_model(cls: Any, stock: Any, repository: str, **download: Any) -> Any:
        """Make the MRP model of a stock model's own parameters and a repository's head, once as long as they stay.

        Args:
            stock: A model with a Qwen3 decoder's parameters under `model.` and `lm_head.`, such as SDAR's own class.
            repository: A repository with a head, or its folder, of any kind that `attach_head` takes.
            download: `revision`, `token` and the like.

        Returns:
            A model of this class, in evaluation mode, with the repository's generation config. Its backbone shares memory with
            `stock`; the head has its dtype and device.

        Raises:
            ValueError: if the stock model is not such a decoder, or the head was made for another backbone; what differs is
                listed.
        """
        parameters = dict(stock.named_parameters(remove_duplicate=False))
        like = parameters["lm_head.weight"]
        source = (repository, download.get("revision"), like.dtype, like.device)
        known, model = _MADE.get(stock, (None, None))
        if known == source and all(dict(model.named_parameters())[name] is value for name, value in parameters.items()):
            return model
        head = cls.config_class.from_pretrained(repository, **download)
        assumed = {"block_size": head.block_size, "mask_token_id": head.mask_token_id, **stock.config.to_dict()}
        config = cls.config_class.from_dict(
            {**assumed, "model_type": "sdar", "num_nextn_predict_layers": 0, "draft_vocab_size": 0}
        )
        with torch.device("meta"):
            model = cls(config).eval()
        try:
            model.load_state_dict(parameters, assign=True)
        except RuntimeError as error:
            raise ValueError(
                f"this {type(stock).__name__} is no Qwen3 decoder that a head can be put on: load the checkpoint with "
                f"MRPForCausalLM.from_backbone instead ({error})"
            ) from error
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(like.device)  # no checkpoint holds its buffers
        model.attach_head(repository, **download)
        model.mrp_head.requires_grad_(False)
        with suppress(OSError):  # where there is none, it keeps the one that its config gives
            model.generation_config = GenerationConfig.from_pretrained(repository, **download)
        _MADE[stock] = source, model
        return model


__all__ = ["StockMixin"]
