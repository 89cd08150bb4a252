"""`python -m mrp_trainer.evaluate`: the lists of options that files of results are made with."""

from .command import main

main()
