"""One codec for everything that leaves a process: calls, stored jobs, exported states."""
