"""How well the ends of requests are predicted when they are let in."""
