"""The KV cache: which cells hold what, where it lies on the devices and in the host, what is done with it, and state files.

Comes in: a cache's shape and the leaves of a graph. Goes out: cells for a step, windows to deliver, and operations that keep them right.
"""
