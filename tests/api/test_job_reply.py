"""What is told of a job's progress."""

from __future__ import annotations

from dataclasses import replace

from ray_cluster.api.output.reply_writer import job_reply
from ray_cluster.protocol.jobs import JobView
from ray_cluster.protocol.outcomes import Progress
from tests.jobs.jobs_cell import job


def test_an_image_that_ended_without_being_made_is_no_progress() -> None:
    one = replace(job("j", 3), state="running")
    steps = one.requests[0].num_steps
    # one was made, one given up, and one is on its way
    progress = (None, None, Progress(None, 4, steps, attempts=1, predicted_s=None))
    assert job_reply(JobView(one, progress, num_made=1), str, 0.0).step == steps + 4
    assert job_reply(JobView(one, (None, None, None), num_made=1), str, 0.0).step == steps
