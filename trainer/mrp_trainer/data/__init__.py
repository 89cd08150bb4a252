"""Training data: users' records, synthetic problems, and the samples of token ids that are made
from them."""
