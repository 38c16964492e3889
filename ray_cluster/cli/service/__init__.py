"""``serve``: checks, starts, reports, drains and stops a service."""
