"""What one process needs: signals, garbage collector, machine."""
