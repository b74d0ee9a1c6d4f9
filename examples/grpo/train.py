"""GRPO on Megatron-Core with exact loss aggregation; ``run.sh`` starts it.

torchrun --nproc-per-node 4 -m examples.grpo.train --cpu      # or without --cpu, on GPUs
"""

from __future__ import annotations

import logging
import os

from examples.grpo.options import parse


def main() -> None:
    options = parse()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # a resumed run must be equal
    if options.cpu:
        from megatron_loss_agg.mcore import cpu

        cpu.enable()
    # Not earlier, since it imports Megatron: on a CPU the stand-ins for the device come first.
    import torch.distributed as dist

    from examples.grpo.loop import train

    train(options)
    if dist.get_rank() == 0:
        from examples.grpo import plot

        plot.main(options.output / "reward.png", [options.output])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
