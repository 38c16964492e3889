"""How well the ends of requests are predicted at their admission."""
