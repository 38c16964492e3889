"""The states of unfinished images, in a store that outlives the replica."""
