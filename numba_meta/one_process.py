"""What belongs to the process that made it: memory, threads and files of a model are neither copied nor sent elsewhere."""

from __future__ import annotations

import os
from typing import NoReturn, SupportsIndex

from numba_meta.errors import UsageError


class OneProcess:
    """Refuses `copy` and `pickle` (with which `multiprocessing` sends things to other processes), and use in a forked process."""

    _what = "a loaded model"

    def __init__(self) -> None:
        self._process = os.getpid()

    def _check_process(self) -> None:
        """Raises `UsageError` in a fork of the process that made this: threads are not there, and a cache would be its parent's too."""
        if self._process != os.getpid():
            raise UsageError(
                f"{self._what} of process {self._process} cannot be used in its fork {os.getpid()}; load it there (numba_meta.load), in a "
                "process that was spawned: one that has computed is best not forked"
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            f"{self._what} cannot be copied or pickled: its memory and threads belong to this process; hand over the model's path and load "
            "it again where it is needed, with numba_meta.load"
        )
