"""Where tensors lie in memory.

In come sizes, lifetimes and split states' bytes, out come offsets:

    placement.py  meta offsets to offsets on each device, whole or by share, with the overlap check
    layout.py     the graph allocator: memory is reused after a tensor's last reader
    workspace.py  a layout and an allocation per device, resized as a whole, with a generation
"""
