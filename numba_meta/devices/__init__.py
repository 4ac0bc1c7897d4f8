"""Devices: memory, streams, events and copies; several of them used as one.

In: device names (`cpu:0`, `cpu:0?mem=2G`). Out: buffers, streams that run recorded programs.
"""
