"""From the valid fields of a call to one image request per image."""
