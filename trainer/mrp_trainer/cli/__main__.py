"""`python -m mrp_trainer.cli`, the same as `mrp`."""

from . import main

main()
