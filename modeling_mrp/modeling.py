"""The model: a block-diffusion backbone with an optional MRP head on top. Symbols are those of
`model.head`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .generate.decide import MRPDecidingMixin
from .generate.generation import MRPGenerationMixin, logger
from .generate.options import MRPGenerationConfig, check_rows
from .generate.score import MRPScoringMixin
from .model.code import model_tags
from .model.compat import CACHE_NAME, OLD_CACHE_NAME, chosen_cache
from .model.configuration import MRPConfig
from .model.diffusion import block_causal_mask, noise_of, noisy_and_clean_mask, taken_from
from .model.families.sdar import backbone_of, untie
from .model.head import MRPHead, pad_rotary
from .model.loading import MRPPreTrainedModel
from .networks.cache import BlockCache

AnyMask = Tensor | BlockMask
# Keyword arguments that `forward` passes on to the backbone.
_PASSED_ON = ("output_hidden_states", "output_attentions", "cache_position")


class _LateClass:
    """A descriptor that looks up `MRPGenerationConfig` only when it is read.

    So this class may depend on rules and options that come after the model in a repository's file.
    """

    def __get__(self, model: Any, owner: Any) -> type[MRPGenerationConfig]:
        return MRPGenerationConfig


class MRPForCausalLM(MRPPreTrainedModel, MRPScoringMixin, MRPDecidingMixin, MRPGenerationMixin):
    """A block-diffusion language model with an optional MRP head.

    A token attends to all tokens of earlier blocks and of its own block; a masked position predicts
    the token at that position.

    Args:
        config: The `MRPConfig`. If its `num_nextn_predict_layers` is above 0, the model has a head,
            `mrp_head`; else `mrp_head` is None.

    Example:
        >>> from modeling_mrp import MRPForCausalLM
        >>> from mrp_trainer import embedded_checkpoint
        >>> model = MRPForCausalLM.from_pretrained(embedded_checkpoint())
        >>> model.config.block_size, model.mrp_head is not None
        (16, True)
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    generation_config_class: Any = _LateClass()

    def __init__(self, config: MRPConfig) -> None:
        super().__init__(config)
        self.model = backbone_of(config.family)(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mrp_head = MRPHead(config) if config.has_head else None
        self.add_model_tags(model_tags(config.family))
        self.post_init()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as torch does. If `lm_head` is given an adapter, it is untied first
        (`untie`)."""
        untie(self, name, value)
        super().__setattr__(name, value)

    def backbone(
        self, input_ids: Tensor, position_ids: Tensor, mask: AnyMask, cache: Cache | None = None
    ) -> Tensor:
        """Run the backbone; return the hidden states h_A after its final norm, [batch, length,
        hidden_size]. They are not shifted: each stands at the position of its input.

        Args:
            input_ids: int64 [batch, length].
            position_ids: int64 [batch, length], absolute positions.
            mask: bool [batch, 1, length, keys], True where a query sees a key; a `BlockMask` under
                flex attention.
            cache: A cache that the layers update, or None.
        """
        # With a cache the length differs from call to call, and a module compiled by
        # `nn.Module.compile` would recompile.
        model = self.model if cache is None else self.model._call_impl
        return model(
            input_ids=input_ids,
            attention_mask={"full_attention": self._attention_bias(mask)},
            position_ids=position_ids,
            return_dict=True,
            use_cache=cache is not None,
            **{CACHE_NAME: cache},
        ).last_hidden_state

    def residual(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        position_ids: Tensor,
        mask: AnyMask,
        cache: Cache | None = None,
    ) -> Tensor:
        """Compute the head's residual h_C = Head(embed(x'), h_A), [batch, length, hidden_size].
        Here, h_A are the backbone's hidden states before a reveal, x' is the state after it, and
        h_A + h_C is the head's estimate of the hidden states after it. Raise `ValueError` if the
        model has no head.

        Args:
            input_ids: int64 [batch, length], x', the token ids after the reveal.
            hidden_states: [batch, length, hidden_size], h_A, or an earlier estimate in place of it
                (h_A + h_C).
            position_ids, mask, cache: As for `backbone`. A cache must have room for the head's
                layers.
        """
        if self.mrp_head is None:
            raise ValueError(
                "this model has no MRP head (num_nextn_predict_layers is 0): load one with "
                "attach_head(head) or from_backbone(backbone, head=...), or train a head"
            )
        embeds = self.model.embed_tokens(input_ids)
        rotary = pad_rotary(self.model.rotary_emb(embeds, position_ids), self.config.head_dim)
        head = self.mrp_head if cache is None else self.mrp_head._call_impl
        output: Tensor = head(embeds, hidden_states, self._attention_bias(mask), rotary, cache)
        return output

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        text_noise: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of every position given the revealed tokens. With `labels`, also
        compute the block-diffusion loss.

        With `labels`, each learned token is masked with probability t ~ U(0, 1], where t is drawn
        for each sequence. In eval mode the seed is derived from the tokens, so that the loss is
        reproducible. One pass holds [x_t | x_0], the masked and the clean text. The loss is the
        cross-entropy at masks, weighted by 1 / t, divided by the number of learned tokens (SDAR,
        equation 3). The logits are those of x_t.

        Args:
            input_ids: int64 [batch, length]. Positions that hold `mask_token_id` are predicted.
            attention_mask: [batch, past + length], 1 for real tokens (padding may be on either
                side); or a boolean or additive mask [batch, 1, length, past + length] that replaces
                the block-causal one.
            position_ids: int64 [batch, length], absolute positions; by default counted from the
                first real token.
            past_key_values: Keys and values of earlier, clean blocks. It must be empty in a family
                in which a hidden state predicts the next position (`shifted`). `cache` is the name
                of this argument from transformers 5.24 on.
            inputs_embeds: [batch, length, hidden_size], in place of `input_ids`.
            labels: int64 [batch, length], the true tokens; -100 where nothing is learned (the
                prompt).
            text_noise: With `labels`, the noise [batch, 1 + length] in [0, 1); it is drawn by
                default. The first number is 1 - t. Then comes one number for each token, which is
                masked if its number is below t.
            num_items_in_batch: With `labels`, the divisor of the loss, by default the number of
                learned tokens of this batch. transformers' Trainer passes the number over all
                accumulation steps.
            logits_to_keep: As in transformers. If it is a tensor of positions, at least one of
                these must hold a mask.
            use_cache, kwargs: As in transformers.

        Returns:
            Logits [batch, kept, vocab]; with `labels`, the loss; with `output_hidden_states=True`,
            the hidden states of the layers. The last of them are h_A, the output of the backbone.

        Raises:
            ValueError: for an argument that has no effect or does not fit the tokens, or for a
                `BlockCache` of `generate`. Also for labels without a learned token, unless
                `num_items_in_batch` is above 0: then other batches of the step have learned tokens,
                and the loss of this one is 0.
        """
        if unknown := sorted(
            name for name, value in kwargs.items() if value is not None and name not in _PASSED_ON
        ):
            raise ValueError(
                f"forward has no argument {', '.join(unknown)}: check the spelling, or leave it out"
            )
        cache = chosen_cache(cache, past_key_values)
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None:
            raise ValueError("forward got neither input_ids nor inputs_embeds: pass one of them")
        if labels is not None:
            has_other_mask = attention_mask is not None and attention_mask.dim() != 2
            arguments = {
                "inputs_embeds": inputs_embeds,
                "position_ids": position_ids,
                OLD_CACHE_NAME: cache,
                "use_cache": use_cache,
                "logits_to_keep": isinstance(logits_to_keep, Tensor) or logits_to_keep or None,
                **kwargs,
                "an attention_mask that is not 2-D": has_other_mask,
            }
            if unused := [
                name
                for name, value in arguments.items()
                if value is not None and value is not False
            ]:
                raise ValueError(
                    f"{', '.join(unused)}: no effect with labels, whose pass packs [x_t | x_0] of "
                    "input_ids with a mask and positions of its own. Leave out either. For a "
                    "prompt, prefix or P-tuning adapter use others, such as LoRA"
                )
            return self._training_pass(
                tokens, labels, attention_mask, text_noise, num_items_in_batch
            )
        if text_noise is not None or num_items_in_batch is not None:
            raise ValueError(
                "text_noise, num_items_in_batch: no effect without labels. Pass these too, or "
                "leave both out. A Trainer keeps labels for a loss of its own (compute_loss_func, "
                "label_smoothing_factor) on clean text: leave that option out"
            )
        if isinstance(cache, BlockCache):
            raise ValueError(
                "past_key_values are a BlockCache, which only generate goes on from: pass a "
                "DynamicCache here"
            )
        skip_check = (
            input_ids is None or self.training or input_ids.is_meta or torch.compiler.is_compiling()
        )
        if not skip_check and isinstance(logits_to_keep, Tensor):
            assert input_ids is not None
            self._check_kept(input_ids[:, logits_to_keep])
        # lm-eval's log-likelihood tasks request such logits
        if not skip_check and not (input_ids == self.config.mask_token_id).any():
            logger.warning_once(
                "In a text without masks each position predicts its own token: log-likelihoods "
                "made of them mean nothing. Call model.score(input_ids), with lm-eval `python -m "
                "mrp_trainer.evaluate.lm_eval run --model mrp`, or put the mask, id "
                f"{self.config.mask_token_id}, where a token is to be predicted"
            )
        mask, position_ids = self._block_causal(tokens, attention_mask, position_ids, cache)
        outputs = self.model(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask={"full_attention": mask},
            position_ids=position_ids,
            use_cache=use_cache,
            return_dict=True,
            **{CACHE_NAME: cache},
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        if self.model.shifted:
            if cache is not None and cache.get_seq_length() > hidden.shape[1]:
                raise ValueError(
                    "past_key_values hold earlier tokens, but in the family "
                    f"{self.config.family!r} the logits of a position come from the one before it, "
                    "of which they hold none: pass the whole text"
                )
            previous = torch.arange(hidden.shape[1], device=hidden.device) - 1
            hidden = taken_from(hidden, torch.where(position_ids > 0, previous, -1))
        if isinstance(logits_to_keep, int):
            hidden = hidden[:, -logits_to_keep:]
        else:
            hidden = hidden[:, logits_to_keep]
        return CausalLMOutputWithPast(
            logits=self.lm_head(hidden),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )

    def _check_kept(self, ids: Tensor) -> None:
        """Raise `ValueError` if logits are to be computed only at positions that hold tokens, not
        masks. `ids` are the ids at the chosen positions.

        transformers' pipeline for decisions, which `/v1/systemone` of its server also calls, would
        take the logits of the last token for those of the next one.
        """
        if not (ids == self.config.mask_token_id).any():
            raise ValueError(
                "logits_to_keep chooses positions that hold tokens, as pipeline('decision') does, "
                "and a position predicts its own token, not the next one: call "
                "model.decide(input_ids, questions=..., tokenizer=...), or put the mask, id "
                f"{self.config.mask_token_id}, where a token is to be predicted"
            )

    def _block_causal(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention mask for the new `tokens` (block-causal, or the caller's 4-D mask),
        and their positions [batch, length]."""
        batch, length = tokens.shape[:2]
        past = cache.get_seq_length() if cache is not None else 0
        valid = torch.ones(batch, past + length, dtype=torch.bool, device=tokens.device)
        if attention_mask is not None and attention_mask.dim() == 2:
            valid = attention_mask.bool()
        key_positions = (valid.long().cumsum(-1) - 1).clamp(min=0)
        if position_ids is None:
            position_ids = key_positions[:, past:]
        else:
            position_ids = position_ids.expand(batch, length)
            key_positions = torch.cat([key_positions[:, :past], position_ids], 1)
        if attention_mask is not None and attention_mask.dim() == 4:
            return self._attention_bias(attention_mask), position_ids
        mask = block_causal_mask(position_ids, key_positions, valid, self.config.block_size)
        # padding sees itself
        mask |= torch.eye(length, past + length, dtype=torch.bool, device=tokens.device).roll(
            past, -1
        )
        return self._attention_bias(mask), position_ids

    def _attention_bias(self, mask: Any) -> Any:
        """Turn a boolean mask into an additive one for attention implementations that add the mask
        to their scores (flex attention, and those with `eager_mask`)."""
        implementation = self.config._attn_implementation
        is_additive = (
            implementation == "flex_attention"
            or ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) is eager_mask
        )
        if isinstance(mask, BlockMask) or not is_additive or mask.dtype != torch.bool:
            return mask
        # on a CPU, the compiled code would write outside of its memory
        if implementation == "flex_attention" and mask.device.type == "cpu":
            raise ValueError(
                "attn_implementation is 'flex_attention', not for a CPU: call "
                "set_attn_implementation('sdpa')"
            )
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(
            ~mask, torch.finfo(self.dtype).min
        )

    def _training_pass(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None,
        noise: Tensor | None,
        divisor: int | Tensor | None,
    ) -> CausalLMOutputWithPast:
        batch, length = input_ids.shape
        for name, tensor in (("labels", labels), ("attention_mask", attention_mask)):
            if tensor is not None and tensor.shape != input_ids.shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}: with these input_ids it must be "
                    f"{[batch, length]}"
                )
        if attention_mask is None:
            valid = torch.ones_like(input_ids, dtype=torch.bool)
        else:
            valid = attention_mask.bool()
        check_rows(valid, 0, self.config.max_position_embeddings)
        learned = labels != -100
        if not (divisor or (learned & valid).any()):
            raise ValueError(
                "labels: none is learned, each is -100 or padding, so that there is no loss. Leave "
                "out samples whose answer was cut off, or cut them later"
            )
        clean = torch.where(learned, labels, input_ids)
        if noise is None:
            noise = noise_of(clean, valid, self.training)
        level = 1 - noise[:, :1]
        masked = (noise[:, 1:] < level) & learned & valid
        ids = torch.cat([clean.masked_fill(masked, self.config.mask_token_id), clean], 1)
        positions = (valid.long().cumsum(-1) - 1).clamp(min=0)
        mask = noisy_and_clean_mask(positions, valid, self.config.block_size)
        states = self.backbone(ids, positions.repeat(1, 2), mask)
        if self.model.shifted:  # a block's first token is predicted by the clean token before it
            previous = torch.arange(length, device=ids.device) - 1
            previous = torch.where(
                positions % self.config.block_size == 0, previous + length, previous
            )
            states = taken_from(states, torch.where(positions > 0, previous, -1))
        logits = self.lm_head(states[:, :length])
        masked_logits = logits[masked]
        if logits.dtype != torch.float64:
            masked_logits = masked_logits.float()
        losses = (
            F.cross_entropy(masked_logits, clean[masked], reduction="none")
            / level.expand(batch, length)[masked].float()
        )
        if divisor is None:
            count = (learned & valid).sum()
        else:
            count = torch.as_tensor(divisor, device=ids.device)
        return CausalLMOutputWithPast(loss=losses.sum() / count.clamp(min=1), logits=logits)
