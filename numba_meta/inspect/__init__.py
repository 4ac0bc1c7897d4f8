"""Plans as tables and drawings: what was decided, for a terminal and for a notebook. Reads data, decides nothing."""
