"""The weights with which checkpoints of one run are merged, and what they have to do with a decay of the learning rate.

Between two checkpoints a model moves by the updates of the steps between them. With the checkpoints x_0, ..., x_n and
u_i = x_i - x_(i-1), a weighted mean is

    c_0 x_0 + ... + c_n x_n  =  x_0 + d_1 u_1 + ... + d_n u_n     with d_i = c_i + ... + c_n,

since the c sum to 1. The mean is the oldest checkpoint plus its updates, each multiplied by d_i, as if the learning
rate had been multiplied by it in these steps: a decay that was not trained. The weights of a given decay are therefore
its differences, c_0 = 1 - d_1, c_i = d_i - d_(i+1), c_n = d_n. They are not negative, because a decay never rises. Only
the gradients differ from those of a trained decay: they are those of the learning rate that the run had.

Source: WSM, arXiv 2507.17634. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.errors import unknown_name

UNIFORM, ONE_SQRT = "uniform", "1-sqrt"
SHAPES = (UNIFORM, ONE_SQRT)


def merge_weights(steps: Sequence[int], shape: str) -> list[float]:
    """The weight of each checkpoint; they are not negative and sum to 1.

    Args:
        steps: of the checkpoints, ascending, at least two.
        shape: "uniform", each the same: with equal distances a linear decay. Or "1-sqrt", a decay of
            1 - sqrt((s - first) / (last - first)) at step s, as that of the schedule `wsd` to 0 (recipes/schedules.py);
            the d of two neighbouring checkpoints is its mean over the steps between them.

    Raises:
        UserError: an unknown shape.
    """
    if shape not in SHAPES:
        raise unknown_name("shape", shape, SHAPES, f"--shape {ONE_SQRT}", typed="--shape {}")
    if shape == UNIFORM:
        return [1.0 / len(steps)] * len(steps)
    first, length = steps[0], steps[-1] - steps[0]
    decays = [1.0]
    for start, end in zip(steps[:-1], steps[1:], strict=True):
        done = math.fsum(math.sqrt((step - first) / length) for step in range(start, end))
        decays.append(1.0 - done / (end - start))
    decays.append(0.0)
    return [before - after for before, after in zip(decays[:-1], decays[1:], strict=True)]
