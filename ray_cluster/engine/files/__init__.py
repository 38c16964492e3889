"""What the files of a model say, and the memory that it will need."""
