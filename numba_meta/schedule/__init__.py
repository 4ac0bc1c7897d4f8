"""From a graph to a recorded step: infer split states, cut, localize per device, lower to kernel calls, lay out memory, bind.

In: a graph, the states of its leaves, devices. Out: plans (data) and recordings that run without Python. Page "How a step runs".
"""
