"""Differences between versions of transformers. From 5.24 on, the argument and the output field
`past_key_values` of models are called `cache`. In 5.17, the field `page_size` of
`ContinuousBatchingConfig` is called `block_size`. Before 5.18, `load_adapter` leaves out modules
that were saved with an adapter."""

from inspect import signature
from typing import Any

import transformers
from packaging.version import Version
from transformers.generation import ContinuousBatchingConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.utils import ModelOutput

OLD_CACHE_NAME = "past_key_values"
# The argument by which the layers of the installed version take a cache.
CACHE_NAME = (
    "cache" if "cache" in signature(Qwen3DecoderLayer.forward).parameters else OLD_CACHE_NAME
)
# The field of `ContinuousBatchingConfig` for the number of tokens of a cache page.
PAGE_SIZE_NAME = (
    "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
)


def check_saved_modules(model: Any, adapter_name: str) -> None:
    """Check that transformers has loaded an adapter together with the modules that were saved whole
    with it (peft's `modules_to_save`).

    Args:
        model: The model to which the adapter was added.
        adapter_name: The name of the adapter.

    Raises:
        ImportError: if there are such modules, and transformers is older than 5.18, which leaves
            them out. The adapter is deleted from the model before.
    """
    saved = getattr(model.peft_config[adapter_name], "modules_to_save", None)
    if saved and Version(transformers.__version__) < Version("5.18"):
        model.delete_adapter(adapter_name)
        raise ImportError(
            f"the adapter has {', '.join(saved)} saved whole (modules_to_save), which load_adapter "
            f"of transformers {transformers.__version__} leaves out: install transformers 5.18 or "
            "later, or load it with peft.PeftModel.from_pretrained"
        )


def chosen_cache(cache: Any, past_key_values: Any) -> Any:
    """Return the argument `cache` or, if it was passed under its older name, `past_key_values`.
    Return None if both are None. Raise `ValueError` if neither is None."""
    if cache is not None and past_key_values is not None:
        raise ValueError(
            "cache and past_key_values are two names of one argument: pass one of them"
        )
    return past_key_values if cache is None else cache


class CacheOutput(ModelOutput):
    """A model output whose field `cache` can also be accessed as `past_key_values`, as an attribute
    and as a key."""

    @property
    def past_key_values(self) -> Any:
        """The field `cache`, under its older name."""
        return self.cache

    @past_key_values.setter
    def past_key_values(self, value: Any) -> None:
        self.cache = value

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_field(key), value)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(_field(name), value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_field(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_field(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the field called `key`, or `default` if that field is not set."""
        return super().get(_field(key), default)


def _field(name: Any) -> Any:
    return "cache" if name == OLD_CACHE_NAME else name
