"""Measurements: comparisons, a cost model, wall clock, and the tables and figures made from
them."""
