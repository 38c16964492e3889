"""A cell as an object: its front, and a whole one in one process; free of Ray."""
