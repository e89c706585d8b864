"""Digits on Flower, privately."""
