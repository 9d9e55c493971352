"""Names that the pinned stack calls and newer libraries no longer have."""

from __future__ import annotations

import numpy


def numpy_product() -> None:
    """megatron-core 0.12 and 0.13 call `numpy.product`, gone since numpy 2: saving the distributed optimizer dies."""
    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod
