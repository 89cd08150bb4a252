"""Which of the other projects' tests fail, with the reason."""

EXPECTED: dict[str, list[str]] = {
    "a checkpoint that does not fit its config is refused, not filled with random weights": [
        "test_correct_missing_keys",
        "test_model_weights_reload_no_missing_tied_weights",
    ],
    "with labels hidden states are refused: the pass packs two copies of the text": [
        "test_model_outputs_equivalence"
    ],
    "transformers' tests of generate are not in its source distribution": [
        "test_generation_tester_mixin_inheritance"
    ],
    "prompt, prefix and P-tuning are refused: generate decodes from ids alone": [
        f"test_{test}[[]{config}Config*"
        for test in ("generate", "generate_pos_args", "generate_half_prec", "disable_adapter")
        for config in ("CPT", "PrefixTuning", "PromptEncoder", "PromptTuning")
    ],
    "aLoRA is refused by name: it starts behind an invocation in a text that grows from the left": [
        f"test_{test}[[]LoraConfig-config_kwargs{number}-*"
        for test in (
            "generate",
            "generate_pos_args",
            "generate_half_prec",
            "disable_adapter",
            "mixed_adapter_batches",
        )
        for number in (17, 18)
    ],
    "beams are refused: a row follows one hypothesis": [
        "test_generate_with_mixed_adapter_batches*"
    ],
    "a shadow calls the backbone without the model around it, which would see a causal mask; "
    "generate refuses it": [
        f"test_{test}[[]*ShadowConfig*"
        for test in (
            *(
                "disable_adapter",
                "inference_safetensors",
                "passing_input_embeds_works",
                "training_decoders",
                "unload_adapter",
            ),
            *("training_decoders_layer_indexing", "training_decoders_gradient_checkpointing"),
            *("generate", "generate_pos_args", "generate_half_prec"),
        )
    ],
    "lm_head and the embedding stay whole on every device, as rows of them are read": [
        "test_tied_head_has_a_tp_plan_entry",
        "test_tied_weights_are_sharded_together",
    ],
    "past_key_values stays a name of the cache in every version, and warns of nothing": [
        "test_bc_cache_name_forward"
    ],
    "families with experts can choose how these are computed; the one that is tested has none": [
        "test_eager_matches_batched_and_grouped_inference*",
    ],
    "BEFT merges into biases, and the layers have none": ["test_merge_layers*BeftConfig*"],
}
