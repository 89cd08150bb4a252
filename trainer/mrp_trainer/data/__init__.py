"""Records, texts and problems, and the samples that training gets."""
