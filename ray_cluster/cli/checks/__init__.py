"""What ``doctor`` looks at; every check is a function that returns findings."""
