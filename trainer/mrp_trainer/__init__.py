"""Training, evaluation and publishing of SDAR backbones and MRP heads."""
