"""What a call gets: replies, streams of events, and errors as answers."""
