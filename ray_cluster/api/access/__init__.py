"""Who calls, from where, and what every call passes through before its route."""
