"""Decisions about one row at a time, without torch: reveal rules, drafts, acceptance, ends of
text."""
