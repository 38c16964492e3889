"""How many decisions one dispatcher carries: the real services, and replicas that only pretend."""
