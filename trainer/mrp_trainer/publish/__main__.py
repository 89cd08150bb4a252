"""`python -m mrp_trainer.publish`."""

from .command import main

main()
