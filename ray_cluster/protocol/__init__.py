"""What processes say to each other: leases, jobs, progress, and how they call."""
