"""The processes that train one model, as started by ``torchrun``, and what they agree on."""

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kalman_attention.parallel.context import split_sequences, whole_sequences
from kalman_attention.parallel.exchange import RankGroup
from kalman_attention.parallel.sharding import broadcast_weights, collect, shard
from kalman_attention.parallel.shared_loss import LossFunction, Objective, SharedObjective

Kind = Literal["ddp", "fsdp"]
_ALONE = RankGroup(0, 1)
_RELEASE_SECONDS = 0.1  # a thread needs microseconds, but may have to wait for a core


class Parallel:
    """The processes that train together; without arguments, a single process.

    Ranks form a grid, data x context: the ranks of a row share sequences, and each row processes a
    part of every batch. Weights are replicated on every rank (``"ddp"``) or sharded over all of
    them (``"fsdp"``). All ranks read the same stream of batches and keep their part of each, so
    that the batches, their order and the cursor are those of a single process.

    Args:
        kind: ``"ddp"`` or ``"fsdp"``; None for one process.
        context: number of ranks that share a sequence.
        device: device of this process.
        timeout: seconds after which a rank stops waiting for others of its row.
    """

    def __init__(
        self,
        kind: Kind | None = None,
        context: int = 1,
        device: torch.device | str = "cpu",
        timeout: float = 600.0,
    ) -> None:
        self.kind, self.device = kind, torch.device(device)
        self.everyone = self.sharing = _ALONE
        self._mesh: DeviceMesh | None = None
        if kind is None and context == 1:
            return
        if kind not in ("ddp", "fsdp"):
            raise ValueError(f"kind must be 'ddp' or 'fsdp', got {kind!r}.")
        size = dist.get_world_size()
        if context < 1 or size % context:
            raise ValueError(
                f"{size} ranks cannot be divided into groups of {context} that share sequences. "
                "Choose a context that divides the number of ranks."
            )
        self.everyone = RankGroup(dist.get_rank(), size)
        self.sharing = _row(self.everyone, context, timedelta(seconds=timeout))
        self._mesh = init_device_mesh(self.device.type, (size,)) if kind == "fsdp" else None

    def __enter__(self) -> "Parallel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.everyone.size > 1 or self.kind is not None:
            dist.destroy_process_group()
            # DDP keeps the threads of Gloo alive after that (torch 2.13). One that still releases
            # the tensors of the last exchange when the interpreter shuts down aborts the process.
            time.sleep(_RELEASE_SECONDS)

    @property
    def main(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.everyone.rank == 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.everyone.size

    @property
    def seed_parts(self) -> tuple[int | str, ...]:
        """Parts of random seeds that distinguish this rank; rank 0 has those of one process."""
        return () if self.main else ("rank", self.everyone.rank)

    @contextlib.contextmanager
    def prepared(
        self, model: nn.Module, groups: Sequence[dict[str, Any]] | None
    ) -> Iterator[Sequence[dict[str, Any]] | None]:
        """Prepare a model for all ranks: weights of rank 0, sharded if so, sequences split.

        Args:
            model: the model, modified in place.
            groups: its parameter groups, or None.

        Yields:
            The same groups with the parameters that the model has now.
        """
        if self.kind is None:
            yield groups
            return
        # Sharding replaces the parameters, so groups are rebuilt by name.
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        broadcast_weights(model)
        if self._mesh is not None:
            shard(model, self._mesh)
        if groups is not None:
            own = dict(model.named_parameters())
            groups = [
                {**group, "params": [own.get(names.get(id(p), ""), p) for p in group["params"]]}
                for group in groups
            ]
        cut = self.sharing.size > 1
        with split_sequences(model, self.sharing) if cut else contextlib.nullcontext():
            yield groups

    def objective(self, model: nn.Module, loss: LossFunction) -> Objective:
        """The loss over all ranks of a model that was ``prepared``."""
        if self.kind is None:
            return Objective(model, loss)
        ddp = self.kind == "ddp"
        return SharedObjective(model, loss, self.everyone, self.sharing, ddp=ddp)

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """A context in which every rank evaluates independently, on whole sequences."""
        with whole_sequences(model):
            yield
        if self.kind == "fsdp":
            model.reshard()  # type: ignore[operator] # only a backward pass would do it

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors, on the rank that writes; all ranks must call this."""
        return dict(tensors) if self.kind is None else collect(tensors, keep=self.main)

    def agree(self, value: int) -> int:
        """The maximum of a number over all ranks."""
        if self.size == 1:
            return value
        return int(self.everyone.largest(torch.tensor(value, device=self.device)))

    def follow(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values of rank 0, on every rank; all ranks must pass the same names."""
        if self.size == 1:
            return dict(values)
        found = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.broadcast(found, 0)
        return dict(zip(values, found.tolist(), strict=True))

    def command(self, program: Sequence[str]) -> str | None:
        """The command that starts all ranks again; None if it cannot be determined."""
        local = os.environ.get("LOCAL_WORLD_SIZE")
        if self.kind is None or local is None or int(local) != self.size:
            return shlex.join(program) if self.kind is None else None
        rest = [word for word in program[1:] if word != "-u"]
        return shlex.join(["torchrun", f"--nproc-per-node={local}", *rest])


def from_environment(
    kind: Kind = "ddp",
    *,
    context: int = 1,
    timeout: float = 600.0,
    backend: str | None = None,
) -> Parallel:
    """Join the ranks started by ``torchrun``; use in a ``with`` statement.

    Args:
        kind: ``"ddp"``, weights replicated on every rank, or ``"fsdp"``, sharded over all.
        context: number of ranks that share a sequence; must divide the number of ranks.
        timeout: seconds after which a rank stops waiting for another.
        backend: torch's backend; None for NCCL if there is a GPU for every rank, else gloo.

    Returns:
        An argument for ``fit(..., parallel=...)``. Move the model to its ``device`` first.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set in the environment: start the program with torchrun, "
            "for example torchrun --nproc-per-node=2 train.py, or train in one process."
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() > local:
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    _join(backend, timedelta(seconds=timeout))
    try:
        return Parallel(kind, context, device, timeout)
    except BaseException:
        dist.destroy_process_group()
        raise


def _row(everyone: RankGroup, context: int, timeout: timedelta) -> RankGroup:
    """The ranks that share sequences with this one."""
    # Not a two-dimensional mesh: its groups ignore the timeout and wait for half an hour.
    place, size = everyone.rank % context, everyone.size
    if context in (1, size):
        return RankGroup(place, context)
    rows = [list(range(i, i + context)) for i in range(0, size, context)]
    handle, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout)  # type: ignore[no-untyped-call]
    return RankGroup(place, context, handle)


def _join(backend: str, timeout: timedelta) -> None:
    """Connect to the other ranks."""
    # torchrun keeps one store across restarts, in which a restarted rank would find the addresses
    # of ranks that died (torch 2.13). On one machine all ranks agree on the number of restarts, so
    # each start gets its own prefix; on several machines the counts may differ.
    environment = os.environ
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    kept = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not kept or environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]:
        dist.init_process_group(backend, timeout=timeout)
        return
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = TCPStore(address, port, size, is_master=False, timeout=timeout)
    start = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"start-{start}", store)
    dist.init_process_group(backend, timeout=timeout, store=own, rank=rank, world_size=size)
