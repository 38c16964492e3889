"""The worker of a ControlNet, and the client that models' replicas call it with."""
