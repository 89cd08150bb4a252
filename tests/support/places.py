"""Where this checkout and its embedded checkpoint are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ROOT / "hub_configs" / "sdar-tiny-mrp"
