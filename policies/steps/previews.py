"""After which denoising steps an unfinished image is shown."""

from __future__ import annotations

# as many as OpenAI's ``partial_images`` allows
MAX_PREVIEWS = 3


def preview_steps(num_steps: int, num_previews: int) -> tuple[int, ...]:
    """Return the steps after which a preview is made: in equal distances, and not after the last.

    There are fewer than ``num_previews`` where there are not enough steps.
    """
    steps = {round(num_steps * part / (num_previews + 1)) for part in range(1, num_previews + 1)}
    return tuple(sorted(step for step in steps if 0 < step < num_steps))
