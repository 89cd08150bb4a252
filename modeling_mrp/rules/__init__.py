"""Decisions about one row, in plain Python without torch: reveal rules, drafts, acceptance, ends of
text."""
