"""One file per idea: how each torch function's inputs and output gradient become contributions."""

from terrine.sgd.clipping.rules import attention, convolution, embedding, linear, normalisation, recurrent

__all__ = ["attention", "convolution", "embedding", "linear", "normalisation", "recurrent"]
