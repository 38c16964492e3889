"""What decisions cost, and an hour of simulation, from one GPU to a thousand."""
