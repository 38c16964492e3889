"""From a pool's configuration to the skill of a replica that calls a pipeline."""

from __future__ import annotations

import logging
from dataclasses import replace

from ray_cluster.config.slices import WorkerArguments
from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.device.gpu import number_format_here
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.engine.pipelines.loading import load_pipeline
from ray_cluster.engine.pipelines.measuring import check_largest, measured_cost
from ray_cluster.engine.pipelines.runner import CallRunner
from ray_cluster.engine.stages.warmup import device_name, prepare_threads
from ray_cluster.models.local import model_digest
from ray_cluster.models.prompt_tokens import digest_of
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import LoadedWords
from ray_cluster.protocol.settings import Capacity, WorkerSettings, in_force
from ray_cluster.replica.denoise.builder import delivery_of, states_of
from ray_cluster.replica.denoise.sent_images import reading_per_megapixel_s
from ray_cluster.replica.denoise.skill import DenoiseSkill
from ray_cluster.replica.host import Host

logger = logging.getLogger(__name__)

# the image that is made, and the next: what is held cannot be made elsewhere
_MOST_HELD = 2
# of a step that nobody has measured
_UNKNOWN = StepCost(fixed_s=0.1, per_megapixel_s=1.0, source="modelled")


class CallSkill(DenoiseSkill):
    """Keeps one pipeline busy with leases; see :class:`DenoiseSkill`."""

    def apply(self, settings: WorkerSettings) -> None:
        """Apply other settings; one image is made at a time."""
        self.capacity = Capacity(min(settings.max_in_flight, _MOST_HELD), 1)


def build(arguments: WorkerArguments, settings: WorkerSettings | None, host: Host) -> CallSkill:
    """Load the pipeline of a pool, call it at its largest size, and return its skill, not yet
    started. For a brief call nothing is made first.

    Raises:
        ConfigError, ModelUnsupported, MemoryRefused: see :func:`.load_pipeline` and
            :func:`.check_largest`.
    """
    began_s = host.clock()
    (pool,) = arguments.pools
    # a table of fewer steps is refused where the engine is chosen
    pool = in_force(pool, settings)
    prepare_threads(pool.num_threads)
    model = load_pipeline(pool)
    digest = model_digest(resolve_folder(*pool.files))
    costs = StepCosts(clock=host.clock)
    runner = CallRunner(model, costs, clock=host.clock, num_threads=pool.num_threads)
    cost = _UNKNOWN
    if not host.is_brief:
        runner.call(lambda: check_largest(model))
        cost = runner.call(lambda: measured_cost(model, host.clock))
        reading_s = reading_per_megapixel_s(host.coder, host.clock)
        cost = replace(cost, encode_per_megapixel_s=reading_s)
    costs.begin(cost)
    logger.info("pool %s: step %s", pool.name, cost)
    registration = host.registration("denoise", pool, step_cost=cost, began_s=began_s)
    words = LoadedWords(number_format_here(pool), model.words, model.memory_words)
    return CallSkill(
        replace(
            registration,
            served_as="",
            max_batch=1,
            max_in_flight=min(registration.max_in_flight, _MOST_HELD),
            model_digest=digest,
            profile=replace(model.profile, prompt_digest=digest_of(model.tokenizers)),
            device_type=device_name(model.device),
            prompt_tokenizers=model.tokenizers,
            words=words,
        ),
        runner=runner,
        delivery=delivery_of(arguments.storage, host.coder),
        states=states_of(arguments.storage, digest),
        link=host.link,
        settings=settings,
    )
