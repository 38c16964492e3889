"""A worker as the dispatcher sees it: registers, polls, reports, releases leases."""
