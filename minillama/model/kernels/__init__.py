"""RMSNorm's kernels: ``rms_norm`` is the fast one, ``rms_norm_reference`` the one to read."""

from minillama.model.kernels.fused import rms_norm
from minillama.model.kernels.reference import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_reference"]
