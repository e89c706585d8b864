"""Processes for tests: forked from a server that has torch loaded already but has not used it."""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "terrine.sgd"])
