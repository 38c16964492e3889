"""The dispatcher's own code, free of Ray: the queue, the leases, and their asyncio service."""
