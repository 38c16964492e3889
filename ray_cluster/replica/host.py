"""What the process of a worker has for its skill."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ray_cluster.config.kinds import WorkerKind
from ray_cluster.config.sections.workers import WorkerConfig
from ray_cluster.config.slices import registered
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Registration
from ray_cluster.replica.group.processes import StartRank, start_child


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """A process that is a worker, or several.

    Attributes:
        replica_id: of the worker.
        node: where it runs.
        link: the dispatcher.
        coder: codes images in processes of their own.
        clock: monotonic seconds.
        is_brief: whether it is there for a call of the user who runs it: no step is measured first,
            and LoRAs are read in threads, as they are as good as the model's own files.
        start_rank: starts a rank of a group; as a child of this process unless given.
        making: held while a model is made, which changes torch for the whole process meanwhile.
    """

    replica_id: str
    node: str
    link: DispatcherLink
    coder: ImageCoder
    clock: Callable[[], float] = time.monotonic
    is_brief: bool = False
    start_rank: StartRank = start_child
    making: threading.Lock = field(default_factory=threading.Lock)

    def registration(
        self,
        kind: WorkerKind,
        worker: WorkerConfig,
        *,
        step_cost: StepCost,
        began_s: float,
        device_type: str = "cpu",
    ) -> Registration:
        """Return how a worker registers that makes no images with a model.

        Args:
            began_s: when it began to load.
        """
        return Registration(
            replica_id=self.replica_id,
            profile=None,
            max_in_flight=worker.most_in_flight,
            max_batch=worker.max_batch,
            step_cost=step_cost,
            pool=worker.name,
            kind=kind,
            served_as=worker.name,
            device_type=device_type,
            node=self.node,
            load_s=self.clock() - began_s,
            arguments=registered(worker),
        )
