"""CUDA kernels: the same arithmetic as `kernels/cpu`, on a GPU.

In: addresses in device memory, strides, row counts. Out: machine code (cubin) for one compute capability, kept on disk. Everything compiles
and assembles without a GPU; `api.py` alone imports `numba.cuda`.
"""
