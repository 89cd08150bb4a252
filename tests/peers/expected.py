"""Which of the other projects' tests fail, with the reason; each has to."""

EXPECTED: dict[str, list[str]] = {
    "a checkpoint that does not fit its config is refused, not filled with random weights": [
        "test_correct_missing_keys",
        "test_model_weights_reload_no_missing_tied_weights",
    ],
    "with labels hidden states are refused: the pass packs two copies of the text": ["test_model_outputs_equivalence"],
    "transformers' tests of generate are not in its source distribution": ["test_generation_tester_mixin_inheritance"],
}
