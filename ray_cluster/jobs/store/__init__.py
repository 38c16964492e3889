"""The store of jobs in a SQL database, and who owns it."""
