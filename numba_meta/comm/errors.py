"""The errors of ranks. They end the whole launch, with one reason on every rank."""

from __future__ import annotations

from numba_meta.errors import NumbaMetaError


class RankError(NumbaMetaError):
    """Ranks that cannot work together: a launch without a usable MPI, calls that do not fit each other, a rank that failed or vanished."""


class JoinError(RankError):
    """The ranks did not join; every rank that still lives raises the same one, which names the rank, its host and its reason.

    `speaker` is the rank that tells the user, so that one reason is not said N times.
    """

    def __init__(self, message: str = "", *, exit_status: int = 1, speaker: int = 0) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.speaker = speaker


class UnsuitedError(RankError):
    """A communicator that is not for these ranks, by where they run or what their GPUs reach. Nothing failed: another one serves them."""


class MpiError(RankError):
    """A function of MPI failed: most often since another rank has gone, which then is the reason that counts."""
