"""Loading over ranks: every rank checks its part and plans, all join or none does, and only then memory is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from numba_meta.comm.communicators import CommunicatorFactory, forced_name, offered_names
from numba_meta.comm.failure import RankLaunch
from numba_meta.comm.join import JoinRequest
from numba_meta.comm.mpi import cpu_factories
from numba_meta.comm.record import facts_of
from numba_meta.devices.host_memory import available_bytes
from numba_meta.devices.parse import DeviceSpec
from numba_meta.models.architectures.description import ModelDescription, describe_model
from numba_meta.models.cache.state_file import identify_model
from numba_meta.models.files.gguf import GGUFFile
from numba_meta.models.loading.load_plan import LoadOptions, LoadPlan, check_options, choose_threads, plan_load
from numba_meta.models.loading.planner import smallest_graph
from numba_meta.models.running.ranks import RankGroup, check_host_memory, leaf_of_devices
from numba_meta.models.running.step_shape import leaf_state
from numba_meta.models.running.weights import plan_weights
from numba_meta.schedule.ranks import Ranks, ReductionTable
from numba_meta.split.policy import describe_cuts
from numba_meta.tensor import Role

_OWN = ("threads",)  # options that ranks need not share


class RankLoad:
    """One load of this rank, until the model owns what it opened."""

    def __init__(self, launch: RankLaunch, options: LoadOptions) -> None:
        self._launch = launch
        self._options = options
        self._file: GGUFFile | None = None

    def join(
        self, open_file: Callable[[], GGUFFile], check: Callable[[GGUFFile, ModelDescription], None] = lambda *_: None
    ) -> tuple[GGUFFile, ModelDescription, LoadPlan, RankGroup]:
        """The file and what is decided for this rank, once all ranks have agreed. Raises the same error on every rank, `check`'s too."""
        launch, planned = self._launch, list[tuple[GGUFFile, ModelDescription, LoadPlan]]()

        def prepare() -> JoinRequest:
            check_options(self._options, launch.size)
            file = self._file = open_file()
            model = describe_model(file)
            check(file, model)
            plan = plan_load(model, self._options, launch.rank, launch.size)
            planned.append((file, model, plan))
            return self._request(file, model, plan)

        joined = launch.join(prepare, release=self.close)
        ((file, model, plan),) = planned
        check_host_memory(joined)
        launch.calls.n_models += 1
        n_threads = choose_threads(self._options.threads or joined.threads(), len(plan.specs))
        ranks = Ranks(launch.rank, plan.rank_devices, self._table(plan))
        return file, model, replace(plan, n_threads=n_threads), RankGroup(launch, joined, ranks, launch.calls.n_models)

    def _request(self, file: GGUFFile, model: ModelDescription, plan: LoadPlan) -> JoinRequest:
        identity = identify_model(file, model.config.shape.n_layer, model.config.shape.n_vocab)
        options = {name: value for name, value in asdict(self._options).items() if name not in _OWN}
        return JoinRequest(
            facts_of(str(identity).encode() + identity.digest.encode(), "; ".join(describe_cuts(plan.cuts)), options),
            offers=offered_names(self._launch.world, factories_for(plan.specs[0]), forced_name()),
            forced=forced_name(),
            needed_host_bytes=needed_bytes(model, plan, self._launch.rank),
            available_host_bytes=available_bytes(),
        )

    def _table(self, plan: LoadPlan) -> ReductionTable:
        reduction = self._launch.reduction_for(str(self._options.devices), factories_for(plan.specs[0]))
        table: ReductionTable = reduction.communicators[0].table  # type: ignore[attr-defined]
        return table

    def close(self) -> None:
        """Closes the file, where the load ended early."""
        if self._file is not None:
            self._file.close()
            self._file = None


def factories_for(device: DeviceSpec) -> tuple[CommunicatorFactory, ...]:
    """How a rank whose first device this is can reduce. Raises `DeviceError` where there is no such GPU."""
    if device.kind == "cpu":
        return cpu_factories()
    from numba_meta.comm.ipc import IpcFactory
    from numba_meta.comm.mpi_staged import StagedMpiFactory
    from numba_meta.comm.nccl import NcclFactory
    from numba_meta.devices.cuda_driver import open_gpu

    gpu = open_gpu(device.index)
    return IpcFactory(gpu), NcclFactory(gpu), StagedMpiFactory(gpu), StagedMpiFactory(gpu, pairwise=True)


def needed_bytes(model: ModelDescription, plan: LoadPlan, rank: int) -> int:
    """Bytes of weights and caches that a rank will keep in its host's memory: all of them, unless it computes on GPUs."""
    leaves, state = smallest_graph(model, plan).leaves, leaf_state(plan.cuts)
    devices = plan.rank_devices[rank]
    weights = plan_weights([leaf for leaf in leaves if leaf.role is Role.WEIGHT], plan.cuts.weights, plan.rank_devices[-1].stop, devices)
    on_host = plan.specs[0].kind == "cpu"
    total = sum(weights.n_bytes) if on_host else 0
    for leaf in leaves:
        if leaf.role is Role.HOST or (leaf.role is Role.CACHE and on_host):
            copies = len(devices) if leaf.role is Role.CACHE and not state(leaf).is_split else 1
            total += copies * leaf_of_devices(leaf, state(leaf), devices).n_bytes
    return total
