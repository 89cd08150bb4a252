"""A few launches of each kernel, for `compute-sanitizer python -m benchmarks.gpu.sanitized`."""

import torch
from mrp_trainer.doctor.kernels import samples_of

from modeling_mrp import MRPConfig

from .session import SMALL


@torch.no_grad()
def main() -> None:
    """Launch every kernel on small arguments."""
    config = MRPConfig(**SMALL)
    for dtype in (torch.bfloat16, torch.float32):
        for kernel, samples in samples_of(
            config, torch.zeros((), dtype=dtype, device="cuda")
        ).items():
            for arguments in samples:
                kernel.launch(*arguments)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
