"""DP-SGD on any PyTorch model."""
