"""A model that runs: weights on devices, recordings of steps, a context that takes batches and gives logits.

Comes in: a load plan and tokens. Goes out: rows of logits.
"""
