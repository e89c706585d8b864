"""What stands in front of a private learner: networks that learn well under noise, fixed and privately fitted features.

architectures   small networks, linear models and residual networks; features of a pretrained one
scattering      fixed wavelet features of images: no privacy is spent
efficientnet    a pretrained network whose weights are read from a file
projection      private principal components
whitening       private means and second moments
"""

from __future__ import annotations

from terrine.errors import MissingExtra

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtra("torch", extra="torch") from error
