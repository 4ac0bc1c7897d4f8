"""Plans as tables and drawings: what was decided, for a terminal and for a notebook. Reads data, decides nothing.

In comes a loaded model, out come a `Table` or a figure (the drawings need the extra `plots`):

    cut_table      how each tensor is divided: type, shape, state, pieces     draw_cuts       a layer's tensors, to scale
    meeting_table  where the devices meet in a step                           draw_placement  where the pieces lie
    call_table     what a device does in a step, kernel by kernel             draw_workspace  memory reused in a step

`model.plan` is the summary of it all. `facts.py` has the same as dataclasses. From the transport plan of a cache in host memory, and from
timelines of real and virtual steps:

    draw_ring      where slots lie on the devices                             draw_timeline   what every stream did, and when
    draw_slots     how they are filled and read in a step                     write_chrome_trace  it for chrome://tracing
"""

from numba_meta.inspect.draw import draw_cuts, draw_placement, draw_workspace
from numba_meta.inspect.ring import draw_ring, draw_slots
from numba_meta.inspect.tables import call_table, cut_table, meeting_table
from numba_meta.inspect.timeline import draw_timeline, to_chrome_trace, write_chrome_trace
from numba_meta.tables import Table

__all__ = [
    "Table",
    "call_table",
    "cut_table",
    "draw_cuts",
    "draw_placement",
    "draw_ring",
    "draw_slots",
    "draw_timeline",
    "draw_workspace",
    "meeting_table",
    "to_chrome_trace",
    "write_chrome_trace",
]
