"""The service against the common practice: the same requests, the same machine, in turns."""
