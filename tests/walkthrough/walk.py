"""The walk itself, in a process that knows nothing of this checkout but these files."""

import sys

import commands
import decoding
import serving
import training
from habits import go

HABITS = (commands, decoding, serving, training)  # registered when they are imported

if __name__ == "__main__":
    sys.exit(go({int(part) for part in sys.argv[1:]}))
