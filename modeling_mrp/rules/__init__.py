"""What a row of the batch decides, in plain Python: rules, drafts, acceptance, ends of text. Nothing here imports torch."""
