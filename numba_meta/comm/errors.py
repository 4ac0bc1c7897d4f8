"""The errors of ranks. They end the whole launch, with one reason on every rank."""

from __future__ import annotations

from numba_meta.errors import NumbaMetaError


class RankError(NumbaMetaError):
    """Ranks that cannot work together: a launch without a usable MPI, calls that do not fit each other, a rank that failed or vanished."""


class JoinError(RankError):
    """The ranks did not join; every rank that still lives raises the same one, which names the rank, its host and its reason."""
