"""Which of the other projects' tests fail, with the reason; each has to."""

EXPECTED: dict[str, list[str]] = {
    "a checkpoint that does not fit its config is refused, not filled with random weights": [
        "test_correct_missing_keys",
        "test_model_weights_reload_no_missing_tied_weights",
    ],
    "with labels hidden states are refused: the pass packs two copies of the text": ["test_model_outputs_equivalence"],
    "transformers' tests of generate are not in its source distribution": ["test_generation_tester_mixin_inheritance"],
    "prompt, prefix and P-tuning are refused: generate decodes from ids alone": [
        f"test_{test}[[]{config}Config*"
        for test in ("generate", "generate_pos_args", "generate_half_prec", "disable_adapter")
        for config in ("CPT", "PrefixTuning", "PromptEncoder", "PromptTuning")
    ],
    "a shadow calls the backbone without the model around it, which would see a causal mask": ["test_*ShadowConfig*"],
    "BEFT merges into biases, and the layers have none": ["test_merge_layers*BeftConfig*"],
}
