"""Backbone and head computed from their weights by formula, in a chosen dtype. This is the
reference with which `mrp doctor` compares a model.

No module, kernel, cache or mask of the model takes part, with one exception: a feed-forward network
of another kind than the usual gated one (experts) is called as it is. The computation goes layer by
layer, so that only one layer's weights at a time are held in a wider dtype.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.state import Key


@dataclass(frozen=True)
class Hidden:
    """Hidden states of a clean text (one without masks), and of partly revealed states of its
    blocks.

    Attributes:
        text: Hidden states of the text's tokens, [tokens, hidden_size].
        states: Hidden states at all positions of each state, [states, block_size, hidden_size].
    """

    text: Tensor
    states: Tensor


@dataclass(frozen=True)
class Reference:
    """The computation of hidden states and log-odds from a model's weights by formula, in a dtype.
    It uses no kernel, cache or attention of the model, so that decoding can be compared with it.

    Attributes:
        model: The model whose weights are read.
        dtype: The dtype of all products and sums.
        rounds_norms: Whether norms round as the modules of transformers do, which compute in
            float32 and then convert to `dtype`. This is set for a control, which shows the effect
            of rounding on the model.
    """

    model: MRPForCausalLM
    dtype: torch.dtype
    rounds_norms: bool = False

    @property
    def device(self) -> torch.device:
        """Return the device of the computation: the model's device, or the CPU if that device lacks
        float64."""
        device: torch.device = self.model.device
        return torch.device("cpu") if device.type == "mps" else device

    def backbone(self, text: Sequence[int], states: Sequence[Key]) -> Hidden:
        """Compute the backbone's final hidden states, h_A, for the tokens of a text and for states
        of its blocks.

        Args:
            text: The ids of a clean text (one without masks) of whole blocks. A token attends to
                its own block and those before it.
            states: For each state, the position at which its block begins, and the ids of the
                block, masks included. A state's tokens attend to the text before its block, and to
                the state itself.
        """
        backbone: Any = self.model.model
        layers = list(backbone.layers)[: self.model.config.num_hidden_layers]
        hidden = self._network(layers, backbone.norm, self._embed(text, states), states)
        if not backbone.shifted:
            return hidden
        # the hidden state for a token is that of the previous position, and 0 for the first token
        earlier = F.pad(hidden.text, (0, 0, 1, 0))
        firsts = earlier[[start for start, _ in states]]
        shifted = torch.cat([firsts[:, None], hidden.states[:, :-1]], 1)
        return Hidden(earlier[:-1], shifted)

    def head(
        self, text: Sequence[int], hidden: Hidden, states: Sequence[Key], sources: Tensor
    ) -> Tensor:
        """Compute the head's estimates of the backbone's hidden states at states.

        An estimate is h_A + h_C: the backbone's hidden states h_A at the state that the head starts
        from, plus the residual h_C that the head computes.

        Args:
            text: The ids of the clean text (one without masks).
            hidden: The backbone's hidden states. Only those of the text are read (its field
                `text`).
            states: For each state, the position at which its block begins, and the ids of the
                block, masks included.
            sources: For each state, the backbone's hidden states h_A at the state that the head
                starts from, [states, block_size, hidden_size].

        Returns:
            The estimates, [states, block_size, hidden_size].
        """
        head: Any = self.model.mrp_head
        embedded = self._embed(text, states)
        weight = self._cast(head.eh_proj.weight)
        inputs = []
        for ids, earlier in ((embedded.text, hidden.text), (embedded.states, sources)):
            normed = [self._norm(head.enorm, ids), self._norm(head.hnorm, earlier)]
            inputs.append(F.linear(torch.cat(normed, -1), weight))
        output = self._network(list(head.layers), head.norm, Hidden(*inputs), states)
        return sources + output.states

    def log_odds(self, hidden: Tensor) -> Tensor:
        """Compute the log-odds of all tokens, [n, vocab], from hidden states [n, hidden_size];
        those of the mask are -inf."""
        weight = self.model.lm_head.weight.detach().to(self.device)
        if self.dtype.itemsize == 2 and self.device.type == "cpu":
            logits = F.linear(hidden, weight.to(self.dtype)).float()
        else:
            # on a GPU, sums of products are float32 even if the factors have 16 bits
            product_dtype = torch.promote_types(self.dtype, torch.float32)
            logits = F.linear(hidden.to(product_dtype), weight.to(product_dtype))
        logits[:, self.model.config.mask_token_id] = -torch.inf
        log_p = logits.log_softmax(-1)
        return log_p - torch.log(-torch.expm1(log_p))

    def _cast(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device, self.dtype)

    def _embed(self, text: Sequence[int], states: Sequence[Key]) -> Hidden:
        weight = self.model.model.embed_tokens.weight.detach()
        rows = []
        for ids in (list(text), [state_ids for _, state_ids in states]):
            index = torch.tensor(ids, dtype=torch.long, device=weight.device)
            rows.append(self._cast(weight[index]))
        return Hidden(*rows)

    def _network(
        self, layers: Sequence[Any], norm: Any, hidden: Hidden, states: Sequence[Key]
    ) -> Hidden:
        """Run decoder layers and the final norm over a text and states."""
        block = self.model.config.block_size
        length = len(hidden.text)
        starts = torch.tensor([start for start, _ in states], device=self.device)
        positions = torch.arange(length, device=self.device)
        state_positions = starts[:, None] + torch.arange(block, device=self.device)
        # the text's tokens see their own and earlier blocks, a state's tokens see the text before
        # the state
        visible = positions[:, None] // block >= positions // block
        rotary = self._rotary(positions)
        state_rotary = self._rotary(state_positions)
        text, drafted = hidden.text, hidden.states
        for layer in layers:
            normed = self._norm(layer.input_layernorm, text)
            query, key, value = self._project(layer.self_attn, normed, rotary)
            attended = [self._attend(query, key, value, visible)]
            normed = self._norm(layer.input_layernorm, drafted)
            queries, keys, values = self._project(layer.self_attn, normed, state_rotary)
            outputs = []
            for index, (start, _) in enumerate(states):
                outputs.append(
                    self._attend(
                        queries[index],
                        torch.cat([key[:start], keys[index]]),
                        torch.cat([value[:start], values[index]]),
                    )
                )
            attended.append(torch.stack(outputs) if outputs else torch.zeros_like(drafted))
            weight = self._cast(layer.self_attn.o_proj.weight)
            bias = layer.self_attn.o_proj.bias
            bias = None if bias is None else self._cast(bias)
            sums = []
            for inputs, output in zip((text, drafted), attended, strict=True):
                summed = inputs + F.linear(
                    output, weight, None if bias is None else self._cast(bias)
                )
                sums.append(summed)
            text, drafted = self._feed_forward(layer, sums)
        return Hidden(self._norm(norm, text), self._norm(norm, drafted))

    def _feed_forward(self, layer: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Apply the second norm and the feed-forward network of a layer to each input, and add the
        input to the result."""
        mlp = layer.mlp
        normed = [self._norm(layer.post_attention_layernorm, hidden) for hidden in inputs]
        if not hasattr(mlp, "gate_proj"):
            experts = copy.deepcopy(mlp).to(self.device, self.dtype)
            for module in experts.modules():
                if hasattr(module, "config"):  # torch's grouped products lack float64
                    module.config._experts_implementation = "eager"
            sums = []
            for hidden, scaled in zip(inputs, normed, strict=True):
                output = experts(scaled.reshape(1, -1, scaled.shape[-1]))
                sums.append(hidden + output.view_as(hidden))
            return sums
        gate, up, down = (
            self._cast(linear.weight) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        sums = []
        for hidden, scaled in zip(inputs, normed, strict=True):
            product = mlp.act_fn(F.linear(scaled, gate)) * F.linear(scaled, up)
            sums.append(hidden + F.linear(product, down))
        return sums

    def _norm(self, norm: Any, hidden: Tensor) -> Tensor:
        """Divide `hidden` by its root mean square over the last dimension, and multiply it by the
        norm's weight."""
        weight = self._cast(norm.weight)
        if not self.rounds_norms:
            scale = (hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
            return weight * (hidden * scale)
        wide = hidden.float()
        scale = (wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return weight * (wide * scale).to(self.dtype)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cosines and the sines of the rotary angles at positions, [..., rotated / 2]
        each, where `rotated` is the number of a head's components that are rotated. Angles are
        float32, as the models define them."""
        rotary: Any = self.model.model.rotary_emb
        angles = positions[..., None].float() * rotary.inv_freq.to(self.device).float()
        scale = getattr(rotary, "attention_scaling", 1.0)
        return (angles.cos() * scale).to(self.dtype), (angles.sin() * scale).to(self.dtype)

    def _project(
        self, attention: Any, normed: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries and keys, both rotated, and values; each is [..., tokens, heads,
        head_dim]."""
        cos, sin = (part[..., None, :] for part in rotary)
        results = []
        for letter in "qkv":
            linear = getattr(attention, f"{letter}_proj")
            bias = None if linear.bias is None else self._cast(linear.bias)
            heads = F.linear(normed, self._cast(linear.weight), bias)
            heads = heads.unflatten(-1, (-1, self.model.config.head_dim))
            if letter != "v":
                if (norm := getattr(attention, f"{letter}_norm", None)) is not None:
                    heads = self._norm(norm, heads)
                half = cos.shape[-1]
                first, second, unrotated = heads.split([half, half, heads.shape[-1] - 2 * half], -1)
                heads = torch.cat(
                    [first * cos - second * sin, second * cos + first * sin, unrotated], -1
                )
            results.append(heads)
        query, key, value = results
        return query, key, value

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None
    ) -> Tensor:
        """Compute attention, softmax(q k / sqrt(head_dim)) v, to all keys or, with the mask
        `visible`, to those that it allows; return [queries, heads * head_dim]."""
        group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(group, 1)
        value = value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.model.config.head_dim**-0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        shares = scores.to(torch.promote_types(self.dtype, torch.float32)).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares.to(self.dtype), value).flatten(1)
