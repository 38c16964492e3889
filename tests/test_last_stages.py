"""A kind of last stage is named where docs/architecture.md says; all else follows from its rows."""

from __future__ import annotations

import re
from pathlib import Path

from ray_cluster.api.output.error_answers import from_failure, from_refusal
from ray_cluster.config.kinds import KINDS
from ray_cluster.errors import LAST_STAGES
from ray_cluster.policies.types import Offer
from ray_cluster.requests import Failure
from tests.fakes import image_request

CODE = Path(__file__).parent.parent / "ray_cluster"
# the skill's, and the section
OWN = (CODE / "replica/upscale", CODE / "config/sections")
# Ray Serve's words for more replicas
OF_RAY = re.compile("upscale_delay_s|upscaling_factor")


def test_upscaling_is_named_nowhere_but_where_the_page_says() -> None:
    page = (CODE.parent / "docs/architecture.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w/]+\.py)`", page.partition("**A kind of worker**")[2]))
    files = [one for top in (CODE, *CODE.glob("*/")) for one in top.resolve().rglob("*.py")]
    texts = {one: OF_RAY.sub("", one.read_text(encoding="utf-8")) for one in set(files)}
    named = [one for one, text in texts.items() if "upscal" in text.lower()]
    assert {str(one.relative_to(CODE)) for one in named if one.parent not in OWN} <= listed
    assert len(named) < 23


def test_answers_of_a_last_stage_follow_from_its_row() -> None:
    for kind in LAST_STAGES:
        offer = Offer(accepted=False, reason="stage_not_ready", lane=f"{kind}:big")
        refused = from_refusal(offer, [image_request()], ())
        assert (refused.code, refused.param) == (f"{KINDS[kind].title}_not_ready", kind)
        failed = from_failure(Failure("a", "error", "no png", kind))
        assert (failed.code, failed.status) == (f"{KINDS[kind].work}_error", 500)
