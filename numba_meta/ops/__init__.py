"""Operations, one file per family; each with its shape rule, its split rule and the kernels it binds to.

In: tensors and parameters. Out: result tensors, split states, and for each device a list of kernel calls.
"""

from numba_meta.ops import attention, collective, concat, elementwise, layout, matmul, norm, rope, rows, transport, unary  # noqa: F401
