"""The control of the learning curve: the same run with its advantages shuffled within the batch.

If the policy still improved, what lifts it would not be GRPO's comparison of siblings. Takes train.py's flags:

    python -m tests.control_shuffled --env retail --seed 0 --run-dir runs/shuffled-0
    python report.py runs/seed-0 --compare runs/shuffled-0
"""
import sys

import torch

import train as loop


def shuffled_advantages(real, seed: int = 0):
    """`real` (grpo.group_advantages) with its result dealt out anew over the batch's non-zero places, seeded."""
    generator = torch.Generator().manual_seed(seed)

    def group_advantages(rewards, valid, **kwargs):
        advantages = real(rewards, valid, **kwargs)  # (P, G)
        teaching = advantages != 0
        values = advantages[teaching]
        dealt = advantages.clone()
        dealt[teaching] = values[torch.randperm(len(values), generator=generator)]
        return dealt
    return group_advantages


if __name__ == "__main__":
    loop.group_advantages = shuffled_advantages(loop.group_advantages)
    sys.exit(loop.main(sys.argv[1:]))
