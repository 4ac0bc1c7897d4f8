"""Plans as tables and drawings: what was decided, for a terminal and for a notebook. Reads data, decides nothing.

In comes a loaded model, out come a `Table` or a figure (the drawings need the extra `plots`):

    cut_table      how each tensor is divided: type, shape, state, pieces     draw_cuts       a layer's tensors, to scale
    meeting_table  where the devices meet in a step                           draw_placement  where the pieces lie
    call_table     what a device does in a step, kernel by kernel             draw_workspace  memory reused in a step

`model.plan` is the summary of it all. `facts.py` has the same as dataclasses.
"""

from numba_meta.inspect.draw import draw_cuts, draw_placement, draw_workspace
from numba_meta.inspect.tables import Table, call_table, cut_table, meeting_table

__all__ = ["Table", "call_table", "cut_table", "draw_cuts", "draw_placement", "draw_workspace", "meeting_table"]
