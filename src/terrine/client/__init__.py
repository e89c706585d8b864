"""Asking a gateway from afar."""
