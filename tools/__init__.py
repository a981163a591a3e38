"""Scripts of the repository: checks, and the tables in the docs."""
