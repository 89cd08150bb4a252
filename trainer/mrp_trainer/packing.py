"""Keys and values that several passes over one packed batch share."""

from torch import Tensor, cat
from transformers.cache_utils import Cache


class CleanCache(Cache):
    """The clean half of a packed pass [x_t | x_0], computed once.

    Clean tokens never look at noisy ones, so their keys and values are the same whatever the noisy copies hold. The first
    pass, over all columns, leaves them here; later passes over the noisy columns alone read them, with gradients where
    the first pass had them.

    Args:
        noisy_length: Columns of the noisy copies, which come first.
    """

    def __init__(self, noisy_length: int) -> None:
        super().__init__(layers=[])
        self.noisy_length = noisy_length
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def filled(self) -> bool:
        """Whether the first pass has been."""
        return bool(self.kept)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keys and values ([batch, heads, columns, head_dim]) of all columns, whichever pass this is."""
        if layer_idx in self.kept:
            keys, values = self.kept[layer_idx]
            return cat([key_states, keys], 2), cat([value_states, values], 2)
        keys, values = (states[:, :, self.noisy_length :] for states in (key_states, value_states))
        # Copies let go of the noisy columns; where there are gradients these are held for the backward pass all the same.
        self.kept[layer_idx] = (keys, values) if keys.requires_grad else (keys.contiguous(), values.contiguous())
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always passed explicitly."""
        return 0
