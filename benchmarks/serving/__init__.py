"""The whole service: what it adds to the engine, and what memory it takes."""
